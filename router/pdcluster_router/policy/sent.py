"""How much prompt work a router sent to nodes lately. Pure; the caller says what time it is.

Rows that run tell the same (Little's law), but while there are few of them they tell it badly: an idle moment of a busy cluster looks like an idle
cluster. What other routers send is not in here.
"""

from __future__ import annotations

from math import exp

from pdcluster_router.cluster.view import NodeView

LATELY_S = 5.0
"""A few answers of a usual model, some tens of requests of a node that is worth being asked about."""


class SentWork:
    """Seconds of work with exponential forgetting. Owned by one thread."""

    def __init__(self, lately_s: float = LATELY_S) -> None:
        self._lately_s = lately_s
        self._work_s = 0.0
        self._moment = 0.0

    def add(self, node: NodeView, new_tokens: int, cached_tokens: int, now: float) -> None:
        """A prompt was sent to the node. What is not known yet costs nothing."""
        cost = node.cost
        if cost is not None:
            self.add_s(cost.prefill.seconds(new_tokens, cached_tokens), now)

    def add_s(self, work_s: float, now: float) -> None:
        """The same, by what it costs."""
        self._work_s = self._left_s(now) + work_s
        self._moment = now

    def per_second(self, now: float) -> float:
        """Nodes that this keeps busy."""
        return self._left_s(now) / self._lately_s if self._work_s else 0.0

    def _left_s(self, now: float) -> float:
        since_s = now - self._moment
        return self._work_s * exp(-since_s / self._lately_s) if since_s > 0.0 else self._work_s

"""Whether a request has room on nodes with a small backlog. Pure; reads a ClusterView.

A node is *open* for prompts while less than `backlog_s` of work waits there. That is enough to keep it busy, and so
little that the router still decides what comes next. The policy chooses among nodes. It may choose one that is not
open, for its cache, while some suitable node of that leg is open.

Rows share their node's steps, so one row too many slows all of them. A first token mostly has time. So a request waits
while the rows of its decode node are at their limit, but for no more than HALF of its first token's time.

A batch request goes only where it is in nobody's way (`core.room.has_batch_room`).

The rules stand in `core.room`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.core.generation import Mode
from pdcluster_router.core.node_row import BUSY, COMPUTES, DECODES, SERVES
from pdcluster_router.policy.base import Decision
from pdcluster_router.policy.predicted import compiled

LEG_OF_MODE: dict[Mode, int] = {"remote": COMPUTES, "local": SERVES}
MODES = tuple(LEG_OF_MODE)


@dataclass(frozen=True, slots=True)
class Headroom:
    """Whether nodes have room for a request.

    backlog_s: seconds of prompt work that may wait on a node.
    """

    backlog_s: float = 0.25

    def has_open(self, decision: Decision) -> bool:
        """Whether some node is open that could compute the prompt in the chosen mode."""
        return compiled.active.has_open(decision.view.table, decision.legs, *decision.rows, self.backlog_s)

    def keeps_rows_fast(self, decision: Decision, waited_s: float) -> bool:
        """Whether one more row leaves those of its decode node fast, or this request has no time left to wait."""
        query, late_s = decision.query, waited_s + (decision.record.ttft_s or 0.0)
        return compiled.active.keeps_rows_fast(
            decision.view.table, *decision.rows, query.num_tokens, query.expected_output, query.itl_s, late_s
        )

    def has_batch_room(self, decision: Decision) -> bool:
        """Whether a batch request is in nobody's way where the decision puts it."""
        return self._takes_batch(decision, *decision.rows)

    def closed_to_batch(self, decision: Decision) -> frozenset[str]:
        """Incarnations on which a batch request would be in the way of others."""
        view = decision.view
        return _named([row for row in range(view.size) if not self._takes_batch(decision, row, row)], view)

    def _takes_batch(self, decision: Decision, first: int, decode: int) -> bool:
        query = decision.query
        return compiled.active.has_batch_room(
            decision.view.table, first, decode, query.num_tokens, query.expected_output, query.itl_s, self.backlog_s
        )

    def usable(self, decision: Decision) -> frozenset[str]:
        """Incarnations that could compute the prompt in the chosen mode, open or not."""
        leg = LEG_OF_MODE[decision.record.mode]
        return _named([row for row, bits in enumerate(decision.legs) if bits & leg and not bits & BUSY], decision.view)

    def lacking(self, decision: Decision, *, is_paced: bool) -> frozenset[str]:
        """Incarnations whose room a request lacks that cannot go in the chosen mode. A free one of these is its own.

        is_paced: it would slow down rows; nothing else is lacking.
        """
        view = decision.view
        if decision.prefill is None:
            return _named([decision.rows[1]], view) if is_paced else self.usable(decision)
        decoding = _named([row for row, bits in enumerate(view.roster.legs) if bits & DECODES], view)
        if is_paced:
            return decoding
        found = frozenset() if compiled.active.any_row(view.table) else decoding
        is_open = compiled.active.any_open(view.table, decision.legs, COMPUTES, True, self.backlog_s)
        return found if is_open else found | self.usable(decision)

    def full_modes(self, view: ClusterView) -> frozenset[Mode]:
        """Modes in which no request has room."""
        table, legs, any_open = view.table, view.roster.legs, compiled.active.any_open
        has_row = compiled.active.any_row(table)
        return frozenset(
            mode for mode, leg in LEG_OF_MODE.items() if not any_open(table, legs, leg, has_row, self.backlog_s)
        )

    def soonest_s(self, view: ClusterView) -> float | None:
        """Seconds until the first of the nodes beyond their backlog has worked off the rest; None without any."""
        return compiled.active.least_excess_s(view.table, self.backlog_s) or None


def _named(rows: list[int], view: ClusterView) -> frozenset[str]:
    return frozenset(view.reported[row].incarnation for row in rows)

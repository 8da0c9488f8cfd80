"""Whether a node takes work that a router sends. The router is answered when not. Owned by the node loop's thread."""

from __future__ import annotations

from collections.abc import Callable

from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import MODEL_PARAM, Refused, RefusedLeg, Work
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer

RETRY_S = 0.05


class Acceptance:
    """models: digests of what the node serves (NodeCard.model_digest); none: requests for any are taken.
    embeds: whether it embeds prompts; otherwise it generates.
    """

    def __init__(self, node: str, standing: NodeAvailability, outbox: Outbox) -> None:
        self._node, self._standing, self._outbox = node, standing, outbox
        self.models: frozenset[str] = frozenset()
        self.embeds = False

    def takes(self, router: Peer, work: Work, leg: RefusedLeg, *, is_stuck: bool, is_pooled: bool = False) -> bool:
        """Whether the node takes work now, of this kind and for this model. is_pooled: an embedding is wanted."""
        if is_stuck or self._standing.refuses_work:
            state = "stuck" if is_stuck else "draining"
            self._outbox.message(
                router, Refused(work.request, work.attempt, leg, f"node {self._node} is {state}", RETRY_S)
            )
            return False
        return self.check(router, work, leg, lambda work: self._check_kind(is_pooled=is_pooled)) and self.check(
            router, work, leg, self._check_model
        )

    def check(self, router: Peer, work: Work, leg: RefusedLeg, rule: Callable[[Work], object]) -> bool:
        """Whether `rule` raises no BadRequest: no node of this kind can ever run the work then."""
        try:
            rule(work)
        except BadRequest as error:
            param = MODEL_PARAM if error.param == MODEL_PARAM else ""
            self._outbox.message(
                router, Refused(work.request, work.attempt, leg, str(error), 0.0, retryable=False, param=param)
            )
            return False
        return True

    def _check_kind(self, *, is_pooled: bool) -> None:
        """Raises BadRequest when tokens are wanted of a node that embeds, or the other way round."""
        if is_pooled and not self.embeds:
            raise BadRequest(
                f"node {self._node} embeds nothing: the native engine has no embeddings; nodes with --engine vllm and "
                "a pooling model do"
            )
        if self.embeds and not is_pooled:
            raise BadRequest(f"node {self._node} has a pooling model, which generates nothing; ask for embeddings")

    def _check_model(self, work: Work) -> None:
        """Raises BadRequest when the router prepared the work for what this node does not serve."""
        if work.model and self.models and work.model not in self.models:
            raise BadRequest(
                f"node {self._node} does not serve the model, text and weights that the request was prepared for: the "
                f"router says {work.model}, the node has {', '.join(sorted(self.models))}",
                MODEL_PARAM,
            )

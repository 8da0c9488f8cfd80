"""Whether a node takes work that a router sends. The router is answered when not. Owned by the node loop's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import HASH_BYTES, HASHES_PARAM, MODEL_PARAM, Refused, RefusedLeg, Work
from pdcluster.kv.hashing import extend
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer

log = logging.getLogger(__name__)

RETRY_S = 0.05
TOKEN_BYTES = 4


class Acceptance:
    """models: digests of what the node serves (NodeCard.model_digest); none: requests for any are taken.
    embeds: whether it embeds prompts; otherwise it generates.
    block_tokens: of a hash block; 0: hashes are not known yet, and not checked.
    """

    def __init__(self, node: str, standing: NodeAvailability, outbox: Outbox) -> None:
        self._node, self._standing, self._outbox = node, standing, outbox
        self.models: frozenset[str] = frozenset()
        self.embeds = False
        self.block_tokens = 0

    def takes(self, router: Peer, work: Work, leg: RefusedLeg, *, is_stuck: bool, is_pooled: bool = False) -> bool:
        """Whether the node takes work now, of this kind and for this model. is_pooled: an embedding is wanted."""
        if is_stuck or self._standing.refuses_work:
            state = "stuck" if is_stuck else "asleep" if self._standing.is_sleeping else "draining"
            self._outbox.message(
                router, Refused(work.request, work.attempt, leg, f"node {self._node} is {state}", RETRY_S)
            )
            return False
        return (
            self.check(router, work, leg, lambda work: self._check_kind(is_pooled=is_pooled))
            and self.check(router, work, leg, self._check_model)
            and self._names_fit(router, work, leg)
        )

    def _names_fit(self, router: Peer, work: Work, leg: RefusedLeg) -> bool:
        """Whether the block hashes are those of the tokens. Under a wrong name, KV would be found by other prompts. It
        is no fault of the client: the request may be tried again.
        """
        if not self.block_tokens or not work.hashes:
            return True
        num_bytes = len(work.hashes) // HASH_BYTES * self.block_tokens * TOKEN_BYTES
        if work.hash_root and len(work.token_ids) >= num_bytes:
            tokens = memoryview(work.token_ids)[:num_bytes]
            if extend(b"", tokens, root=work.hash_root, block_tokens=self.block_tokens) == work.hashes:
                return True
        reason = f"node {self._node} computes other block hashes of the tokens than router {router.node}"
        log.error("request %s is refused: %s", work.request, reason)
        self._outbox.message(router, Refused(work.request, work.attempt, leg, reason, RETRY_S, param=HASHES_PARAM))
        return False

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

"""Dynamo's KV router: weight × blocks to prefill + blocks that decode, least wins (docs/components/router, "cost function").

Blocks to prefill are those that wait on the node and the request's own, less `credit` × what is cached there; the credit shrinks by
1 ÷ (1 + `decay` × e), e the node's waiting prefill beyond the least loaded one's, in units of the request. On decode legs of a remote request only
decoding blocks count.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_router.cluster.view import NodeView
from pdcluster_router.policy.base import LegName, Query, Terms


class KvCost:
    name = "kv-cost"

    def __init__(self, weight: float = 1.0, credit: float = 1.0, decay: float = 0.0) -> None:
        self._weight = weight
        self._credit = credit
        self._decay = decay

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        least = min(node.work.prefill_tokens for node in nodes)
        return [self._score(node, leg, query, least) for node in nodes]

    def _score(self, node: NodeView, leg: LegName, query: Query, least: float) -> tuple[float, Terms]:
        work, block = node.work, node.block_tokens
        decoding = work.context_tokens / block
        if leg == "decode":
            return decoding, (("decode_blocks", decoding),)
        excess = (work.prefill_tokens - least) / max(query.num_tokens, 1)
        credit = self._credit / (1.0 + self._decay * excess)
        prefill = self._weight * max(work.prefill_tokens + query.num_tokens - credit * query.cached_on(node), 0.0) / block
        return prefill + decoding, (("prefill_blocks", prefill), ("decode_blocks", decoding))

"""SGLang's cache-aware rule (sgl-router, later SMG `cache_aware`): match prefixes while the load is even, balance it when it is not.

Uneven when (most − least requests) > `spread` and most > `ratio` × least: then the fewest requests win. Otherwise the longest match wins, if it
covers more than `match` of the prompt; if not, the node that caches least. Its trees are approximate; here the index is exact, which can only help.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_router.cluster.view import NodeView
from pdcluster_router.policy.base import LegName, Query, Terms


class Prefix:
    name = "prefix"

    def __init__(self, match: float = 0.3, spread: float = 64.0, ratio: float = 1.5) -> None:
        self._match = match
        self._spread = spread
        self._ratio = ratio

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        requests = [float(node.num_requests) for node in nodes]
        matches = [query.cached_on(node) / query.num_tokens for node in nodes]
        if max(requests) - min(requests) > self._spread and max(requests) > self._ratio * min(requests):
            return [(cost, (("requests", cost),)) for cost in requests]
        if max(matches) > self._match:
            return [(-share, (("matched", -share),)) for share in matches]
        return [(size, (("cache_size", size),)) for size in map(_cache_size, nodes)]


def _cache_size(node: NodeView) -> float:
    """Pages that hold something."""
    return float(node.load.pages_total - node.load.pages_free) if node.load is not None else 0.0

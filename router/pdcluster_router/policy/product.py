"""The product of uncached work and load: LMetric's score (arXiv 2026), and the cold cost of DESIGN §7.

(uncached tokens + 1) × (requests in flight + 1). It needs no calibration. It follows the prefix cache while nodes are
idle, and the load otherwise. The terms are the two factors.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_router.cluster.view import NodeView
from pdcluster_router.policy.base import LegName, Query, Terms


class Product:
    """Implements scored.Rule."""

    name = "product"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        return [product(node, query) for node in nodes]


def product(node: NodeView, query: Query) -> tuple[float, Terms]:
    uncached, requests = query.num_tokens - query.cached_on(node) + 1.0, node.num_requests + 1.0
    return uncached * requests, (("uncached_tokens", uncached), ("requests", requests))

"""Mooncake's Conductor (FAST'25, algorithm 1): the prefill node with the least predicted TTFT, the decode node with the least predicted TPOT.

TTFT is queue + compute of what is not cached. Where another node's prefix is at least `balance` times as long, it is queue + transfer + compute
behind that prefix, and the choice says from which node to pull it (only over a measured bandwidth). Its early rejection is our admission, not here.
While no node knows what steps cost: the product score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Choice, LegName, Query, Terms
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scored import Scored


class Conductor:
    """Implements Policy."""

    name = "conductor"

    def __init__(self, balance: float = 2.0) -> None:
        self._balance = balance
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> Choice:
        if view.typical_cost is None:
            return replace(self._cold.choose(query, view), policy=self.name)
        rule = Algorithm1(view, self._balance)
        choice = Scored(rule).choose(query, view)
        return replace(choice, pull=rule.source(choice.first, query))

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        rule = Algorithm1(view, self._balance) if view.typical_cost is not None else Product()
        return Scored(rule).choose_decode(query, view, prefill)


@dataclass(frozen=True, slots=True)
class Algorithm1:
    """Implements scored.Rule for one view."""

    view: ClusterView
    balance: float
    name: str = Conductor.name

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        score = self._tpot if leg == "decode" else self._ttft
        return [score(node, query) for node in nodes]

    def source(self, node: NodeView, query: Query) -> NodeView | None:
        """The node with the longest prefix, when `node` should fetch that; None when its own will do."""
        best = max(self.view.accepting, key=query.held_on)
        own = query.cached_on(node)
        if query.held_on(best) <= own or query.held_on(best) < self.balance * own or not best.can_exchange(node):
            return None
        return best if best.bandwidth.get(node.name, 0.0) > 0 else None

    def _ttft(self, node: NodeView, query: Query) -> tuple[float, Terms]:
        pace = self.view.pace_of(node)
        assert pace is not None
        source, cached = self.source(node, query), query.cached_on(node)
        transfer = 0.0
        if source is not None:
            missing = query.held_on(source) - cached
            transfer = missing * node.kv_bytes_per_token / source.bandwidth[node.name]
            cached += missing
        compute = pace.prefill.seconds(max(query.num_tokens - cached, 1), cached) * pace.stretch
        return pace.wait_s + transfer + compute, (("wait", pace.wait_s), ("transfer", transfer), ("compute", compute))

    def _tpot(self, node: NodeView, query: Query) -> tuple[float, Terms]:
        pace = self.view.pace_of(node)
        assert pace is not None
        tpot = pace.decode.seconds(pace.rows + 1, pace.context_tokens + query.num_tokens)
        return tpot, (("tpot", tpot),)

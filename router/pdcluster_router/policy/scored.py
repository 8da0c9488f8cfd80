"""The frame of policies that compare nodes by one number: it decides pools, modes and ties; a Rule gives the number.

The mode is remote when both pools have a node and the two differ. It is local when a pool is empty, all nodes are
mixed, or one mixed node is best at both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import Mode
from pdcluster_router.policy import pools as filters
from pdcluster_router.policy.base import Candidate, LegName, Query, RoutingDecision, Terms
from pdcluster_router.policy.predicted.node_rows import Pool


class Rule(Protocol):
    @property
    def name(self) -> str: ...

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        """The cost of each node, least is best, and the terms behind it."""
        ...


class Scored:
    """Implements Policy. Ties go to the node with fewer requests, then by name."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    @property
    def name(self) -> str:
        return self._rule.name

    def choose(self, query: Query, view: ClusterView) -> RoutingDecision:
        found = filters.pools(query, view)
        if query.force == "local" or (query.force == "auto" and not found.is_split):
            return self._local(found, query, view)
        prefills = self._rank(filters.ready(found.prefill, query, view), "prefill", query, view)
        prefill = prefills[0].node
        others = filters.partners(found.decode, prefill, view)
        may_be_local = filters.may_be_local(query, found)
        decodes = self._rank(
            filters.ready(found.decode if may_be_local else others, query, view), "decode", query, view
        )
        if may_be_local and not others:
            return self._local(found, query, view)  # its KV can go nowhere, and it may be too small for the output
        if may_be_local and decodes[0].node is prefill:
            alone = Candidate(
                prefill, "local", prefills[0].cached_tokens, prefills[0].names, prefills[0].values, prefills[0].cost
            )
            return self._choice("local", None, prefill, (alone, *prefills, *decodes), query, view)
        if not others:
            raise filters.no_partner(prefill)
        apart = self._rank(filters.ready(others, query, view), "decode", query, view)
        return self._choice("remote", prefill, apart[0].node, (*prefills, *apart), query, view)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        pool = filters.partners_of_parked(query, view, prefill)
        return self._rank(pool, "decode", query, view)[0].node if pool else None

    def _local(self, found: filters.Pools, query: Query, view: ClusterView) -> RoutingDecision:
        ranked = self._rank(filters.ready(found.local, query, view), "local", query, view)
        return self._choice("local", None, ranked[0].node, ranked, query, view)

    def _choice(
        self,
        mode: Mode,
        prefill: NodeView | None,
        decode: NodeView,
        compared: tuple[Candidate, ...],
        query: Query,
        view: ClusterView,
    ) -> RoutingDecision:
        candidates = compared + filters.rejected(query, view)
        return RoutingDecision(mode, prefill, decode, lambda: candidates, policy=self.name)

    def _rank(self, pool: Pool, leg: LegName, query: Query, view: ClusterView) -> tuple[Candidate, ...]:
        if not pool:
            return ()
        nodes = [view.nodes[row] for row in pool.rows]
        scores = self._rule.score(nodes, leg, query)
        candidates = [
            _candidate(node, leg, query, cost, terms) for node, (cost, terms) in zip(nodes, scores, strict=True)
        ]
        return tuple(sorted(candidates, key=_order))


def _candidate(node: NodeView, leg: LegName, query: Query, cost: float, terms: Terms) -> Candidate:
    names, values = zip(*terms, strict=True) if terms else ((), ())
    return Candidate(node, leg, query.cached_on(node), names, values, cost)


def _order(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.cost, candidate.node.num_requests, candidate.node.name

"""The frame of policies that compare nodes by one number: it decides pools, modes and ties; a Rule gives the number.

The mode is remote when both pools have a node and the two differ. It is local when a pool is empty, all nodes are
mixed, or one mixed node is best at both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.node_row import COMPUTES, DECODES, SERVES, alone_s
from pdcluster_router.policy import eligibility
from pdcluster_router.policy.base import Decision, DecisionRecord, Query, Terms, known_prefix
from pdcluster_router.policy.candidates import MOST_LISTED, Candidate, Candidates, LegName, error_bar_s
from pdcluster_router.policy.predicted.scoring import estimate_s


class Rule(Protocol):
    @property
    def name(self) -> str: ...

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        """The cost of each node, least is best, and the terms behind it."""
        ...


class Ranked(NamedTuple):
    """A node with its cost for one leg, in the order of choice."""

    cost: float
    num_requests: int
    name: str
    row: int
    leg: LegName
    terms: Terms


class Scored:
    """Implements Policy. Ties go to the node with fewer requests, then by name."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    @property
    def name(self) -> str:
        return self._rule.name

    def choose(self, query: Query, view: ClusterView) -> Decision:
        legs = eligibility.legs_of(query, view)
        prefills = self._rank(legs.rows(COMPUTES), "prefill", query, view)
        decode = legs.rows(DECODES)
        if query.force == "local" or not (prefills and decode) or (query.force == "auto" and not legs.is_split):
            return self._local(legs, query, view)
        first = prefills[0]
        others = legs.ready(eligibility.partners(legs.all_rows(DECODES), first.row, view))
        if legs.may_be_local:
            if not others:
                return self._local(legs, query, view)  # its KV can go nowhere, and it may be too small for the output
            decodes = self._rank(decode, "decode", query, view)
            if decodes[0].row == first.row:
                return _decision(self.name, legs, (first._replace(leg="local"), *prefills, *decodes), query, view)
        if not others:
            raise eligibility.no_partner(view.node(first.row))
        return _decision(self.name, legs, prefills, query, view, self._rank(others, "decode", query, view))

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        bits = eligibility.decoders_for(query, view, prefill)
        rows = eligibility.Legs(bits, False, False).rows(DECODES)
        return view.node(self._rank(rows, "decode", query, view)[0].row) if rows else None

    def _local(self, legs: eligibility.Legs, query: Query, view: ClusterView) -> Decision:
        return _decision(self.name, legs, self._rank(legs.rows(SERVES), "local", query, view), query, view)

    def _rank(self, rows: Sequence[int], leg: LegName, query: Query, view: ClusterView) -> list[Ranked]:
        if not rows:
            return []
        nodes = [view.node(row) for row in rows]
        scores = self._rule.score(nodes, leg, query)
        return sorted(
            Ranked(cost, node.num_requests, node.name, row, leg, terms)
            for row, node, (cost, terms) in zip(rows, nodes, scores, strict=True)
        )


def _decision(
    policy: str,
    legs: eligibility.Legs,
    firsts: Sequence[Ranked],
    query: Query,
    view: ClusterView,
    decodes: Sequence[Ranked] = (),
) -> Decision:
    """The choice of the best of each leg, with what was compared. No decodes: mode local."""
    first, last = firsts[0], decodes[0] if decodes else firsts[0]
    known, ranked = known_prefix(query, view.roster), (*firsts, *decodes)
    listed = [_candidate(one, query, view) for one in _kept(ranked)]
    ruled_out = eligibility.rejected(query, view)
    others = [(one.ttft_s, one.node) for one in listed if one.ttft_s is not None and one.node != first.name]
    best_s, best = min(others, default=(0.0, None))
    node, cached = view.row(first.row), query.cached_on(view.reported[first.row])
    record = DecisionRecord(
        policy,
        "remote" if decodes else "local",
        first.name if decodes else None,
        last.name,
        query.num_tokens,
        Candidates(b"", (), True, (*listed, *ruled_out[:MOST_LISTED]), len(ranked) + len(ruled_out)),
        estimate_s(node, cached, query.num_tokens),
        best=best,
        best_s=best_s,
        most_cached=known.most,
        is_estimated=view.reported[first.row].capabilities.estimated_cost,
    )
    computing, decode = view.node(first.row), view.node(last.row)
    work_s = alone_s(node, query.uncached_on(computing), min(cached, query.num_tokens - 1))
    prefill, rows = computing if decodes else None, (first.row, last.row)
    return Decision(record, computing, prefill, decode, rows, query, view, legs.bits, work_s)


def _kept(ranked: Iterable[Ranked]) -> list[Ranked]:
    """The best of each leg."""
    counts: dict[str, int] = {}
    kept = []
    for one in ranked:
        counts[one.leg] = counts.get(one.leg, 0) + 1
        if counts[one.leg] <= MOST_LISTED:
            kept.append(one)
    return kept


def _candidate(one: Ranked, query: Query, view: ClusterView) -> Candidate:
    cached = query.cached_on(view.reported[one.row])
    found = Candidate(one.name, one.leg, cached, one.cost, dict(one.terms))
    if one.leg == "decode":
        return found
    node = view.row(one.row)
    ttft_s = estimate_s(node, cached, query.num_tokens)
    return replace(found, ttft_s=ttft_s, ttft_error_s=error_bar_s(ttft_s, node.spread, node.doubt))


def alone(policy: str, node: NodeView, query: Query, view: ClusterView) -> Decision:
    """The decision that one node serves, without a comparison. It takes work; others that could serve count as room.

    It shares the KV of its prompt, so it computes one token.
    """
    legs, row = eligibility.legs_of(replace(query, force="local"), view), view.roster.row_of[node.incarnation]
    decision = _decision(policy, legs, [Ranked(0.0, node.num_requests, node.name, row, "local", ())], query, view)
    return replace(decision, work_s=alone_s(view.row(row), 1.0, query.num_tokens - 1.0))

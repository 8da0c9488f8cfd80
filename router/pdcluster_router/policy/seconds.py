"""The default: least predicted seconds, by the nodes' own cost models, with the mode chosen per request (DESIGN §7).

Sources: predicted TTFT from Mooncake's Conductor (FAST'25, algorithm 1); the price of uncached work is our own (reference/routers.md b, h).

 1. Prefill leg: wait + compute + price × compute + what rows lose that run there. The price is what a second of work costs those who come later:
    alpha × the queue of the least loaded node, counted in average prompts. While any node is idle it is 0 and the least wait + compute wins; when
    all have a queue, saving work (going where the prefix is cached) is worth more than a shorter queue. A prefix that another node holds is fetched
    from there where that is sooner than computing it.
 2. Decode leg: exposed transfer + output × TPOT + what the rows beside it lose + the wait for room.
 3. Local: both on one node, without a transfer. Work that is done on a decode node delays no prompt of the others, so it has no price.
 4. TPOT counts the prompts that will be computed beside the row while it lives. Where it is beyond COMFORT times a lone row's, a second weighs more,
    so that decode nodes take prompts while their rows stay well served, and prefill nodes take rows while they are idle enough.
 5. Remote or local, whichever is less; the mode of the last choice keeps a margin, so that a tie does not flip with every report. A prompt
    that would hold up running rows longer than the inter-token limit goes elsewhere while there is a pair that can take it.
 6. While no node has run enough steps to know what they cost: the product score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from pdcluster_router.policy import estimates as seconds_of
from pdcluster_router.policy import pools as filters
from pdcluster_router.policy.base import Candidate, Choice, LegName, Predicted, Query
from pdcluster_router.policy.estimates import Market, Station, Values
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scored import Scored
from pdcluster_router.view import ClusterView, NodeView

MOST_CANDIDATES = 16
"""Kept for the record, per leg."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A leg's nodes, best first; the record holds the first of them."""

    leg: LegName
    names: tuple[str, ...]
    entries: tuple[tuple[float, Station, Values], ...]

    @property
    def cost(self) -> float:
        return self.entries[0][0]

    @property
    def best(self) -> Station:
        return self.entries[0][1]

    @property
    def values(self) -> Values:
        return self.entries[0][2]

    def candidates(self, query: Query, rejected_by: str = "") -> tuple[Candidate, ...]:
        return tuple(
            Candidate(station.node, self.leg, query.cached_on(station.node), seconds_of.named(self.names, values), cost, rejected_by)
            for cost, station, values in self.entries
        )


class Seconds:
    """Implements Policy. alpha: see rule 1; harm: weight of a running row's pause against the new request's own seconds; margin: of the last mode,
    as a share of the time to first token; gap: times a batch's own pace that its rows may be held up, when no limit is given in seconds."""

    name = "seconds"

    def __init__(self, alpha: float = 3.0, harm: float = 1.0, margin: float = 0.1, gap: float = 4.0) -> None:
        self._alpha = alpha
        self._harm = harm
        self._margin = margin
        self._gap = gap
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> Choice:
        if view.typical_cost is None:
            return replace(self._cold.choose(query, view), policy=self.name)
        found = filters.pools(query, view)
        market = self._market(view, query)
        remote = self._remote(found, query, view, market) if query.force != "local" else None
        if remote is None and query.force != "local" and not filters.may_be_local(query, found):
            raise filters.no_partner(filters.ready(found.prefill, query)[0])
        local = None
        if remote is None or (query.force == "auto" and (query.fallback == "conditional" or not found.is_split)):
            local = self._rank_local(_stations(view, filters.ready(found.local, query)), query, market)
        return self._decide(query, remote, local, market, found.rejected)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        if view.typical_cost is None:
            return self._cold.choose_decode(query, view, prefill)
        nodes = filters.partners_of_parked(query, view, prefill)
        (source,) = _stations(view, (prefill,))
        return self._rank_decode(_stations(view, nodes), query, source, 0.0, self._market(view, query)).best.node if nodes else None

    # ------------------------------------------------------------ legs

    def _market(self, view: ClusterView, query: Query) -> Market:
        stations = _stations(view, view.accepting)
        computing = [station for station in stations if station.node.role != "decode"]
        return Market(
            price=self._price(computing or stations),
            harm=self._harm,
            share=max(_share_now(computing), _share_later(stations, computing, query)),
            local_share=_share_now([station for station in stations if station.node.role == "decode"]),
            source=max(view.accepting, key=query.held_on, default=None),
        )

    def _price(self, stations: Sequence[Station]) -> float:
        """Rule 1: the shortest queue in average prompts, times alpha."""
        shortest = min((station.pace.wait_s for station in stations), default=0.0)
        if shortest <= 0.0:
            return 0.0
        prompts = sum(station.node.num_prompts for station in stations)
        return self._alpha * shortest * max(prompts, 1) / sum(station.pace.backlog_s for station in stations)

    def _remote(self, found: filters.Pools, query: Query, view: ClusterView, market: Market) -> tuple[Ranked, Ranked] | None:
        """The best prefill node that has a partner, and its best partner."""
        if not (found.prefill and found.decode):
            return None
        prefills = self._rank_prefill(_stations(view, filters.ready(found.prefill, query)), query, market)
        for index, (_, station, values) in enumerate(prefills.entries):
            partners = filters.ready(filters.partners(found.decode, station.node), query)
            if partners:
                decodes = self._rank_decode(_stations(view, partners), query, station, values[1], market)
                return replace(prefills, entries=prefills.entries[index:]), decodes
        return None

    def _rank_prefill(self, stations: Sequence[Station], query: Query, market: Market) -> Ranked:
        values = [seconds_of.prefill_values(station, query, market) for station in stations]
        return _rank("prefill", seconds_of.PREFILL_TERMS, stations, values)

    def _rank_decode(self, stations: Sequence[Station], query: Query, prefill: Station, compute: float, market: Market) -> Ranked:
        exposed = [seconds_of.exposed_s(prefill, station.node, query, compute) for station in stations]
        values = [seconds_of.decode_values(station, query, late, market) for station, late in zip(stations, exposed, strict=True)]
        return _rank("decode", seconds_of.DECODE_TERMS, stations, values)

    def _rank_local(self, stations: Sequence[Station], query: Query, market: Market) -> Ranked:
        values = [seconds_of.local_values(station, query, market) for station in stations]
        return _rank("local", seconds_of.LOCAL_TERMS, stations, values)

    # ------------------------------------------------------------ modes

    def _decide(
        self, query: Query, remote: tuple[Ranked, Ranked] | None, local: Ranked | None, market: Market, rejected: tuple[Candidate, ...]
    ) -> Choice:
        if remote is None:
            assert local is not None
            return self._local_choice(local, market, query, local.candidates(query) + rejected)
        record = remote[0].candidates(query) + remote[1].candidates(query)
        if local is None:
            return self._remote_choice(remote, market, query, record + rejected)
        calm = self._without_long_pauses(local, query) if self._keeps_pace(remote[0].best, query) else local
        record += local.candidates(query) if calm is not None else local.candidates(query, "holds up running rows")
        if calm is not None and self._is_local_better(query, remote, calm):
            return self._local_choice(calm, market, query, record + rejected)
        return self._remote_choice(remote, market, query, record + rejected)

    def _without_long_pauses(self, local: Ranked, query: Query) -> Ranked | None:
        entries = tuple(entry for entry in local.entries if self._keeps_pace(entry[1], query))
        return replace(local, entries=entries) if entries else None

    def _keeps_pace(self, station: Station, query: Query) -> bool:
        pace = station.pace
        if pace.rows == 0:
            return True
        limit_s = query.itl_s if query.itl_s > 0 else self._gap * pace.tpot_s
        cached = query.cached_on(station.node)
        return pace.gap_s(query.num_tokens - cached, cached) <= limit_s

    def _is_local_better(self, query: Query, remote: tuple[Ranked, Ranked], local: Ranked) -> bool:
        remote_cost = remote[0].cost + remote[1].cost
        margin = self._margin * min(_ttft(remote[0].values), _ttft(local.values))
        if query.previous == "remote":
            return local.cost + margin < remote_cost
        return local.cost < remote_cost + (margin if query.previous == "local" else 0.0)

    def _local_choice(self, local: Ranked, market: Market, query: Query, record: tuple[Candidate, ...]) -> Choice:
        return Choice("local", None, local.best.node, record, _predicted(local, local, market, query), self.name, _pull(local.best, market, query))

    def _remote_choice(self, remote: tuple[Ranked, Ranked], market: Market, query: Query, record: tuple[Candidate, ...]) -> Choice:
        prefills, decodes = remote
        predicted, pull = _predicted(prefills, decodes, market, query), _pull(prefills.best, market, query)
        return Choice("remote", prefills.best.node, decodes.best.node, record, predicted, self.name, pull)


def _predicted(first: Ranked, decodes: Ranked, market: Market, query: Query) -> Predicted:
    tpot_s, _ = seconds_of.strained(decodes.best, query, seconds_of.share_on(decodes.best, market))
    return Predicted(_ttft(first.values), tpot_s)


def _pull(station: Station, market: Market, query: Query) -> NodeView | None:
    return market.source if seconds_of.prompt_on(station, query, market.source).is_fetched else None


def _ttft(values: Values) -> float:
    """wait, compute and fetch are the first terms of both legs that compute a prompt."""
    return sum(values[:3])


MOST_SHARE = 0.9
"""Nobody computes prompts for longer than that and still takes rows."""


def _share_now(stations: Sequence[Station]) -> float:
    """Of the time in which such nodes compute prompts, told from how many prompts are there: with Poisson arrivals ρ = N ÷ (1 + N)."""
    prompts = sum(station.node.num_prompts for station in stations)
    return prompts / (prompts + len(stations)) if stations else 0.0


def _share_later(stations: Sequence[Station], computing: Sequence[Station], query: Query) -> float:
    """The same over the life of an answer. By Little's law the rows that run came at rows ÷ (output × TPOT) a second, each with a prompt about as
    long as what it attends to now, and cached about as far as this one is at best."""
    rows = sum(station.pace.rows for station in stations)
    life_s = query.expected_output * sum(station.pace.tpot_s * station.pace.rows for station in stations) / max(rows, 1)
    if life_s <= 0.0 or not computing:
        return 0.0
    mean = sum(station.pace.context_tokens for station in stations) / rows
    known = max(query.cached_on(station.node) for station in computing) / query.num_tokens
    work_s = computing[0].pace.prefill.seconds(mean * (1 - known), mean * known)
    return min(work_s * rows / life_s / len(computing), MOST_SHARE)


def _rank(leg: LegName, names: tuple[str, ...], stations: Sequence[Station], values: Sequence[Values]) -> Ranked:
    """Ties go to the node with fewer requests, then by name: stations come sorted by name."""
    costs = [sum(terms) for terms in values]
    best = nsmallest(MOST_CANDIDATES, range(len(stations)), key=lambda i: (costs[i], stations[i].node.num_requests))
    return Ranked(leg, names, tuple((costs[i], stations[i], values[i]) for i in best))


def _stations(view: ClusterView, nodes: Sequence[NodeView]) -> Sequence[Station]:
    """For a view that has a typical cost: every node has a pace then."""
    stations = []
    for node in nodes:
        pace = view.pace_of(node)
        assert pace is not None
        stations.append(Station(node, pace))
    return stations

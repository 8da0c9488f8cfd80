"""The policy `seconds` as one would write it first: node by node, nothing kept between choices. Its production form
must choose and price alike (test_seconds_oracle). A change of a rule is made in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as of_legs
from heapq import nsmallest

from msgspec.structs import replace
from policy_cases import may_compute, may_decode

from pdcluster.core.errors import Unavailable
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.pacing import completed
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.room import COMFORT
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.baselines import Product
from pdcluster_router.policy.candidates import LegName
from pdcluster_router.policy.predicted.cost_model import (
    COPY_WEIGHT,
    HANDOVER_S,
    LAST_GROUP,
    MUCH_LOST,
    UNMEASURED_BYTES_S,
    WELL,
)
from pdcluster_router.policy.predicted.records import MOST_CANDIDATES
from pdcluster_router.policy.predicted.scoring import MOST_SHARE
from pdcluster_router.policy.scored import Scored

Values = tuple[float, ...]

PREFILL_TERMS = "wait", "compute", "fetch", "price", "slowed", "copy"
DECODE_TERMS = "room", "exposed", "decode", "others", "copy"
LOCAL_TERMS = *PREFILL_TERMS, "room", "decode", "others"


@dataclass(frozen=True, slots=True)
class Pace:
    """A node's predicted pace over its next seconds.

    backlog_s: of prompt work, if computed alone. stretch: factor by which prompts take longer beside rows. tpot_s:
    between tokens of a row while no prompt is computed. itl_s: lately, prompts included. prompt_step_s: a step with
    the rows and a full chunk of a prompt.
    """

    prefill: PrefillCost
    decode: DecodeCost
    rows: float
    context_tokens: float
    backlog_s: float
    stretch: float
    tpot_s: float
    itl_s: float
    prompt_step_s: float

    @classmethod
    def of(cls, node: NodeView, cost: NodeCost) -> Pace:
        prefill, decode, rows = cost.prefill, cost.decode, node.decode_rows
        added_s = decode.added_s(rows, node.context_tokens)
        chunk = prefill.chunk_tokens
        step_s = prefill.work_s(chunk, chunk * max(_depth(node), chunk / 2))
        lately_s = node.load.itl_s if node.load is not None and rows else 0.0
        return cls(
            prefill,
            decode,
            rows,
            node.context_tokens,
            backlog_s=prefill.work_s(node.prefill_tokens, node.prefill_pairs),
            stretch=1.0 + added_s / step_s if step_s > 0 else 1.0,
            tpot_s=decode.fixed_s + added_s,
            itl_s=max(lately_s, decode.fixed_s + added_s),
            prompt_step_s=max(step_s, decode.fixed_s) + added_s,
        )

    @property
    def wait_s(self) -> float:
        """Until a new prompt begins."""
        return self.backlog_s * self.stretch

    def row_s(self, context_tokens: float) -> float:
        """What one more row adds to every step."""
        return self.decode.row_s + self.decode.context_s * context_tokens

    def gap_s(self, new: float, cached: float) -> float:
        """The longest gap between tokens of running rows while `new` prompt tokens are computed."""
        chunk = min(new, self.prefill.chunk_tokens) if self.prefill.chunk_tokens else new
        return self.prefill.seconds(chunk, cached + new - chunk) + self.decode.added_s(self.rows, self.context_tokens)

    def paused_s(self, new: float, cached: float) -> float:
        """What each running row loses while `new` tokens of a prompt are computed."""
        steps = max(new / self.prefill.chunk_tokens, 1.0) if self.prefill.chunk_tokens else 1.0
        return max(self.prefill.seconds(new, cached) - steps * self.decode.fixed_s, 0.0)


def _depth(node: NodeView) -> float:
    """Tokens that a token of the waiting prompts attends to, on average."""
    if node.prefill_tokens > 0:
        return node.prefill_pairs / node.prefill_tokens
    return node.context_tokens / node.decode_rows / 2 if node.decode_rows > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PlainCandidate:
    leg: LegName
    node: str
    cached_tokens: int
    cost: float
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """prefill: None in mode local. pull: the node that KV is fetched from, None for none."""

    prefill: str | None
    decode: str
    candidates: tuple[PlainCandidate, ...]
    ttft_s: float | None = None
    tpot_s: float | None = None
    pull: str | None = None

    @classmethod
    def of(cls, decision: Decision) -> PlainChoice:
        """What production says of it."""
        record = decision.record
        compared = tuple(
            PlainCandidate(each.leg, each.node, each.cached_tokens, each.cost, each.terms)  # type: ignore[arg-type]
            for each in record.candidates.read()
            if each.terms
        )
        return cls(record.prefill, record.decode, compared, record.ttft_s, record.tpot_s, record.pull)


@dataclass(frozen=True, slots=True)
class Market:
    """What holds for all nodes at one moment. price: seconds that later prompts lose for each second of work; harm:
    weight of a running row's pause; share: of the time in which a node that computes prompts for others will do so,
    local_share: in which a decode node will for its own; source: the node that holds most of the prompt, from which it
    can be fetched."""

    price: float
    harm: float
    share: float
    local_share: float
    source: NodeView | None


@dataclass(frozen=True, slots=True)
class Station:
    """A node and its pace, side by side."""

    node: NodeView
    pace: Pace


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a node would come by a prompt's KV: seconds of fetching that its queue does not hide, tokens known then,
    seconds of computing the rest."""

    fetch_s: float
    cached: int
    compute_s: float
    is_fetched: bool = False


def prompt_on(node_row: Station, query: Query, source: NodeView | None) -> Prompt:
    """By its own cache, or by a copy of what `source` holds, if that is sooner."""
    node, pace = node_row.node, node_row.pace
    own = query.cached_on(node)
    alone = Prompt(0.0, own, _compute_s(pace, query, own))
    if (
        source is None
        or source is node
        or not node.capabilities.pulls
        or query.held_on(source) <= own
        or not (bytes_s := source.bandwidth.get(node.name, 0.0))
    ):
        return alone
    held = query.held_on(source)
    copy_s = HANDOVER_S + (held - own) * node.kv_bytes_per_token / bytes_s
    fetched = Prompt(max(copy_s - pace.wait_s, 0.0), held, _compute_s(pace, query, held), is_fetched=True)
    return fetched if fetched.fetch_s + fetched.compute_s < alone.compute_s else alone


def _compute_s(pace: Pace, query: Query, cached: int) -> float:
    """The prompt's own work, from its first step to its first token."""
    return pace.prefill.seconds(max(query.num_tokens - cached, 1), cached) * pace.stretch


def prefill_values(node_row: Station, query: Query, market: Market, kept: int) -> Values:
    """slowed: what running rows lose by the prompt."""
    pace, prompt = node_row.pace, prompt_on(node_row, query, market.source)
    paused = pace.paused_s(max(query.num_tokens - prompt.cached, 1), prompt.cached)
    price = price_on(node_row, market) * prompt.compute_s
    return (
        pace.wait_s,
        prompt.compute_s,
        prompt.fetch_s,
        price,
        market.harm * paused * pace.rows,
        copy_s(node_row, query, kept),
    )


def most_kept(node_rows: Sequence[Station], query: Query) -> int:
    """Tokens of the prompt on a node that computes prompts for others."""
    return max((query.cached_on(node_row.node) for node_row in node_rows if node_row.node.role != "decode"), default=0)


def copy_s(node_row: Station, query: Query, kept: int) -> float:
    """What others lose by the room of tokens that another node keeps."""
    own, pace = query.cached_on(node_row.node), node_row.pace
    if node_row.node.role == "decode" or kept <= own:
        return 0.0
    return (
        COPY_WEIGHT * min(query.lost / MUCH_LOST, 1.0) * (_compute_s(pace, query, own) - _compute_s(pace, query, kept))
    )


def decode_values(node_row: Station, query: Query, exposed_s: float, market: Market) -> Values:
    """exposed_s: the transfer that no computing hides. others: what the running rows lose by one more beside them."""
    pace, output = node_row.pace, query.expected_output
    tpot_s = row_tpot_s(node_row, query, market)
    others = output * pace.row_s(query.num_tokens + output / 2) * pace.rows
    copy = copy_s(node_row, query, query.num_tokens)  # of what the computing node has by then
    return room_s(node_row, query, tpot_s), exposed_s, output * tpot_s, others, copy


def local_values(node_row: Station, query: Query, market: Market, kept: int) -> Values:
    room, _, decode, others, _ = decode_values(node_row, query, 0.0, market)
    return *prefill_values(node_row, query, market, kept), room, decode, others


def row_tpot_s(node_row: Station, query: Query, market: Market) -> float:
    """Between tokens of this row, with prompts beside it for their share of the time and while what waits now is
    computed."""
    pace, share = node_row.pace, share_on(node_row, market)
    row_s = pace.row_s(query.num_tokens + query.expected_output / 2)
    if node_row.node.role == "decode":
        return max(busy_tpot_s(pace, share, row_s), paused_tpot_s(pace, query.expected_output, row_s))
    now = min(pace.wait_s / max(query.expected_output * (pace.tpot_s + row_s), 1e-9), 1.0)
    return busy_tpot_s(pace, max(share, now), row_s)


def busy_tpot_s(pace: Pace, share: float, row_s: float) -> float:
    """Of a row that adds row_s to each step, when prompts are computed for that share of the time."""
    quiet, busy = pace.tpot_s + row_s, pace.prompt_step_s + row_s
    return 1.0 / ((1.0 - share) / quiet + share / busy) if quiet > 0 else 0.0


def paused_tpot_s(pace: Pace, output: int, row_s: float) -> float:
    """Of a row that adds row_s to each step, when what waits now is computed beside it, and then no more."""
    quiet, busy = pace.tpot_s + row_s, pace.prompt_step_s + row_s
    share = min(pace.wait_s / busy / output, 1.0) if quiet > 0 else 0.0
    return (1.0 - share) * quiet + share * busy


def price_on(node_row: Station, market: Market) -> float:
    """Work that is done on a decode node delays no prompt of the others."""
    return 0.0 if node_row.node.role == "decode" else market.price


def share_on(node_row: Station, market: Market) -> float:
    return market.local_share if node_row.node.role == "decode" else market.share


def exposed_s(prefill: Station, decode: NodeView, query: Query, compute: float) -> float:
    """What of a transfer to `decode` is left when the first token is there, and the handing over."""
    token_s = decode.kv_bytes_per_token / (prefill.node.bandwidth.get(decode.name, 0.0) or UNMEASURED_BYTES_S)
    missing = query.num_tokens - query.cached_on(decode)
    last = min(prefill.pace.prefill.chunk_tokens or missing, missing) * LAST_GROUP
    return HANDOVER_S + max(missing * token_s - compute, last * token_s)


def room_s(node_row: Station, query: Query, tpot_s: float) -> float:
    """Until there is a row and pages, when those that run give them back at an even rate."""
    load, pending = node_row.node.load, node_row.node.pending
    if load is None:
        return 0.0
    life_s = query.expected_output * tpot_s
    rows = load.slots_used + pending.rows - load.slots + 1
    wait = life_s * rows / load.slots if rows > 0 and load.slots else 0.0
    if load.pages_total and load.pages_free + load.pages_cached < load.pages_total // 4:
        wait += life_s * _missing_share(node_row.node, query)
    return wait


def _missing_share(node: NodeView, query: Query) -> float:
    """Pages that are missing, as a share of those that rows hold; block_tokens is close enough to a page."""
    load = node.load
    assert load is not None
    used = load.pages_total - load.pages_free - load.pages_cached
    needed = (
        query.num_tokens - query.cached_on(node) + query.expected_output + node.pending.context_tokens
    ) / node.block_tokens
    return max(needed - load.pages_free - load.pages_cached, 0.0) / max(used, 1)


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

    def candidates(self, query: Query) -> tuple[PlainCandidate, ...]:
        return tuple(
            PlainCandidate(
                self.leg,
                node_row.node.name,
                query.cached_on(node_row.node),
                cost,
                dict(zip(self.names, values, strict=True)),
            )
            for cost, node_row, values in self.entries
        )


class PlainSeconds:
    """alpha: see rule 1; harm: weight of a running row's pause against the new request's own
    seconds; margin: of the last mode, as a share of the time to first token."""

    def __init__(self, alpha: float = 3.0, harm: float = 1.0, margin: float = 0.1) -> None:
        self._alpha = alpha
        self._harm = harm
        self._margin = margin
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> PlainChoice:
        if view.typical is None:
            return PlainChoice.of(self._cold.choose(query, view))
        found = pools(query, view)
        market = self._market(view, query)
        remote = self._remote(found, query, view, market) if query.force != "local" else None
        if remote is None and query.force != "local" and not may_be_local(query, found):
            raise Unavailable("no partner")
        local = None
        if remote is None or (query.force == "auto" and (query.fallback == "conditional" or not found.is_split)):
            local = self._rank_local(_stations(view, ready(found.local, query)), query, market)
        return self._decide(query, remote, local, market)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        if view.typical is None:
            return self._cold.choose_decode(query, view, prefill)
        nodes = partners_of_parked(query, view, prefill)
        (source,) = _stations(view, (prefill,))
        return (
            self._rank_decode(_stations(view, nodes), query, source, 0.0, self._market(view, query)).best.node
            if nodes
            else None
        )

    # ------------------------------------------------------------ legs

    def _market(self, view: ClusterView, query: Query) -> Market:
        node_rows = _stations(view, _accepting(view))
        computing = [node_row for node_row in node_rows if node_row.node.role != "decode"]
        decoding = [node_row for node_row in node_rows if node_row.node.role == "decode"]
        lately = min((query.busy_serving + query.busy_decoding) / len(computing), MOST_SHARE) if computing else 0.0
        return Market(
            price=self._price(computing or node_rows, query.num_held),
            harm=self._harm,
            share=max(
                _share_now(computing, query.num_held),
                _share_later(node_rows, computing, query),
                lately if decoding else 0.0,
            ),
            local_share=min(query.busy_decoding / len(decoding), MOST_SHARE) if decoding else 0.0,
            source=max((node for node in _accepting(view) if node.capabilities.pulls), key=query.held_on, default=None),
        )

    def _price(self, node_rows: Sequence[Station], num_held: int) -> float:
        """Rule 1: the shortest queue in average prompts, with its part of those that wait in the router, times
        alpha."""
        shortest = min((node_row.pace.wait_s for node_row in node_rows), default=0.0)
        if shortest <= 0.0:
            return 0.0
        prompts = sum(node_row.node.num_prompts for node_row in node_rows)
        queue = shortest * max(prompts, 1) / sum(node_row.pace.backlog_s for node_row in node_rows)
        return self._alpha * (queue + num_held / len(node_rows))

    def _remote(self, found: Pools, query: Query, view: ClusterView, market: Market) -> tuple[Ranked, Ranked] | None:
        """The best prefill node that has a partner, and its best partner."""
        if not (found.prefill and found.decode):
            return None
        prefills = self._rank_prefill(_stations(view, ready(found.prefill, query)), query, market)
        for index, (_, node_row, values) in enumerate(prefills.entries):
            able = ready(partners(found.decode, node_row.node), query)
            if able:
                decodes = self._rank_decode(_stations(view, able), query, node_row, values[1], market)
                return of_legs(prefills, entries=prefills.entries[index:]), decodes
        return None

    def _rank_prefill(self, node_rows: Sequence[Station], query: Query, market: Market) -> Ranked:
        kept = most_kept(node_rows, query)
        values = [prefill_values(node_row, query, market, kept) for node_row in node_rows]
        return _rank("prefill", PREFILL_TERMS, node_rows, values)

    def _rank_decode(
        self, node_rows: Sequence[Station], query: Query, prefill: Station, compute: float, market: Market
    ) -> Ranked:
        hidden = 0.0 if prefill.node.capabilities.first_token == "decode" else compute
        exposed = [exposed_s(prefill, node_row.node, query, hidden) for node_row in node_rows]
        values = [
            decode_values(node_row, query, late, market) for node_row, late in zip(node_rows, exposed, strict=True)
        ]
        return _rank("decode", DECODE_TERMS, node_rows, values)

    def _rank_local(self, node_rows: Sequence[Station], query: Query, market: Market) -> Ranked:
        kept = most_kept(node_rows, query)
        values = [local_values(node_row, query, market, kept) for node_row in node_rows]
        return _rank("local", LOCAL_TERMS, node_rows, values)

    # ------------------------------------------------------------ modes

    def _decide(
        self,
        query: Query,
        remote: tuple[Ranked, Ranked] | None,
        local: Ranked | None,
        market: Market,
    ) -> PlainChoice:
        if remote is None:
            assert local is not None
            return self._local_choice(local, market, query, local.candidates(query))
        record = remote[0].candidates(query) + remote[1].candidates(query)
        if local is None:
            return self._remote_choice(remote, market, query, record)
        calm = self._without_long_pauses(local, remote[0].best, query)
        record += local.candidates(query)
        if calm is not None and self._is_local_better(query, remote, calm):
            return self._local_choice(calm, market, query, record)
        return self._remote_choice(remote, market, query, record)

    def _without_long_pauses(self, local: Ranked, prefill: Station, query: Query) -> Ranked | None:
        most = -1.0 if self._keeps_pace(prefill, query) else _num_slowed(prefill)
        entries = tuple(
            entry for entry in local.entries if self._keeps_pace(entry[1], query) or _num_slowed(entry[1]) <= most
        )
        return of_legs(local, entries=entries) if entries else None

    def _keeps_pace(self, node_row: Station, query: Query) -> bool:
        pace = node_row.pace
        if pace.rows == 0 and (node_row.node.role != "decode" or node_row.node.num_prompts == 0):
            return True
        cached = query.cached_on(node_row.node)
        if query.itl_s and pace.gap_s(query.num_tokens - cached, cached) > query.itl_s:
            return False
        added_s = pace.decode.added_s(pace.rows, pace.context_tokens)
        row_s = added_s / pace.rows if pace.rows else pace.decode.row_s
        return _paced_s(node_row, query) <= WELL * (query.itl_s or COMFORT * (pace.decode.fixed_s + row_s))

    def _is_local_better(self, query: Query, remote: tuple[Ranked, Ranked], local: Ranked) -> bool:
        remote_cost = remote[0].cost + remote[1].cost
        doubt_s = sum(
            min(leg.best.pace.prefill.error.doubt, 0.5) * (leg.values[0] + leg.values[1]) for leg in (remote[0], local)
        )
        remote_s = _ttft(remote[0].values) + _handover_s(*remote)
        margin = self._margin * min(remote_s, _ttft(local.values)) + doubt_s
        if query.previous == "remote":
            return local.cost + margin < remote_cost
        return local.cost < remote_cost + (margin if query.previous == "local" else 0.0)

    def _local_choice(
        self, local: Ranked, market: Market, query: Query, record: tuple[PlainCandidate, ...]
    ) -> PlainChoice:
        ttft_s, tpot_s = _predicted(local, local, market, query)
        return PlainChoice(None, local.best.node.name, record, ttft_s, tpot_s, _pull(local.best, market, query))

    def _remote_choice(
        self, remote: tuple[Ranked, Ranked], market: Market, query: Query, record: tuple[PlainCandidate, ...]
    ) -> PlainChoice:
        prefills, decodes = remote
        ttft_s, tpot_s = _predicted(prefills, decodes, market, query)
        ttft_s += _handover_s(prefills, decodes)
        pull = _pull(prefills.best, market, query)
        return PlainChoice(prefills.best.node.name, decodes.best.node.name, record, ttft_s, tpot_s, pull)


def _num_slowed(node_row: Station) -> float:
    own = node_row.node.num_prompts if node_row.node.role == "decode" else 0
    return node_row.pace.rows + own


def _paced_s(node_row: Station, query: Query) -> float:
    """Between tokens of the rows that run there: in the steps of this prompt and those before it, and as lately for the
    rest of an answer."""
    pace, cached, new = node_row.pace, query.cached_on(node_row.node), query.uncached_on(node_row.node)
    steps = max(new / pace.prefill.chunk_tokens, 1.0) if pace.prefill.chunk_tokens else 1.0
    busy_s = max(pace.prefill.seconds(new, cached) / steps, pace.decode.fixed_s) + pace.decode.added_s(
        pace.rows, pace.context_tokens
    )
    longer_s = max(pace.prompt_step_s, busy_s)
    busy_steps = steps + (pace.wait_s / longer_s if longer_s else 0.0)
    share = min(busy_steps / query.expected_output, 1.0)
    mean_s = pace.itl_s * (1.0 - share) + busy_s * share
    if mean_s >= busy_s or busy_s <= pace.tpot_s:
        return mean_s
    pause_s = min(steps / query.expected_output, 1.0) * (busy_s - pace.tpot_s)
    busy_share = max(mean_s - pace.tpot_s, 0.0) / (busy_s - pace.tpot_s)
    return min(
        mean_s + math.sqrt(max(mean_s - pace.tpot_s, 0.0) * pause_s * (1.0 - busy_share)), busy_s
    )  # of one standard deviation


def _predicted(first: Ranked, decodes: Ranked, market: Market, query: Query) -> tuple[float, float]:
    """The time to the first token, and between tokens."""
    return _ttft(first.values), row_tpot_s(decodes.best, query, market)


def _handover_s(prefills: Ranked, decodes: Ranked) -> float:
    """What of the transfer, the second term of a decode leg, the first token waits for."""
    return decodes.values[1] if prefills.best.node.capabilities.first_token == "decode" else 0.0


def _pull(node_row: Station, market: Market, query: Query) -> str | None:
    source = market.source
    return source.name if source is not None and prompt_on(node_row, query, source).is_fetched else None


def _ttft(values: Values) -> float:
    """wait, compute and fetch are the first terms of both legs that compute a prompt."""
    return sum(values[:3])


def _share_now(node_rows: Sequence[Station], num_held: int = 0) -> float:
    """Of the time in which such nodes compute prompts, told from how many are there or wait for them: with Poisson
    arrivals ρ = N ÷ (1 + N)."""
    prompts = sum(node_row.node.num_prompts for node_row in node_rows) + num_held
    return prompts / (prompts + len(node_rows)) if node_rows else 0.0


def _share_later(node_rows: Sequence[Station], computing: Sequence[Station], query: Query) -> float:
    """The same over the life of an answer. By Little's law the rows that run came at rows ÷ (output × TPOT) a second,
    each with a prompt about as long as what it attends to now, and cached about as far as this one is at best."""
    rows = sum(node_row.pace.rows for node_row in node_rows)
    life_s = (
        query.expected_output * sum(node_row.pace.tpot_s * node_row.pace.rows for node_row in node_rows) / max(rows, 1)
    )
    if life_s <= 0.0 or not computing:
        return 0.0
    mean = sum(node_row.pace.context_tokens for node_row in node_rows) / rows
    known = max(query.cached_on(node_row.node) for node_row in computing) / query.num_tokens
    work_s = computing[0].pace.prefill.seconds(mean * (1 - known), mean * known)
    return min(work_s * rows / life_s / len(computing), MOST_SHARE)


def _rank(leg: LegName, names: tuple[str, ...], node_rows: Sequence[Station], values: Sequence[Values]) -> Ranked:
    """Ties go to the node with fewer requests, then by name: stations come sorted by name."""
    costs = [sum(terms) for terms in values]
    best = nsmallest(MOST_CANDIDATES, range(len(node_rows)), key=lambda i: (costs[i], node_rows[i].node.num_requests))
    return Ranked(leg, names, tuple((costs[i], node_rows[i], values[i]) for i in best))


def _stations(view: ClusterView, nodes: Sequence[NodeView]) -> Sequence[Station]:
    """For a view that has a typical cost: every node has a pace then."""
    node_rows = []
    for node in nodes:
        cost = completed(node.cost, view.typical)
        assert cost is not None
        node_rows.append(Station(node, Pace.of(node, cost)))
    return node_rows


def _accepting(view: ClusterView) -> tuple[NodeView, ...]:
    return tuple(node for node in view.nodes if node.accepts_work)


# ---------------------------------------------------------------- which nodes


@dataclass(frozen=True, slots=True)
class Pools:
    prefill: tuple[NodeView, ...]
    decode: tuple[NodeView, ...]
    local: tuple[NodeView, ...]
    # Whether the legs have nodes of their own, also where some of these have no partner.
    is_split: bool


def pools(query: Query, view: ClusterView) -> Pools:
    computing = _by_name([node for node in view.nodes if may_compute(node, query)])
    usable = _by_name([node for node in view.nodes if may_decode(node, query)])
    if not usable:
        raise Unavailable("no node")
    if query.force != "remote" and query.fallback != "deny":
        computing, usable = fresh(computing, query), fresh(usable, query)
    found = by_leg(computing, usable, query)
    needs_pair = query.force == "remote" or (query.force == "auto" and query.fallback == "deny")
    if needs_pair and not (found.prefill and found.decode):
        raise Unavailable("no pair")
    if query.force == "local" or may_be_local(query, found):
        return found
    return in_pairs(found) or in_pairs(by_leg(computing, usable, replace(query, excluded=frozenset()))) or found


def by_leg(computing: Sequence[NodeView], usable: Sequence[NodeView], query: Query) -> Pools:
    prefill = fresh([node for node in computing if node.role != "decode"], query)
    decode = fresh([node for node in usable if node.role != "prefill"], query)
    is_split = bool(prefill and decode) and any(node.role != "mixed" for node in prefill + decode)
    return Pools(prefill, decode, fresh(usable, query), is_split)


def in_pairs(found: Pools) -> Pools | None:
    """Without prefill nodes that have no partner; None for no pair."""
    prefill = tuple(node for node in found.prefill if partners(found.decode, node))
    return of_legs(found, prefill=prefill) if prefill else None


def may_be_local(query: Query, found: Pools) -> bool:
    return query.force == "auto" and (query.fallback != "deny" or not found.is_split)


def fresh(nodes: Sequence[NodeView], query: Query) -> tuple[NodeView, ...]:
    return tuple(node for node in nodes if node.incarnation not in query.excluded) or tuple(nodes)


def ready(nodes: Sequence[NodeView], query: Query) -> tuple[NodeView, ...]:
    return tuple(node for node in nodes if node.incarnation not in query.busy) or tuple(nodes)


def partners(nodes: Sequence[NodeView], prefill: NodeView) -> tuple[NodeView, ...]:
    return tuple(node for node in nodes if node is not prefill and node.can_exchange(prefill))


def partners_of_parked(query: Query, view: ClusterView, prefill: NodeView) -> tuple[NodeView, ...]:
    able = [node for node in view.nodes if node.role != "prefill" and may_decode(node, query)]
    apart = [
        node for node in able if node.incarnation not in query.excluded and node.incarnation != prefill.incarnation
    ]
    return ready(partners(_by_name(apart), prefill), query)


def _by_name(nodes: Sequence[NodeView]) -> tuple[NodeView, ...]:
    return tuple(sorted(nodes, key=lambda node: (node.name, node.incarnation)))

"""The default: least predicted seconds, by the nodes' own cost models, with the mode chosen per request (DESIGN §7).

Sources: predicted TTFT from Mooncake's Conductor (FAST'25, algorithm 1); the price of uncached work is our own (reference/routers.md b, h).

 1. Prefill leg: wait + compute + price × compute + what rows lose that run there. The price is what a second of work costs those who come later:
    alpha × the queue of the least loaded node, counted in average prompts. While any node is idle it is 0 and the least wait + compute wins; when
    all have a queue, saving work (going where the prefix is cached) is worth more than a shorter queue. A prefix that another node holds is fetched
    from there where that is sooner than computing it.
 2. Decode leg: exposed transfer + output × TPOT + what the rows beside it lose + the wait for room.
 3. Local: both on one node, without a transfer. Work that is done on a decode node delays no prompt of the others, so it has no price; it is paid by
    the rows there. So between modes the price counts only as far as first tokens are nearer to being late (PATIENCE) than these rows are to being
    slow (COMFORT): rows shall not be slowed for waits that harm nobody, and both limits are reached together.
 4. TPOT counts the prompts that will be computed beside the row while it lives: as many as wait, as the rows that run came with, and, where
    nodes have roles, as were sent lately. Where it is beyond COMFORT times a lone row's, a second weighs more, so that decode nodes take prompts
    while their rows stay well served, and prefill nodes take rows while they are idle enough.
 5. Remote or local, whichever is less; the mode of the last choice keeps a margin, so that a tie does not flip with every report: as a share of the
    time to first token, and what the nodes' models may be wrong by (their error bars), so that it does not flip with what is not known. A prompt
    that would hold up running rows longer than the inter-token limit, or make them slow on average over an answer, goes elsewhere while there is a
    pair that can take it: many would lose what one wins. Where the prefill node has rows that it would hold up, too, it goes where these are fewer:
    a single row on a prefill node is no reason to slow all those of a decode node. Prompts that wait on a decode node will be rows there. Nodes that
    are passed over for their rows are no places for the request either: while those that are left have much to do, it waits in the router (`gate`).
 6. While no node has run enough steps to know what they cost: the product score.
"""

from __future__ import annotations

from functools import partial
from math import inf

import msgspec
from msgspec.structs import replace

from pdcluster_router.policy import estimates as seconds_of
from pdcluster_router.policy import pools as filters
from pdcluster_router.policy.base import Candidate, Choice, Predicted, Query, Record, Suits
from pdcluster_router.policy.estimates import Market, Values
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scales import Ranked, Scales, Weighed, scales
from pdcluster_router.policy.scored import Scored
from pdcluster_router.stations import Station, Totals
from pdcluster_router.view import ClusterView, NodeView


class Pick(msgspec.Struct, frozen=True):
    """A node of a leg, and its terms. skipped: better ones that could not be had."""

    ranked: Ranked
    row: int
    values: Values
    skipped: tuple[int, ...] = ()

    @classmethod
    def best(cls, ranked: Ranked) -> Pick:
        weights = ranked.weights
        row = weights.best(ranked.pool)
        return cls(ranked, row, weights.values(row))

    @property
    def cost(self) -> float:
        return sum(self.values)

    @property
    def ttft_s(self) -> float:
        """wait, compute and fetch are the first terms of both legs that compute a prompt."""
        return sum(self.values[:3])

    @property
    def price(self) -> float:
        """What comes after them."""
        return self.values[3]


Pair = tuple[Pick, Pick]
"""A prefill and a decode leg."""


class Seconds:
    """Implements Policy. alpha: see rule 1; harm: weight of a running row's pause against the new request's own seconds; margin: of the last mode,
    as a share of the time to first token; gap: times a batch's own pace that its rows may be held up at once, when no limit is given in seconds: by
    default only as long as a chunk of the node takes, and what the average over an answer bears."""

    name = "seconds"

    def __init__(self, alpha: float = 3.0, harm: float = 1.0, margin: float = 0.1, gap: float = inf) -> None:
        self._alpha = alpha
        self._harm = harm
        self._margin = margin
        self._gap = gap
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> Choice:
        if view.typical_cost is None:
            return replace(self._cold.choose(query, view), policy=self.name)
        found = filters.pools(query, view)
        weighed = self._weighed(query, view)
        remote = self._remote(found, query, view, weighed) if query.force != "local" else None
        if remote is None and query.force != "local" and not filters.may_be_local(query, found):
            raise filters.no_partner(view.nodes[filters.ready(found.prefill, query, view).rows[0]])
        local = None
        if remote is None or (query.force == "auto" and (query.fallback == "conditional" or not found.is_split)):
            local = weighed.local(filters.ready(found.local, query, view))
        return self._decide(query, view, weighed, remote, local)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        if view.typical_cost is None:
            return self._cold.choose_decode(query, view, prefill)
        pool = filters.partners_of_parked(query, view, prefill)
        if not pool:
            return None
        return view.nodes[self._weighed(query, view).decode(pool, prefill, 0.0).best()]

    # ------------------------------------------------------------ legs

    def _weighed(self, query: Query, view: ClusterView) -> Weighed:
        asked = scales(query, view)
        serving, decoding = view.serving, view.decoding
        market = Market(
            price=self._price(serving if serving.num_nodes else decoding, query.num_held),
            harm=self._harm,
            share=max(
                _share_now(serving, query.num_held),
                _share_later(serving, decoding, query, view, asked),
                _share_lately(serving, query.busy_serving) if decoding.num_nodes else 0.0,
            ),
            local_share=_share_lately(decoding, query.busy_decoding),
        )
        accepting = view.roster.accepting
        return asked.weigh(market, asked.holder(accepting) if accepting.rows else None)

    def _price(self, nodes: Totals, num_held: int) -> float:
        """Rule 1: the shortest queue in average prompts, with its part of those that wait in the router, times alpha."""
        if nodes.least_wait_s <= 0.0:
            return 0.0
        return self._alpha * (nodes.least_wait_s * max(nodes.prompts, 1) / nodes.backlog_s + num_held / nodes.num_nodes)

    def _remote(self, found: filters.Pools, query: Query, view: ClusterView, weighed: Weighed) -> Pair | None:
        """The best prefill node that has a partner, and its best partner."""
        prefill, decode = found.prefill.rows, found.decode.rows
        if not prefill or not decode or (len(decode) == 1 and decode == prefill):
            return None  # one node alone is no pair
        prefills = weighed.prefill(filters.ready(found.prefill, query, view))
        pick, skipped = Pick.best(prefills), 0
        while not (partners := filters.partners(found.decode, view.nodes[pick.row], view)):
            order = prefills.order()
            skipped += 1
            if skipped == len(order):
                return None
            pick = Pick(prefills, order[skipped], prefills.values(order[skipped]), tuple(order[:skipped]))
        decodes = weighed.decode(filters.ready(partners, query, view), view.nodes[pick.row], pick.values[1])
        return pick, Pick.best(decodes)

    # ------------------------------------------------------------ modes

    def _decide(self, query: Query, view: ClusterView, weighed: Weighed, remote: Pair | None, local: Ranked | None) -> Choice:
        rejected = filters.rejected(query, view)
        if remote is None:
            assert local is not None
            return self._local_choice(Pick.best(local), view, weighed, Compared((local.record(),), rejected))
        pair = (remote[0].ranked.record(skipped=remote[0].skipped), remote[1].ranked.record())
        if local is None:
            return self._remote_choice(remote, view, weighed, Compared(pair, rejected))
        suits = self._suits(remote[0].row, query, view)
        calm = _calm(Pick.best(local), suits)
        compared = *pair, local.record("" if calm is not None else "holds up running rows")
        if calm is not None and self._is_local_better(query, view, weighed, remote, calm):
            return replace(self._local_choice(calm, view, weighed, Compared(compared, rejected)), suits=suits)
        return self._remote_choice(remote, view, weighed, Compared(compared, rejected))

    def _suits(self, prefill: int, query: Query, view: ClusterView) -> Suits:
        """Those that hold up no running rows for long; where the prefill node would, too, that hold up no more rows than that."""
        bearable = -1.0 if self._keeps_pace(prefill, query, view) else _num_slowed(view.stations.one(prefill))
        return partial(self._bears, bearable, query, view)

    def _bears(self, most: float, query: Query, view: ClusterView, node: NodeView) -> bool:
        row = view.roster.row_of[node.incarnation]
        return _num_slowed(view.stations.one(row)) <= most or self._keeps_pace(row, query, view)

    def _keeps_pace(self, row: int, query: Query, view: ClusterView) -> bool:
        """Whether running rows wait no longer for a token than they may, once and on average, while the prompt is computed there."""
        station = view.stations.one(row)
        if not _num_slowed(station):
            return True
        node = view.nodes[row]
        cached = query.cached_on(node)
        limit_s = query.itl_s if query.itl_s > 0 else self._gap * station.tpot_s
        if seconds_of.gap_s(station, query.num_tokens - cached, cached) > limit_s:
            return False
        paced_s = seconds_of.paced_s(station, query.uncached_on(node), cached, query.expected_output)
        return paced_s <= WELL * seconds_of.comfort_s(station, query.itl_s)

    def _is_local_better(self, query: Query, view: ClusterView, weighed: Weighed, remote: Pair, local: Pick) -> bool:
        slowness = _slowness(local.row, weighed.tpot_s(local.row), query, view)
        uncounted = 1.0 - min(_lateness(query, view) / max(slowness, LEAST_STRAIN), 1.0) ** SHARPNESS
        remote_cost = remote[0].cost + remote[1].cost - uncounted * remote[0].price
        local_cost = local.cost - uncounted * local.price
        margin = self._margin * min(remote[0].ttft_s, local.ttft_s) + _doubt_s(remote[0], view) + _doubt_s(local, view)
        if query.previous == "remote":
            return local_cost + margin < remote_cost
        return local_cost < remote_cost + (margin if query.previous == "local" else 0.0)

    def _local_choice(self, local: Pick, view: ClusterView, weighed: Weighed, record: Record) -> Choice:
        predicted = Predicted(local.ttft_s, weighed.tpot_s(local.row))
        return Choice("local", None, view.nodes[local.row], record, predicted, self.name, _pull(local.row, view, weighed))

    def _remote_choice(self, remote: Pair, view: ClusterView, weighed: Weighed, record: Record) -> Choice:
        prefill, decode = remote
        predicted, pull = Predicted(prefill.ttft_s, weighed.tpot_s(decode.row)), _pull(prefill.row, view, weighed)
        return Choice("remote", view.nodes[prefill.row], view.nodes[decode.row], record, predicted, self.name, pull)


def _calm(best: Pick, suits: Suits) -> Pick | None:
    """The best one that suits."""
    local = best.ranked
    if suits(local.nodes[best.row]):
        return best
    row = next((row for row in local.order() if suits(local.nodes[row])), None)
    return None if row is None else Pick(local, row, local.values(row))


class Compared(msgspec.Struct, frozen=True):
    """The record of a choice."""

    legs: tuple[Record, ...]
    rejected: tuple[Candidate, ...]

    def __call__(self) -> tuple[Candidate, ...]:
        found: list[Candidate] = []
        for leg in self.legs:
            found += leg()
        found += self.rejected
        return tuple(found)


def _pull(row: int, view: ClusterView, weighed: Weighed) -> NodeView | None:
    return view.nodes[weighed.source] if weighed.source is not None and weighed.is_fetched(row) else None


WELL = 0.9
"""Of what rows may take on average from token to token, as long as some of them take more."""

LEAST_STRAIN = 0.05
"""Of rows that a prompt slows at all."""
ROUNDING = 1e-9
MOST_DOUBT = 0.5
"""More than that is not known better either, and a mode shall not stay for ever."""
SHARPNESS = 3
"""How fast the price is forgotten beyond that point: by replays of generated mixes, where 1, 2 and 5 gave less goodput."""


def _num_slowed(node: Station[float]) -> float:
    """Rows that a prompt there slows. Those of a decode node's prompts are its own."""
    return node.rows if node.is_server else node.rows + node.num_prompts


def _lateness(query: Query, view: ClusterView) -> float:
    """Of the first tokens of those that wait: 0 while a node is idle, 1 when they will just be in time."""
    nodes = view.serving if view.serving.num_nodes else view.decoding
    if nodes.least_wait_s <= 0.0:
        return 0.0
    usual_s = nodes.backlog_s / max(nodes.prompts, 1)
    wait_s = nodes.least_wait_s + query.num_held / nodes.num_nodes * usual_s
    node = view.stations.one(view.roster.accepting.rows[0])
    return wait_s / max(seconds_of.PATIENCE * seconds_of.alone_s(node, max(query.num_tokens, query.usual_tokens), 0.0), seconds_of.TINY)


def _doubt_s(pick: Pick, view: ClusterView) -> float:
    """Of a prompt's time there: of what is computed, whose cost the node fitted."""
    doubt = view.stations.one(pick.row).doubt
    return (doubt if doubt < MOST_DOUBT else MOST_DOUBT) * (pick.values[0] + pick.values[1])


def _slowness(row: int, tpot_s: float, query: Query, view: ClusterView) -> float:
    """Of rows on a node: 0 when each is as fast as alone, 1 when they are as slow as they may be."""
    node = view.stations.one(row)
    alone_s = node.decode_fixed_s + node.each_row_s + node.context_s * (query.num_tokens + query.expected_output / 2)
    limit_s = query.itl_s or seconds_of.COMFORT * alone_s
    slower_s = tpot_s - alone_s
    return slower_s / max(limit_s - alone_s, seconds_of.TINY) if slower_s > ROUNDING * tpot_s else 0.0


MOST_SHARE = 0.9
"""Nobody computes prompts for longer than that and still takes rows."""


def _share_now(nodes: Totals, num_held: int = 0) -> float:
    """Of the time in which such nodes compute prompts, told from how many are there or wait for them: with Poisson arrivals ρ = N ÷ (1 + N)."""
    prompts = nodes.prompts + num_held
    return prompts / (prompts + nodes.num_nodes) if nodes.num_nodes else 0.0


def _share_lately(nodes: Totals, busy_nodes: float) -> float:
    """The same as it was over the last seconds, told from the work that was sent there. What is on a decode node now says less about the life of a
    row: it is soon over (`row_on` counts it), and whether more follows is this policy's own choice."""
    return min(busy_nodes / nodes.num_nodes, MOST_SHARE) if nodes.num_nodes else 0.0


def _share_later(serving: Totals, decoding: Totals, query: Query, view: ClusterView, asked: Scales) -> float:
    """The same over the life of an answer. By Little's law the rows that run came at rows ÷ (output × TPOT) a second, each with a prompt about as
    long as what it attends to now, and cached about as far as this one is at best."""
    rows = serving.rows + decoding.rows
    life_s = query.expected_output * (serving.tpot_rows + decoding.tpot_rows) / max(rows, 1)
    if life_s <= 0.0 or not serving.num_nodes:
        return 0.0
    computing = view.roster.prefill
    mean = (serving.context_tokens + decoding.context_tokens) / rows
    known = asked.most_cached(computing) / query.num_tokens
    work_s = seconds_of.alone_s(view.stations.one(computing.rows[0]), mean * (1 - known), mean * known)
    return min(work_s * rows / life_s / serving.num_nodes, MOST_SHARE)

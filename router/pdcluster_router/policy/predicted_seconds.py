"""The default policy: least predicted seconds, by the nodes' own cost models, with the mode chosen per request (DESIGN
§7).

Sources: predicted TTFT is from Mooncake's Conductor (FAST'25, algorithm 1). The price of uncached work is our own.

1. Prefill leg: wait + compute + price × compute + what running rows lose + copy. The price is what a second of work
   costs later requests: alpha × the queue of the least loaded node, in average prompts. While any node is idle the
   price is 0, and the least wait + compute wins. When all have a queue, saving work is worth more than a shorter queue.
   A prefix on another node is fetched where that is sooner than computing it. Either way the KV then exists twice, in
   room that may have held other prefixes. So a copy costs COPY_WEIGHT of computing it, as far as caches lose prefixes
   that are asked for (Query.lost). It costs that also while nodes are idle.
2. Decode leg: exposed transfer + output × TPOT + what the rows beside it lose + the wait for room + copy. On a serving
   node, the copy is of all that the computing node keeps.
3. Local: both legs on one node, without a transfer. Work on a decode node delays no other prompt, so it has no price;
   its rows pay. A second that they lose weighs more, the less they have left until they are slow (COMFORT), compared
   with what the prompt has left until it is late (PATIENCE). Between modes, the price counts only as far as first
   tokens are nearer to being late than these rows are to being slow. So rows are not slowed for harmless waits, and
   both limits are reached together.
4. TPOT counts prompts that will be computed beside the row while it lives. It takes the waiting prompts, the prompts
   that running rows came with, and, where nodes have roles, the prompts sent lately to any prefill node. A prompt on a
   decode node slows a row once. Beyond COMFORT times a lone row's time, a second weighs more. So decode nodes take
   prompts while their rows are well served, and prefill nodes take rows while they are idle enough.
5. Mode: remote or local, whichever is less. The mode of the last free choice keeps a margin: a share of the time to
   first token, plus the error bars of the nodes' models. So ties do not flip with every report. A prompt that would
   hold up running rows beyond the inter-token limit goes elsewhere while a pair can take it. Where the prefill node has
   rows, too, the prompt goes where these are fewer. Nodes that are passed over for their rows do not count as room.
   While the other nodes are busy, the request waits in the router (`queueing.gate`).
6. While no node knows its step costs, the product score decides.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy import pools as filters
from pdcluster_router.policy.base import Predicted, Query, RoutingDecision
from pdcluster_router.policy.decisions import HEAD, PackedComparison, PackedDecision, PlacementQuery
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.predicted import scoring as numbers
from pdcluster_router.policy.predicted.placing import BEST, BEST_S, ESTIMATE_S, GOES, SENT_S
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scales import Comparison, Suiting, asked_of, known, known_blocks, planned
from pdcluster_router.policy.scored import Scored

ALONE = (numbers.LOCAL_LEG,)
APART = (numbers.PREFILL_LEG, numbers.DECODE_LEG)
EITHER = (*APART, numbers.LOCAL_LEG)


class Seconds:
    """Implements Policy.

    alpha: see rule 1.
    harm: weight of a running row's pause against the new request's seconds, on a decode node times that of rule 3.
    margin: of the last mode, as a share of the time to first token.
    gap: multiple of a batch's pace that its rows may be held up at once, without a limit in seconds. By default as long
    as a chunk takes.
    """

    name = "seconds"

    def __init__(self, alpha: float = 3.0, harm: float = 1.0, margin: float = 0.1, gap: float = inf) -> None:
        self._own = float(alpha), float(harm), float(margin), float(gap)
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> RoutingDecision:
        if view.typical_cost is None:
            return replace(self._cold.choose(query, view), policy=self.name)
        scorer, roster, asked = compiled.in_use(), view.roster, asked_of(query, self._own)
        plan, table, found = planned(query, view, scorer), scorer.table(view), scorer.blank()
        cached, source, held = known(query.cached, query.held, query.num_tokens, roster, scorer)
        first = scorer.first_leg(
            table,
            cached,
            held,
            source,
            scorer.paths(roster, source, view.reported(source).bandwidth) if source >= 0 else scorer.nothing(roster),
            plan.serving,
            plan.decoding,
            plan.prefill,
            plan.decode,
            plan.local,
            plan.groups,
            plan.exchange,
            plan.wants_local,
            asked,
            found,
        )
        if first < 0:
            if not plan.may_be_local:
                raise filters.no_partner(
                    view.node(filters.ready(filters.pools(query, view).prefill, query, view).rows[0])
                )
            return self._choice(Comparison(scorer, found, ALONE, query, view, plan.is_whole), view, source)
        prefill, decode = view.reported(first), plan.decode
        if query.busy:
            decode = scorer.rows(
                filters.ready(filters.partners(filters.pools(query, view).decode, prefill, view), query, view)
            )
        scorer.pair(
            table,
            cached,
            scorer.paths(roster, first, prefill.bandwidth),
            decode,
            plan.groups,
            plan.exchange,
            asked,
            found,
        )
        choice = self._choice(
            Comparison(scorer, found, EITHER if plan.wants_local else APART, query, view, plan.is_whole), view, source
        )
        if choice.mode == "remote":
            return choice
        return replace(choice, suits=Suiting(query, view, scorer.bears, table, asked, float(found[numbers.BEARABLE])))

    def place(self, asked: PlacementQuery, view: ClusterView) -> PackedDecision | None:
        """The same for a request that may go to any node, goes at once, and fetches nothing; None: use `choose`. Raises
        as `choose`.
        """
        if view.typical_cost is None:
            return None
        scorer, roster, num_tokens, numbers_asked = (
            compiled.in_use(),
            view.roster,
            asked.num_tokens,
            asked.numbers + self._own,
        )
        if not roster.takes_all(asked.row_tokens, asked.model) or roster.has_namesakes:
            return None
        force, fallback = asked.force, asked.fallback
        plan = roster.plans.get((force, fallback, scorer)) or planned(
            Query(num_tokens, force=force, fallback=fallback), view, scorer
        )
        if not plan.is_whole:
            return None
        table, (found, told) = scorer.table(view), scorer.scratch
        cached, source, held, most_held, most_cached = known_blocks(
            asked.held, asked.expected, asked.block_tokens, roster, scorer
        )
        paths = scorer.paths(roster, source, view.reported(source).bandwidth) if source >= 0 else scorer.nothing(roster)
        usual, room_s = asked.usual_tokens, asked.room_s
        first = scorer.place(table, cached, held, source, paths, *plan.pools, numbers_asked, usual, room_s, found, told)
        if first < 0:
            if not plan.may_be_local:
                return None
            packed = scorer.packed(told, -first)
        else:
            paths = scorer.paths(roster, first, view.reported(first).bandwidth)
            pools = plan.decode, plan.groups, plan.exchange, plan.wants_local
            packed = scorer.packed(
                told, scorer.place_pair(table, cached, paths, *pools, numbers_asked, usual, room_s, found, told)
            )
        head = HEAD.unpack_from(packed)
        if head[GOES] == 0.0 or head[numbers.IS_FETCHED] != 0.0:
            return None
        is_local, row = head[numbers.MODE] == numbers.LOCAL, int(head[numbers.DECODE])
        decode = view.reported(row)
        prefill, own = (None, int(cached[row])) if is_local else (view.reported(first), int(cached[first]))
        predicted = Predicted(head[numbers.TTFT_S], head[numbers.FOUND_TPOT_S])
        choice = RoutingDecision("local" if is_local else "remote", prefill, decode, tuple, predicted, self.name)
        comparison = PackedComparison(
            self.name, num_tokens, packed, roster.names, head[numbers.TTFT_S], int(head[BEST]), head[BEST_S]
        )
        return PackedDecision(
            choice, head[SENT_S], head[ESTIMATE_S], asked.hashes, own, most_held, most_cached, comparison
        )

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        if view.typical_cost is None:
            return self._cold.choose_decode(query, view, prefill)
        pool = filters.partners_of_parked(query, view, prefill)
        if not pool:
            return None
        scorer, roster = compiled.in_use(), view.roster
        row = scorer.parked(
            scorer.table(view),
            known(query.cached, query.held, query.num_tokens, roster, scorer)[0],
            scorer.paths(roster, roster.row_of.get(prefill.incarnation, -1), prefill.bandwidth),
            scorer.rows(roster.prefill),
            scorer.rows(roster.decode_only),
            scorer.rows(pool),
            *scorer.groups(roster),
            float(view.node_row_of(prefill).chunk_tokens),
            asked_of(query, self._own),
            scorer.blank(),
        )
        return view.node(row)

    def _choice(self, record: Comparison, view: ClusterView, source: int) -> RoutingDecision:
        mode, first, row, ttft_s, tpot_s, is_fetched = record.scorer.part(record.found, 0, numbers.SKIPPED)
        pull, predicted, decode = (
            view.node(source) if is_fetched else None,
            Predicted(ttft_s, tpot_s),
            view.node(int(row)),
        )
        if mode == numbers.LOCAL:
            return RoutingDecision("local", None, decode, record, predicted, self.name, pull)
        return RoutingDecision("remote", view.node(int(first)), decode, record, predicted, self.name, pull)

"""The default policy: least predicted seconds, by the nodes' own cost models, with the mode chosen per request.

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
from typing import Any

import numpy as np
from msgspec.structs import replace

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy import eligibility
from pdcluster_router.policy.base import Decision, DecisionRecord, Query
from pdcluster_router.policy.comparison import KnownPrefix, PackedCandidates, known_prefix, request_values
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.predicted.compiled import Scoring
from pdcluster_router.policy.predicted.records import (
    COMPUTES,
    DECODE_LEG,
    DECODES,
    LOCAL_LEG,
    NOWHERE,
    PREFILL_LEG,
    ChoiceRow,
)
from pdcluster_router.policy.predicted.scoring import start_of
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scored import Scored


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
        self._weights = float(alpha), float(harm), float(margin), float(gap)
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> Decision:
        if view.typical is None:
            decision = self._cold.choose(query, view)
            return replace(decision, record=replace(decision.record, policy=self.name))
        scorer, roster, legs = compiled.in_use(), view.roster, eligibility.legs_of(query, view)
        known = known_prefix(query, roster)
        asked = scorer.request(request_values(query, known, self._weights, wants_local=legs.wants_local))
        nodes, bits, cached = view.scored_by(scorer), scorer.numbers(legs.bits.copy()), scorer.numbers(known.cached)
        scored = asked, scorer.choice, scorer.seen
        paths = _paths(view, known.source)
        first = scorer.first_leg(nodes, bits, cached, scorer.numbers(paths), *scored)
        if first != NOWHERE:
            scorer.pair(nodes, bits, cached, scorer.numbers(_paths(view, first)), *scored)
        elif not legs.may_be_local:
            raise eligibility.no_partner(view.node(legs.rows(COMPUTES)[0]))
        return self._decision(scorer, known, asked, bits, query, view)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        if view.typical is None:
            return self._cold.choose_decode(query, view, prefill)
        bits = eligibility.decoders_for(query, view, prefill)
        if not (bits & DECODES).any():
            return None
        scorer, roster, known = compiled.in_use(), view.roster, known_prefix(query, view.roster)
        chunk = view.row_of(prefill).chunk_tokens
        row = scorer.parked(
            view.scored_by(scorer),
            scorer.numbers(bits),
            scorer.numbers(known.cached),
            scorer.numbers(roster.paths(roster.row_of.get(prefill.incarnation, NOWHERE), prefill.bandwidth)),
            scorer.request(request_values(query, known, self._weights, parked_chunk=chunk)),
            scorer.choice,
            scorer.seen,
        )
        return view.node(row)

    def _decision(
        self, scorer: Scoring, known: KnownPrefix, asked: Any, bits: Any, query: Query, view: ClusterView
    ) -> Decision:
        found, names = scorer.found(), view.roster.names
        is_local = found.prefill == NOWHERE
        prefill, decode = None if is_local else view.reported(found.prefill), view.reported(found.decode)
        ruled_out = tuple(eligibility.rejected(query, view))
        record = DecisionRecord(  # by position, which costs half
            self.name,
            "local" if is_local else "remote",
            None if is_local else names[found.prefill],
            names[found.decode],
            query.num_tokens,
            PackedCandidates(_packed(scorer, found), names, found.is_calm > 0, ruled_out),
            found.estimate_s,
            found.ttft_s,
            found.tpot_s,
            None if found.best == NOWHERE else names[found.best],
            found.best_s,
            known.most,
        )
        decision = Decision(record, prefill, decode, query, view, np.asarray(bits), asked, found.work_s)
        return decision.pulling(view.node(known.source)) if found.is_fetched else decision


def _paths(view: ClusterView, row: int) -> Any:
    """Bytes/s from the node of that row."""
    return view.roster.zeros if row == NOWHERE else view.roster.paths(row, view.reported(row).bandwidth)


def _packed(scorer: Scoring, found: ChoiceRow) -> bytes:
    """The candidates of all legs, the best first. Prefill nodes without a partner were not compared."""
    legs = (
        (start_of(PREFILL_LEG) + found.skipped, start_of(PREFILL_LEG) + found.num_prefill),
        (start_of(DECODE_LEG), start_of(DECODE_LEG) + found.num_decode),
        (start_of(LOCAL_LEG), start_of(LOCAL_LEG) + found.num_local),
    )
    return b"".join([scorer.packed(start, end) for start, end in legs if start < end])

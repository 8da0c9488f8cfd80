"""The default policy: least predicted seconds, by the nodes' own cost models, with the mode chosen per request.

Sources: predicted TTFT is from Mooncake's Conductor (FAST'25, algorithm 1). The price of uncached work is our own.

1. Prefill leg: wait + compute + price × compute + what running rows lose + copy. The price is what a second of work
   costs later requests: alpha × the queue of the least loaded node, in average prompts. While a node is idle it is 0.
   A prefix on another node is fetched where that is sooner than computing it. Then its KV exists twice, in room that
   may have held other prefixes. So a copy costs as much as computing it, as far as caches lose prefixes that are asked
   for (Query.lost). Work on a decode node delays no other prompt, so it has no price; its rows pay.
2. Decode leg: exposed transfer + output × TPOT + what the rows beside it lose + the wait for room + copy. Where the
   decode node makes the first token, the whole transfer is exposed, and belongs to the time to first token.
3. TPOT counts prompts that will be computed beside the row while it lives: those that wait, those that running rows
   came with, and, where nodes have roles, those sent lately. A prompt on a decode node slows a row once.
4. Local: both legs on one node, without a transfer. Not where the prompt would hold up running rows beyond their limit,
   while a pair can take it. Where the prefill node has rows, too, the prompt goes where these are fewer.
5. Mode: whichever costs less. The last free choice keeps a margin: a share of the time to first token, plus the error
   bars of the nodes' models. So ties do not flip with every report.
6. While no node knows its step costs, the product score decides.

Each rule earns its place by the table in docs/decisions/017.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.node_row import COMPUTES, DECODES
from pdcluster_router.policy import eligibility
from pdcluster_router.policy.base import Decision, DecisionRecord, Query, known_prefix, request_values
from pdcluster_router.policy.baselines import Product
from pdcluster_router.policy.candidates import MOST_LISTED, Candidates
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.predicted.records import NOWHERE, RequestRow
from pdcluster_router.policy.scored import Scored


class Seconds:
    """Implements Policy.

    alpha: see rule 1.
    harm: weight of a running row's pause against the new request's seconds, on a decode node times that of rule 3.
    margin: of the last mode, as a share of the time to first token.
    """

    name = "seconds"

    def __init__(self, alpha: float = 3.0, harm: float = 1.0, margin: float = 0.1) -> None:
        self._weights = float(alpha), float(harm), float(margin)
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> Decision:
        if view.typical is None:
            decision = self._cold.choose(query, view)
            return replace(decision, record=replace(decision.record, policy=self.name))
        scorer, roster, legs = compiled.active, view.roster, eligibility.legs_of(query, view)
        known, bits = known_prefix(query, roster), legs.bits.copy()
        asked = np.array([request_values(query, known, self._weights, wants_local=legs.wants_local)], RequestRow.dtype)
        scored = asked, scorer.choice, scorer.seen
        first = scorer.first_leg(view.table, bits, known.cached, view.paths(known.source), *scored)
        if first != NOWHERE:
            scorer.pair(view.table, bits, known.cached, view.paths(first), *scored)
        elif not legs.may_be_local:
            raise eligibility.no_partner(view.node(legs.rows(COMPUTES)[0]))
        found, names = scorer.found(), roster.names
        is_local = found.prefill == NOWHERE
        row = found.decode if is_local else found.prefill
        node, decode = view.reported[row], view.reported[found.decode]
        packed = scorer.packed(found.num_prefill, found.num_decode, found.num_local, found.skipped)
        num = found.num_prefill - found.skipped + found.num_decode + found.num_local
        num_ruled_out = legs.num_ruled_out
        ruled_out = eligibility.rejected(query, view, MOST_LISTED) if num_ruled_out else ()
        record = DecisionRecord(  # by position, which costs half
            self.name,
            "local" if is_local else "remote",
            None if is_local else names[row],
            names[found.decode],
            query.num_tokens,
            Candidates(packed, names, found.is_calm > 0, ruled_out, num + num_ruled_out),
            found.estimate_s,
            found.ttft_s,
            found.tpot_s,
            None if found.best == NOWHERE else names[found.best],
            found.best_s,
            known.most,
            is_estimated=node.capabilities.estimated_cost,
        )
        prefill, rows = None if is_local else node, (row, found.decode)
        decision = Decision(record, node, prefill, decode, rows, query, view, bits, found.work_s)
        return decision.pulling(view.node(known.source)) if found.is_fetched else decision

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        if view.typical is None:
            return self._cold.choose_decode(query, view, prefill)
        bits = eligibility.decoders_for(query, view, prefill)
        if not (bits & DECODES).any():
            return None
        scorer, known = compiled.active, known_prefix(query, view.roster)
        asked = request_values(query, known, self._weights, parked_chunk=view.row_of(prefill).chunk_tokens)
        row = scorer.parked(
            view.table,
            bits,
            known.cached,
            view.roster.paths(view.roster.row_of.get(prefill.incarnation, NOWHERE), prefill.bandwidth),
            np.array([asked], RequestRow.dtype),
            scorer.choice,
            scorer.seen,
        )
        return view.node(row)

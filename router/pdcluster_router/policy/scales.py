"""Converts a query and a view into the numbers of `predicted.scoring`, and its results into records. It decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pdcluster_router.cluster.view import ClusterView, NodeView, Roster
from pdcluster_router.policy import pools as filters
from pdcluster_router.policy.base import Candidate, LegName, Query
from pdcluster_router.policy.predicted.compiled import Scoring
from pdcluster_router.policy.predicted.cost_model import DECODE_TERMS, LOCAL_TERMS, PREFILL_TERMS, Numbers
from pdcluster_router.policy.predicted.node_rows import Pool
from pdcluster_router.policy.predicted.scoring import (
    DECODE_LEG,
    ENTRY,
    ENTRY_VALUES,
    HEADER,
    IS_CALM,
    LOCAL,
    LOCAL_LEG,
    NO_MODE,
    NUM_LEG,
    PREFILL_LEG,
    REMOTE,
    SKIPPED,
    Rows,
    Table,
    start_of,
)

NOWHERE = -1
NO_NODES = Pool((), 0)
PREVIOUS = {None: NO_MODE, "local": LOCAL, "remote": REMOTE}
# Legs by the numbers of scoring: name, terms, offset of the first entry, and numbers per entry.
LEGS: tuple[tuple[LegName, tuple[str, ...], int, int], ...] = (
    ("prefill", PREFILL_TERMS, start_of(PREFILL_LEG, 0), ENTRY_VALUES + len(PREFILL_TERMS)),
    ("decode", DECODE_TERMS, start_of(DECODE_LEG, 0), ENTRY_VALUES + len(DECODE_TERMS)),
    ("local", LOCAL_TERMS, start_of(LOCAL_LEG, 0), ENTRY_VALUES + len(LOCAL_TERMS)),
)
REJECTED = "holds up running rows"


class ScoringPlan(msgspec.Struct, frozen=True, gc=False):
    """Arguments that depend on the nodes a request may use.

    serving: nodes that compute prompts for others.
    decoding: decode-only nodes.
    wants_local: mode local is scored though a pair is possible.
    may_be_local: one node may serve where no pair is possible.
    is_whole: every node takes the request.
    """

    serving: Rows
    decoding: Rows
    prefill: Rows
    decode: Rows
    local: Rows
    groups: Rows
    exchange: Table
    wants_local: bool
    may_be_local: bool
    is_whole: bool
    # The first eight arguments, in call order.
    pools: tuple[Rows, Rows, Rows, Rows, Rows, Rows, Table, bool]


def planned(query: Query, view: ClusterView, scorer: Scoring) -> ScoringPlan:
    """The plan of a query, cached with the roster for requests that may use any node. Raises as `pools` does."""
    roster = view.roster
    if query.excluded or query.busy or not roster.takes_all(query.row_tokens, query.model):
        return _plan(query, view, scorer)
    key = query.force, query.fallback, scorer
    plan: ScoringPlan | None = roster.plans.get(key)
    if plan is None:
        plan = roster.plans[key] = _plan(query, view, scorer)
    return plan


def _plan(query: Query, view: ClusterView, scorer: Scoring) -> ScoringPlan:
    roster, pools, rows = view.roster, filters.pools(query, view), scorer.rows
    prefill = filters.ready(pools.prefill, query, view) if query.force != "local" else NO_NODES
    taken = (
        rows(roster.prefill),
        rows(roster.decode_only),
        rows(prefill),
        rows(pools.decode),
        rows(filters.ready(pools.local, query, view)),
        *scorer.groups(roster),
        query.force == "auto" and (query.fallback == "conditional" or not pools.is_split),
    )
    return ScoringPlan(
        *taken, query.force == "local" or filters.may_be_local(query, pools), not filters.rejected(query, view), taken
    )


def known(
    cached: Mapping[str, int], held: Mapping[str, int] | None, num_tokens: int, roster: Roster, scorer: Scoring
) -> tuple[Numbers, int, float]:
    """Cached tokens of the prompt by row; the row that holds most, NOWHERE for none, the first of equals; and how much
    that is.

    cached, held: see Query.
    """
    if not cached and not held:
        return scorer.nothing(roster), NOWHERE, 0.0
    row_of, members, limit = roster.row_of, roster.accepting.members, num_tokens
    found, source, most = scorer.zeros(len(roster.names)), NOWHERE, 0
    for incarnation, tokens in cached.items():
        row = row_of.get(incarnation)
        if row is not None:
            tokens = tokens if tokens < limit else limit
            found[row] = tokens
            if (tokens > most or (tokens == most and row < source)) and row in members:
                source, most = row, tokens
    if held is None:
        return found, source, float(most)
    source, most = NOWHERE, 0
    for incarnation, tokens in held.items():
        row = row_of.get(incarnation)
        tokens = tokens if tokens < limit else limit
        if row is not None and (tokens > most or (tokens == most and row < source)) and row in members:
            source, most = row, tokens
    return found, source, float(most)


def known_blocks(
    held: Mapping[str, int], expected: Mapping[str, int], block_tokens: int, roster: Roster, scorer: Scoring
) -> tuple[Numbers, int, float, int, int]:
    """The same from leading blocks held and expected; then the most tokens of any node, and the most cached in the
    roster.
    """
    if not held and not expected:
        return scorer.nothing(roster), NOWHERE, 0.0, 0, 0
    row_of, members, found = roster.row_of, roster.accepting.members, scorer.zeros(len(roster.names))
    source, most, most_held, most_cached = NOWHERE, 0, 0, 0
    for incarnation, num_blocks in held.items():
        row, tokens = row_of.get(incarnation), num_blocks * block_tokens
        if tokens > most_held:
            most_held = tokens
        if row is not None:
            found[row] = tokens
            if tokens > most_cached:
                most_cached = tokens
            if (tokens > most or (tokens == most and row < source)) and row in members:
                source, most = row, tokens
    for incarnation, num_blocks in expected.items():
        row, tokens = row_of.get(incarnation), num_blocks * block_tokens
        if row is not None and tokens > found[row]:
            found[row] = tokens
            if tokens > most_cached:
                most_cached = tokens
    return found, source, float(most), most_held, most_cached


class Comparison(msgspec.Struct, eq=False):
    """The record of a choice, as numbers until it is read. Reading drops them and the view.

    is_whole: every node of the view could take the request.
    """

    scorer: Scoring
    found: Numbers
    legs: tuple[int, ...]
    query: Query
    view: ClusterView | None
    is_whole: bool
    told: tuple[Candidate, ...] = ()

    def __call__(self) -> tuple[Candidate, ...]:
        view, found, part = self.view, self.found, self.scorer.part
        if view is None:
            return self.told
        head = part(found, 0, HEADER)
        candidates: list[Candidate] = []
        for leg in self.legs:
            name, terms, at, size = LEGS[leg]
            rejected_by = REJECTED if leg == LOCAL_LEG and len(self.legs) > 1 and not head[IS_CALM] else ""
            first = int(head[SKIPPED]) if leg == PREFILL_LEG else 0
            for place in range(at + first * ENTRY, at + int(head[NUM_LEG + leg]) * ENTRY, ENTRY):
                row, cost, _, cached, *values = part(found, place, place + size)
                candidates.append(
                    Candidate(view.node(int(row)), name, int(cached), terms, tuple(values), cost, rejected_by)
                )
        if not self.is_whole:
            candidates += filters.rejected(self.query, view)
        self.told, self.view, self.found = tuple(candidates), None, ()
        return self.told


class Suiting(msgspec.Struct, frozen=True):
    """Implements base.Suits for mode local: nodes where the prompt holds up no running rows for long.

    Where the prefill node holds up rows, too, nodes that hold up no more rows than that.
    """

    query: Query
    view: ClusterView
    bears: Callable[..., bool]
    table: Table
    asked: Numbers
    most: float

    def __call__(self, node: NodeView) -> bool:
        row = self.view.roster.row_of[node.incarnation]
        return self.bears(self.table[row], float(self.query.cached_on(node)), self.asked, self.most)


def asked_of(query: Query, own: tuple[float, float, float, float]) -> tuple[float, ...]:
    """Numbers of a query.

    own: the policy's.
    """
    return (
        float(query.num_tokens),
        float(query.expected_output),
        query.itl_s,
        float(query.num_held),
        query.usual_tokens,
        query.busy_serving,
        query.busy_decoding,
        PREVIOUS[query.previous],
        query.lost,
        *own,
    )

"""Puts a query and a view into the numbers that `weighing` takes, and makes of what it found what people read. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdcluster_router.policy import weighing as numbers
from pdcluster_router.policy.base import Candidate, LegName, Query
from pdcluster_router.policy.compiled import Weighing
from pdcluster_router.policy.estimates import DECODE_TERMS, LOCAL_TERMS, PREFILL_TERMS, Numbers
from pdcluster_router.policy.weighing import Table
from pdcluster_router.view import ClusterView, NodeView, Roster

NOWHERE = -1
PREVIOUS = {None: numbers.NO_MODE, "local": numbers.LOCAL, "remote": numbers.REMOTE}
LEGS: tuple[tuple[LegName, tuple[str, ...]], ...] = (
    ("prefill", PREFILL_TERMS),
    ("decode", DECODE_TERMS),
    ("local", LOCAL_TERMS),
)
"""By the numbers of `weighing`."""


class Holder(msgspec.Struct, frozen=True, gc=False):
    """The node that takes work from which most of a prompt can be fetched. row: NOWHERE when nobody has anything."""

    row: int = NOWHERE
    tokens: float = 0.0


NOBODY = Holder()


def holder(query: Query, roster: Roster) -> Holder:
    """The first one, when several have as much."""
    by_node = query.cached if query.held is None else query.held
    if not by_node:
        return NOBODY
    found, most, limit = NOWHERE, 0, query.num_tokens
    row_of, members = roster.row_of, roster.accepting.members
    for incarnation, tokens in by_node.items():
        tokens = tokens if tokens < limit else limit
        if tokens < most or tokens <= 0:
            continue
        row = row_of.get(incarnation, NOWHERE)
        if row in members and (tokens > most or row < found):
            found, most = row, tokens
    return Holder(found, float(most)) if found >= 0 else NOBODY


def cached_tokens(query: Query, roster: Roster, weighing: Weighing) -> Numbers:
    """By row."""
    if not query.cached:
        return weighing.paths(roster, None)
    row_of, limit, found = roster.row_of, query.num_tokens, weighing.zeros(len(roster.names))
    for incarnation, tokens in query.cached.items():
        row = row_of.get(incarnation)
        if row is not None:
            found[row] = tokens if tokens < limit else limit
    return found


class Compared(msgspec.Struct, frozen=True):
    """The record of a choice, in bare numbers until somebody reads it."""

    weighing: Weighing
    found: Numbers
    nodes: Sequence[NodeView]
    legs: tuple[int, ...]
    rejected: tuple[Candidate, ...]

    def __call__(self) -> tuple[Candidate, ...]:
        part, found, nodes = self.weighing.part, self.found, self.nodes
        head = part(found, 0, numbers.HEADER)
        candidates: list[Candidate] = []
        for leg in self.legs:
            name, terms, rejected_by = *LEGS[leg], ""
            if leg == numbers.LOCAL_LEG and len(self.legs) > 1 and not head[numbers.IS_CALM]:
                rejected_by = "holds up running rows"
            for rank in range(int(head[numbers.SKIPPED]) if leg == numbers.PREFILL_LEG else 0, int(head[numbers.NUM_LEG + leg])):
                at = numbers.start_of(leg, rank)
                row, cost, _, cached, *values = part(found, at, at + numbers.ENTRY_VALUES + len(terms))
                candidates.append(Candidate(nodes[int(row)], name, int(cached), terms, tuple(values), cost, rejected_by))
        candidates += self.rejected
        return tuple(candidates)


class Suiting(msgspec.Struct, frozen=True):
    """Implements base.Suits for mode local: nodes that hold up no running rows for long by the prompt; where the prefill node would, too, those that
    hold up no more rows than that."""

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
    """own: the policy's."""
    return (
        float(query.num_tokens),
        float(query.expected_output),
        query.itl_s,
        float(query.num_held),
        query.usual_tokens,
        query.busy_serving,
        query.busy_decoding,
        PREVIOUS[query.previous],
        *own,
    )

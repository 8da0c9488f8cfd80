"""A query as numbers, and what a choice compared, as records of candidates."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcluster.cost.cost import CostError
from pdcluster_router.cluster.view import Roster
from pdcluster_router.policy.base import Candidate, LegName, Query
from pdcluster_router.policy.predicted.records import LOCAL_LEG, MODES, NOWHERE, TERMS, CandidateRow

# Legs by CandidateRow.leg.
LEG_NAMES: tuple[LegName, ...] = ("prefill", "decode", "local")
TERM_NAMES = tuple(tuple(name.removesuffix("_s") for name in names) for names in TERMS)
HELD_UP = "holds up running rows"

# About what a listed candidate takes.
CANDIDATE_BYTES = 500
# Candidates that are kept of those that were ruled out, and of each leg.
MOST_LISTED = 16


class KnownPrefix(msgspec.Struct, frozen=True):
    """What nodes have of a prompt.

    cached: tokens by row.
    source: the row that holds most, NOWHERE for none, the first of equals; held: how much that is.
    most: of any node.
    """

    cached: NDArray[Any]
    source: int
    held: int
    most: int


def known_prefix(query: Query, roster: Roster) -> KnownPrefix:
    if not query.cached and not query.held:
        return KnownPrefix(roster.zeros, NOWHERE, 0, 0)
    row_of, accepting, limit = roster.row_of, roster.accepting, query.num_tokens
    cached, most, source, held = np.zeros(len(roster.names)), 0, NOWHERE, 0
    is_alike = query.held is None or query.held is query.cached
    for incarnation, tokens in query.cached.items():
        row = row_of.get(incarnation, NOWHERE)
        if row == NOWHERE:
            continue
        if tokens > limit:
            tokens = limit
        cached[row] = tokens
        if tokens > most:
            most = tokens
        if is_alike and (tokens > held or (tokens == held and row < source)) and row in accepting:
            source, held = row, tokens
    if query.held is not None and not is_alike:
        for incarnation, tokens in query.held.items():
            row = row_of.get(incarnation, NOWHERE)
            if tokens > limit:
                tokens = limit
            if (tokens > held or (tokens == held and row < source)) and row in accepting:
                source, held = row, tokens
    return KnownPrefix(cached, source, held, most)


def request_values(
    query: Query,
    known: KnownPrefix,
    weights: tuple[float, float, float],
    *,
    wants_local: bool = False,
    parked_chunk: float = 0.0,
) -> tuple[Any, ...]:
    """The fields of a RequestRow."""
    return (
        float(query.num_tokens),
        float(query.expected_output),
        query.itl_s,
        float(query.num_held),
        query.busy_serving,
        query.busy_decoding,
        MODES[query.previous],
        query.lost,
        known.source,
        float(known.held),
        int(wants_local),
        parked_chunk,
        *weights,
    )


def error_bar_s(ttft_s: float, spread: float, doubt: float) -> float | None:
    """The error bar of an estimate; None: unknown."""
    return ttft_s * CostError(spread, doubt).share if spread > 0.0 else None


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Implements base.Compared: candidates of `scoring` as bytes.

    rows: CandidateRow records.
    names: of the view's nodes.
    is_calm: False: the local ones hold up running rows for long.
    ruled_out: nodes that no leg could use.
    """

    rows: bytes
    names: tuple[str, ...]
    is_calm: bool
    ruled_out: tuple[Candidate, ...]

    @property
    def num(self) -> int:
        return len(self.rows) // CandidateRow.dtype.itemsize + len(self.ruled_out)

    @property
    def size_bytes(self) -> int:
        return len(self.rows) + CANDIDATE_BYTES * len(self.ruled_out[:MOST_LISTED])

    def candidates(self) -> list[Candidate]:
        rows = np.frombuffer(self.rows, CandidateRow.dtype).tolist()
        return [*(self._candidate(CandidateRow(*row)) for row in rows), *self.ruled_out[:MOST_LISTED]]

    def _candidate(self, row: CandidateRow) -> Candidate:
        terms = dict(zip(TERM_NAMES[row.leg], [getattr(row, name) for name in TERMS[row.leg]], strict=True))
        rejected_by = "" if row.leg != LOCAL_LEG or self.is_calm else HELD_UP
        ttft_s = None if row.estimate_s < 0.0 or rejected_by else row.estimate_s
        error_s = None if ttft_s is None else error_bar_s(ttft_s, row.spread, row.doubt)
        name, leg = self.names[row.row], LEG_NAMES[row.leg]
        return Candidate(name, leg, int(row.cached), row.cost, terms, ttft_s, rejected_by, error_s)


class ListedCandidates(msgspec.Struct, frozen=True):
    """Implements base.Compared: candidates of policies that are not compiled, as records."""

    listed: tuple[Candidate, ...]
    num: int

    @property
    def size_bytes(self) -> int:
        return CANDIDATE_BYTES * len(self.listed)

    def candidates(self) -> list[Candidate]:
        return list(self.listed)

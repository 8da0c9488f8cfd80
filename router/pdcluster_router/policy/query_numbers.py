"""A query as numbers: what nodes have of its prompt, and the fields of its record."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcluster_router.cluster.view import Roster
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.predicted.records import MODES, NOWHERE


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

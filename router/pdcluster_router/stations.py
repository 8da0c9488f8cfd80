"""What a policy needs of each node in numbers: worked out once when a node reports or is sent something, not with every choice.

The same fields hold one node's numbers or, as arrays, those of all nodes of a view, so that a formula is written once and asked either way: node by
node while there are FEW, which then costs less than calls of numpy, and all at once where there are more. Values and sums; what they mean for a
request is the policy's (`policy.estimates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

FEW = 48
"""Nodes up to which numbers are kept node by node; about where both ways cost the same (bench.choose)."""

Column = NDArray[np.float64]
Number = TypeVar("Number", float, Column)


class Station(msgspec.Struct, Generic[Number], frozen=True, gc=False):
    """One node, or all of them.

    is_server: 1 on nodes that compute prompts for others, 0 on decode nodes. chunk_tokens: inf when a prompt is one step. each_row_s: what a row adds
    to a step, beside context_s for each token that it attends to; added_s: what the rows that run add together. itl_s, prompt_step_s,
    stretch: see Pace.
    missing_rows: rows that must end before there is room for one more, as a share of all. tight: 1 ÷ pages that rows hold where pages are scarce,
    else 0; spare_pages: those that a row could have. doubt: share of a prompt's predicted seconds by which the node's model may be wrong."""

    is_server: Number
    num_prompts: Number
    num_requests: Number
    wait_s: Number
    backlog_s: Number
    stretch: Number
    prompt_fixed_s: Number
    token_s: Number
    pair_s: Number
    chunk_tokens: Number
    decode_fixed_s: Number
    each_row_s: Number
    context_s: Number
    rows: Number
    context_tokens: Number
    added_s: Number
    tpot_s: Number
    itl_s: Number
    prompt_step_s: Number
    missing_rows: Number
    tight: Number
    spare_pages: Number
    block_tokens: Number
    kv_bytes: Number
    doubt: Number


def row_of(station: Station[float]) -> tuple[float, ...]:
    return msgspec.structs.astuple(station)


class Pool:
    """Rows of nodes that may take a leg, ascending. Not changed once made; kept as long as these nodes are the same."""

    def __init__(self, rows: Iterable[int], size: int) -> None:
        self.rows = tuple(rows)
        self._size = size
        self._parts: dict[object, Pool] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def index(self) -> NDArray[np.int64]:
        return np.array(self.rows, np.int64)

    @cached_property
    def outside(self) -> Column:
        """0 for its rows, inf for the others: added to a cost it puts these out of the question."""
        column: Column = np.full(self._size, np.inf)
        column[self.index] = 0.0
        return column

    @cached_property
    def members(self) -> frozenset[int | None]:
        return frozenset(self.rows)

    def __and__(self, other: Pool) -> Pool:
        return other if self.rows == other.rows else self.only(other.members.__contains__)

    def only(self, is_in: Callable[[int], bool]) -> Pool:
        rows = tuple(row for row in self.rows if is_in(row))
        return self if len(rows) == len(self.rows) else Pool(rows, self._size)

    def part(self, name: object, is_in: Callable[[int], bool]) -> Pool:
        """Its rows for which that holds; looked at once for each name."""
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self.only(is_in)
        return part


class Totals(msgspec.Struct, frozen=True, gc=False):
    """Sums over some nodes. least_wait_s: of any of them; tpot_rows: TPOT × rows."""

    num_nodes: int = 0
    least_wait_s: float = 0.0
    prompts: float = 0.0
    backlog_s: float = 0.0
    rows: float = 0.0
    context_tokens: float = 0.0
    tpot_rows: float = 0.0


NOBODY = Totals()


class FewStations:
    """Implements Stations for a handful of nodes."""

    def __init__(self, stations: Sequence[Station[float]]) -> None:
        self.stations = list(stations)

    def one(self, row: int) -> Station[float]:
        return self.stations[row]

    def replaced(self, changed: Mapping[int, Station[float]]) -> FewStations:
        replaced = FewStations(self.stations)
        for row, station in changed.items():
            replaced.stations[row] = station
        return replaced

    def totals(self, pool: Pool) -> Totals:
        if not pool.rows:
            return NOBODY
        least, prompts, backlog, rows, context, tpot_rows = np.inf, 0.0, 0.0, 0.0, 0.0, 0.0
        for row in pool.rows:
            station = self.stations[row]
            if station.wait_s < least:
                least = station.wait_s
            prompts += station.num_prompts
            backlog += station.backlog_s
            rows += station.rows
            context += station.context_tokens
            tpot_rows += station.tpot_s * station.rows
        return Totals(len(pool.rows), least, prompts, backlog, rows, context, tpot_rows)


class ManyStations:
    """Implements Stations as a matrix: a line a field, a column a node."""

    def __init__(self, matrix: NDArray[np.float64]) -> None:
        self._matrix = matrix
        self.columns: Station[Column] = Station(*matrix)

    @classmethod
    def of(cls, stations: Sequence[Station[float]]) -> ManyStations:
        return cls(np.array([row_of(station) for station in stations]).T.copy())

    def one(self, row: int) -> Station[float]:
        return Station(*self._matrix[:, row].tolist())

    def replaced(self, changed: Mapping[int, Station[float]]) -> ManyStations:
        matrix = self._matrix.copy()
        for row, station in changed.items():
            matrix[:, row] = row_of(station)
        return ManyStations(matrix)

    def totals(self, pool: Pool) -> Totals:
        if not pool:
            return NOBODY
        held = Station(*self._matrix[:, pool.index])
        return Totals(
            len(pool),
            float(held.wait_s.min()),
            float(held.num_prompts.sum()),
            float(held.backlog_s.sum()),
            float(held.rows.sum()),
            float(held.context_tokens.sum()),
            float(held.tpot_s @ held.rows),
        )


Stations = FewStations | ManyStations


def stations_of(each: Sequence[Station[float]]) -> Stations:
    return FewStations(each) if len(each) <= FEW else ManyStations.of(each)

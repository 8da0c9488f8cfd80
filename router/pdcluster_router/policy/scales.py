"""Weighs the nodes of a view for one query: puts numbers into the formulas of `estimates` and ranks what comes out. Nothing is decided here.

A handful of nodes is weighed one by one (`one_by_one`), many at once as arrays, by the same formulas; both give the same Ranked, whose numbers are
looked at again only when somebody reads the record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from pdcluster_router.policy import estimates as seconds_of
from pdcluster_router.policy import one_by_one
from pdcluster_router.policy.base import Candidate, LegName, Query, Record
from pdcluster_router.policy.estimates import Ask, Market, Prompt, Row, Values
from pdcluster_router.stations import Column, FewStations, ManyStations, Pool, Station
from pdcluster_router.view import ClusterView, NodeView

MOST_CANDIDATES = 16
"""Looked at and kept for the record, per leg."""


class Weights(Protocol):
    """Terms of one leg by row. is_light: so small that it may be kept as long as the request runs."""

    @property
    def is_light(self) -> bool: ...

    def best(self, pool: Pool) -> int: ...

    def order(self, pool: Pool) -> list[int]:
        """The first MOST_CANDIDATES, best first."""
        ...

    def values(self, row: int) -> Values: ...


class Ranked(msgspec.Struct, frozen=True):
    """A leg's nodes. Ties go to the node with fewer requests, then by name. nodes, cached: by row."""

    leg: LegName
    names: tuple[str, ...]
    pool: Pool
    weights: Weights
    nodes: Sequence[NodeView]
    cached: Sequence[float] | Column

    def best(self) -> int:
        return self.weights.best(self.pool)

    def order(self) -> list[int]:
        return self.weights.order(self.pool)

    def values(self, row: int) -> Values:
        return self.weights.values(row)

    def record(self, rejected_by: str = "", skipped: Collection[int] = ()) -> Record:
        """Its best nodes, for whoever reads them; what is heavy is reduced to that now."""
        if self.weights.is_light:
            return partial(self._candidates, rejected_by, skipped)
        return partial(tuple, self._candidates(rejected_by, skipped))

    def _candidates(self, rejected_by: str, skipped: Collection[int]) -> tuple[Candidate, ...]:
        weights, leg, names, nodes, cached, found = self.weights, self.leg, self.names, self.nodes, self.cached, []
        for row in weights.order(self.pool):
            if row not in skipped:
                values = weights.values(row)
                found.append(Candidate(nodes[row], leg, int(cached[row]), names, values, sum(values), rejected_by))
        return tuple(found)


class Scales(Protocol):
    """For one query over one view, as long as nothing else is asked."""

    def most_cached(self, pool: Pool) -> float:
        """Tokens of the longest prefix that one of them has."""
        ...

    def holder(self, pool: Pool) -> int | None:
        """Which of them has most that can be fetched; None when nobody has anything."""
        ...

    def weigh(self, market: Market, source: int | None) -> Weighed:
        """source: whose KV may be fetched."""
        ...


class Weighed(Protocol):
    """The nodes at one market. source: row of the node whose KV may be fetched."""

    @property
    def source(self) -> int | None: ...

    def prefill(self, pool: Pool) -> Ranked: ...

    def decode(self, pool: Pool, prefill: NodeView, compute_s: float) -> Ranked: ...

    def local(self, pool: Pool) -> Ranked: ...

    def tpot_s(self, row: int) -> float: ...

    def is_fetched(self, row: int) -> bool:
        """Whether the node would fetch the prefix from the source rather than compute it."""
        ...


def scales(query: Query, view: ClusterView) -> Scales:
    stations = view.stations
    return FewScales(query, view, stations) if isinstance(stations, FewStations) else ManyScales(query, view, stations)


# ---------------------------------------------------------------- one by one


class FewScales:
    """Implements Scales."""

    def __init__(self, query: Query, view: ClusterView, stations: FewStations) -> None:
        self.query, self.view, self.stations = query, view, stations.stations
        self.cached = self._tokens(query.cached)
        self.held = self.cached if query.held is None else self._tokens(query.held)

    def _tokens(self, by_node: Mapping[str, int]) -> list[float]:
        tokens: list[float] = [0] * len(self.stations)
        most, row_of = self.query.num_tokens, self.view.roster.row_of
        for incarnation, held in by_node.items():
            if incarnation in row_of:
                tokens[row_of[incarnation]] = held if held < most else most
        return tokens

    def most_cached(self, pool: Pool) -> float:
        cached = self.cached
        return max(cached[row] for row in pool.rows)

    def holder(self, pool: Pool) -> int | None:
        row = max(pool.rows, key=self.held.__getitem__)
        return row if self.held[row] > 0 else None

    def weigh(self, market: Market, source: int | None) -> FewWeighed:
        return FewWeighed(self, seconds_of.ask(self.query, market, max, min), source)


class FewWeights:
    """Implements Weights by dicts, of one pool."""

    is_light = True

    def __init__(self, values: Mapping[int, Values], stations: Sequence[Station[float]]) -> None:
        self._values = values
        self._costs = {row: sum(terms) for row, terms in values.items()} if len(values) > 1 else {}
        """Of rows among which there is a choice."""
        self._stations = stations

    def best(self, pool: Pool) -> int:
        if len(pool.rows) == 1:
            return pool.rows[0]
        costs = self._costs
        least = min(costs.values())
        tied = [row for row in pool.rows if costs[row] == least]
        return tied[0] if len(tied) == 1 else min(tied, key=lambda row: self._stations[row].num_requests)

    def order(self, pool: Pool) -> list[int]:
        if len(pool.rows) == 1:
            return [pool.rows[0]]
        costs, stations = self._costs, self._stations
        ranked = sorted([(costs[row], stations[row].num_requests, row) for row in pool.rows])
        return [row for _, _, row in ranked[:MOST_CANDIDATES]]

    def values(self, row: int) -> Values:
        return self._values[row]


class FewWeighed:
    """Implements Weighed. What two legs share is worked out once."""

    def __init__(self, scales: FewScales, ask: Ask[float], source: int | None) -> None:
        self._scales, self._ask, self.source = scales, ask, source
        self._prompts: dict[int, one_by_one.Prompt] = {}
        self._rows: dict[int, one_by_one.Row] = {}
        self._fetched: set[int] = set()

    def prefill(self, pool: Pool) -> Ranked:
        values = one_by_one.prefill(self._ask, self._scales.stations, self._prompts_of(pool), pool.rows)
        return self._ranked("prefill", seconds_of.PREFILL_TERMS, pool, values)

    def decode(self, pool: Pool, prefill: NodeView, compute_s: float) -> Ranked:
        scales, names, measured = self._scales, self._scales.view.roster.names, prefill.bandwidth
        bytes_s = {row: measured.get(names[row], 0.0) for row in pool.rows}
        chunk_tokens = scales.view.station_of(prefill).chunk_tokens
        values = one_by_one.decode(self._ask, scales.stations, self._rows_of(pool), scales.cached, bytes_s, chunk_tokens, compute_s)
        return self._ranked("decode", seconds_of.DECODE_TERMS, pool, values)

    def local(self, pool: Pool) -> Ranked:
        values = one_by_one.local(self._ask, self._scales.stations, self._prompts_of(pool), self._rows_of(pool), pool.rows)
        return self._ranked("local", seconds_of.LOCAL_TERMS, pool, values)

    def _ranked(self, leg: LegName, names: tuple[str, ...], pool: Pool, values: Mapping[int, Values]) -> Ranked:
        scales = self._scales
        return Ranked(leg, names, pool, FewWeights(values, scales.stations), scales.view.nodes, scales.cached)

    def tpot_s(self, row: int) -> float:
        return self._rows[row][0]

    def is_fetched(self, row: int) -> bool:
        return row in self._fetched

    def _prompts_of(self, pool: Pool) -> Mapping[int, one_by_one.Prompt]:
        found, scales = self._prompts, self._scales
        missing = [row for row in pool.rows if row not in found] if found else pool.rows
        found.update(one_by_one.own_prompts(self._ask, scales.stations, scales.cached, missing))
        if self.source is not None and (bytes_s := scales.view.nodes[self.source].bandwidth):
            self._fetch(self.source, bytes_s, missing)
        return found

    def _fetch(self, source: int, bytes_s: Mapping[str, float], rows: Sequence[int]) -> None:
        """Where a copy of what the source holds is sooner than what the node can do alone, it takes that."""
        scales = self._scales
        cached, held, names = scales.cached, scales.held[source], scales.view.roster.names
        paths = {row: path for row in rows if row != source and held > cached[row] and (path := bytes_s.get(names[row], 0.0))}
        if paths:
            copies = one_by_one.fetched(self._ask, scales.stations, self._prompts, cached, held, paths)
            self._prompts.update(copies)
            self._fetched.update(copies)

    def _rows_of(self, pool: Pool) -> Mapping[int, one_by_one.Row]:
        found, scales = self._rows, self._scales
        missing = [row for row in pool.rows if row not in found] if found else pool.rows
        found.update(one_by_one.rows_on(self._ask, scales.stations, scales.cached, missing))
        return found


# ---------------------------------------------------------------- all at once


class ManyScales:
    """Implements Scales by columns."""

    def __init__(self, query: Query, view: ClusterView, stations: ManyStations) -> None:
        self.query, self.view, self.stations = query, view, stations
        self.cached = self._tokens(query.cached)
        self.held = self.cached if query.held is None else self._tokens(query.held)

    def _tokens(self, by_node: Mapping[str, int]) -> Column:
        row_of, tokens = self.view.roster.row_of, np.zeros(len(self.view.nodes))
        rows = [row_of.get(incarnation, -1) for incarnation in by_node]
        if -1 in rows:
            by_node = {incarnation: held for incarnation, held in by_node.items() if incarnation in row_of}
            rows = [row for row in rows if row >= 0]
        tokens[rows] = list(by_node.values())
        return np.minimum(tokens, self.query.num_tokens)

    def most_cached(self, pool: Pool) -> float:
        return float(self.cached[pool.index].max())

    def holder(self, pool: Pool) -> int | None:
        held = self.held[pool.index]
        first = int(held.argmax())
        return pool.rows[first] if held[first] > 0 else None

    def weigh(self, market: Market, source: int | None) -> ManyWeighed:
        return ManyWeighed(self, seconds_of.ask(self.query, market, np.maximum, np.minimum), source)


class ManyWeights:
    """Implements Weights by columns, one a term."""

    is_light = False

    def __init__(self, values: tuple[Column, ...], num_requests: Column) -> None:
        self._values = values
        self._costs: Column = sum(values[1:], start=values[0])
        self._num_requests = num_requests

    def best(self, pool: Pool) -> int:
        costs = self._costs + pool.outside
        tied = np.flatnonzero(costs == costs.min())
        return int(tied[self._num_requests[tied].argmin()])

    def order(self, pool: Pool) -> list[int]:
        rows = pool.index
        best = np.lexsort((self._num_requests[rows], self._costs[rows]))[:MOST_CANDIDATES]
        return [int(row) for row in rows[best]]

    def values(self, row: int) -> Values:
        return tuple(float(column[row]) for column in self._values)


class ManyWeighed:
    """Implements Weighed. What two legs share is worked out once."""

    def __init__(self, scales: ManyScales, ask: Ask[Column], source: int | None) -> None:
        self._scales, self._ask, self._nodes = scales, ask, scales.stations.columns
        self.source = source
        self._is_fetched = np.zeros(len(scales.view.nodes), np.bool_)
        self._prompt = seconds_of.own_prompt(ask, self._nodes, scales.cached)
        if source is not None and scales.view.nodes[source].bandwidth:
            self._fetch(source)
        self._rows: Row[Column] | None = None

    def prefill(self, pool: Pool) -> Ranked:
        values = seconds_of.prefill_values(self._ask, self._nodes, self._prompt)
        return self._ranked("prefill", seconds_of.PREFILL_TERMS, pool, values)

    def decode(self, pool: Pool, prefill: NodeView, compute_s: float) -> Ranked:
        token_s = self._nodes.kv_bytes / self._bytes_s(prefill, seconds_of.UNMEASURED_BYTES_S)
        chunk_tokens = self._scales.view.station_of(prefill).chunk_tokens
        exposed_s = seconds_of.exposed_s(self._ask, self._scales.cached, token_s, chunk_tokens, compute_s)
        return self._ranked("decode", seconds_of.DECODE_TERMS, pool, seconds_of.decode_values(self._row, exposed_s))

    def local(self, pool: Pool) -> Ranked:
        values = seconds_of.local_values(self._ask, self._nodes, self._prompt, self._row)
        return self._ranked("local", seconds_of.LOCAL_TERMS, pool, values)

    def _ranked(self, leg: LegName, names: tuple[str, ...], pool: Pool, values: tuple[Column, ...]) -> Ranked:
        scales = self._scales
        return Ranked(leg, names, pool, ManyWeights(values, self._nodes.num_requests), scales.view.nodes, scales.cached)

    def tpot_s(self, row: int) -> float:
        return float(self._row.tpot_s[row])

    def is_fetched(self, row: int) -> bool:
        return bool(self._is_fetched[row])

    @property
    def _row(self) -> Row[Column]:
        if self._rows is None:
            self._rows = seconds_of.row_on(self._ask, self._nodes, self._scales.cached)
        return self._rows

    def _fetch(self, source: int) -> None:
        """Where a copy of what the source holds is sooner than what the node can do alone, it takes that."""
        cached, held, own = self._scales.cached, self._scales.held, self._prompt
        bytes_s = self._bytes_s(self._scales.view.nodes[source], 0.0)
        can_fetch = (bytes_s > 0.0) & (held[source] > cached)
        can_fetch[source] = False
        copy = seconds_of.fetched_prompt(self._ask, self._nodes, cached, np.full(len(held), held[source]), np.where(can_fetch, bytes_s, 1.0))
        self._is_fetched = is_sooner = can_fetch & (copy.fetch_s + copy.compute_s < own.compute_s)
        if is_sooner.any():
            each = zip((copy.fetch_s, copy.compute_s, copy.paused_s), (own.fetch_s, own.compute_s, own.paused_s), strict=True)
            self._prompt = Prompt(*(np.where(is_sooner, fetched, computed) for fetched, computed in each))

    def _bytes_s(self, source: NodeView, unknown: float) -> Column:
        """Of the paths from one node to each of the others."""
        column, rows_of = np.full(len(self._scales.view.nodes), unknown), self._scales.view.roster.rows_of_name
        for name, bytes_s in source.bandwidth.items():
            if bytes_s:
                column[list(rows_of.get(name, ()))] = bytes_s
        return column

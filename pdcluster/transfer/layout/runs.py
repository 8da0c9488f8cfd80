"""Runs and spans of a chunk as arrays, so that thousands cost as little Python as one. Pure.

Different page layouts cut a chunk into thousands of small runs. Every operation over all of them (checks, joins, cuts,
wire tables) is here or in `geometry` and works on whole arrays. Numbers from peers are unsigned on the wire and may be
negative here. The checks below refuse negative numbers before any addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pdcluster.transfer.layout.spans import CopyRun, CopyRuns, Span, Spans

Words = NDArray[np.int64]
# Upper bound of one write, so that sums of a peer's numbers cannot overflow.
MOST_BYTES = 1 << 40


class SpanTable(Sequence[Span]):
    """A sequence of spans (offset, nbytes), as rows. The rows never change."""

    __slots__ = ("rows",)

    def __init__(self, rows: Words) -> None:
        self.rows = rows

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> SpanTable:
        """Little-endian pairs of 64-bit words from a wire. The values are unchecked."""
        return cls(np.frombuffer(data, dtype="<i8").reshape(-1, 2))

    def pack(self) -> bytes:
        return self.rows.astype("<i8", copy=False).tobytes()

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> SpanTable: ...
    def __getitem__(self, index: int | slice) -> Span | SpanTable:
        if isinstance(index, slice):
            return SpanTable(self.rows[index])
        offset, nbytes = self.rows[index].tolist()
        return offset, nbytes

    def __iter__(self) -> Iterator[Span]:
        return map(tuple, self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SpanTable):
            return self.rows.tobytes() == other.rows.tobytes()
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    def __repr__(self) -> str:
        return f"SpanTable({list(self[:8])}{'…' if len(self) > 8 else ''})"

    @property
    def nbytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def add_up_to(self, nbytes: int) -> bool:
        """Whether the spans add up to `nbytes` and none is empty."""
        lengths = self.rows[:, 1]
        if not len(lengths) or nbytes > MOST_BYTES or lengths.min() <= 0 or lengths.max() > nbytes:
            return False
        return int(lengths.sum()) == nbytes

    def are_inside(self, nbytes: int) -> bool:
        """Whether all spans lie within `nbytes` and none is empty."""
        return are_inside(self.rows[:, 0], self.rows[:, 1], nbytes)

    def joined(self) -> SpanTable:
        """The same bytes in the same order, with neighbours joined."""
        rows = self.rows
        if len(rows) < 2:
            return self
        begins = np.empty(len(rows), dtype=np.bool_)
        begins[0] = True
        np.not_equal(rows[1:, 0], rows[:-1].sum(axis=1), out=begins[1:])
        firsts = begins.nonzero()[0]
        if len(firsts) == len(rows):
            return self
        joined = np.empty((len(firsts), 2), dtype=np.int64)
        joined[:, 0], joined[:, 1] = rows[firsts, 0], np.add.reduceat(rows[:, 1], firsts)
        return SpanTable(joined)


def span_table(spans: Iterable[Span]) -> SpanTable:
    return spans if isinstance(spans, SpanTable) else SpanTable(np.array(list(spans), dtype=np.int64).reshape(-1, 2))


def chained(tables: Iterable[SpanTable]) -> SpanTable:
    """The spans of all tables, in order."""
    return SpanTable(np.concatenate([table.rows for table in tables]))


def merged(tables: Iterable[SpanTable]) -> SpanTable:
    """The spans of all tables, ascending, with neighbours joined. They must be disjoint."""
    rows = np.concatenate([table.rows for table in tables])
    return SpanTable(rows[np.argsort(rows[:, 0])]).joined()


class RunTable(Sequence[CopyRun]):
    """A sequence of runs, as rows (source, target, nbytes). The rows never change."""

    __slots__ = ("rows",)

    def __init__(self, rows: Words) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> CopyRun: ...
    @overload
    def __getitem__(self, index: slice) -> RunTable: ...
    def __getitem__(self, index: int | slice) -> CopyRun | RunTable:
        return RunTable(self.rows[index]) if isinstance(index, slice) else CopyRun(*self.rows[index].tolist())

    def __iter__(self) -> Iterator[CopyRun]:
        return (CopyRun(*row) for row in self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RunTable):
            return np.array_equal(self.rows, other.rows)
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    def __repr__(self) -> str:
        return f"RunTable({list(self[:8])}{'…' if len(self) > 8 else ''})"

    @property
    def nbytes(self) -> int:
        return int(self.rows[:, 2].sum())

    def read_inside(self, nbytes: int, region_bytes: int) -> bool:
        """Whether our own runs read `nbytes`, all within the region."""
        starts, lengths = self.rows[:, 0], self.rows[:, 2]
        return len(lengths) > 0 and are_inside(starts, lengths, region_bytes) and int(lengths.sum()) == nbytes

    @property
    def sources(self) -> SpanTable:
        return SpanTable(self.rows.take((0, 2), axis=1))

    @property
    def targets(self) -> SpanTable:
        return SpanTable(self.rows.take((1, 2), axis=1))

    def cut(self, block_bytes: int) -> tuple[Words, Words]:
        """Rows of the same bytes in order, none across the end of a block, and the first row of each block."""
        lengths = self.rows[:, 2]
        ends = lengths.cumsum()
        starts = ends - lengths
        borders = np.arange(0, int(ends[-1]), block_bytes, dtype=np.int64)
        before = starts.searchsorted(borders, side="right") - 1  # the row in which each block begins
        inside = borders - starts[before]
        amid = inside.nonzero()[0]
        rows = np.insert(self.rows, before[amid] + 1, self.rows[before[amid]], axis=0)
        firsts = before + (inside > 0).cumsum()
        rows[firsts[amid], :2] += inside[amid, None]
        begins = np.insert(starts, before[amid] + 1, borders[amid])
        rows[:, 2] = np.diff(begins, append=ends[-1])
        return rows, firsts

    def pieces(self, block_bytes: int) -> list[RunTable]:
        """The same bytes in order, cut into pieces of one block each. Only the last may be shorter."""
        rows, firsts = self.cut(block_bytes)
        return [RunTable(piece) for piece in np.split(rows, firsts[1:])]


def run_table(runs: CopyRuns) -> RunTable:
    if isinstance(runs, RunTable):
        return runs
    return RunTable(np.array([(run.source, run.target, run.nbytes) for run in runs], dtype=np.int64).reshape(-1, 3))


def are_inside(offsets: Words, lengths: Words, limit: int) -> bool:
    """Whether every [offset, offset + length) lies within [0, limit) and none is empty."""
    return bool(
        ((lengths > 0) & (lengths <= limit) & (offsets >= 0) & (offsets <= limit - np.minimum(lengths, limit))).all()
    )


def cover(ranges: Spans, spans: SpanTable) -> bool:
    """Whether every span lies inside one of the sorted, disjoint, joined ranges."""
    allowed = span_table(ranges).rows
    if not len(allowed):
        return not len(spans)
    offsets, lengths = spans.rows[:, 0], spans.rows[:, 1]
    at = np.searchsorted(allowed[:, 0], offsets, side="right") - 1
    known = (at >= 0) & (lengths > 0)
    return bool(known.all()) and bool((lengths <= allowed[at].sum(axis=1) - offsets).all())

"""Copying and digesting a write's payload without the GIL, for the backends' mover threads.

numba compiles the loop over a payload's runs together with an XXH3 (`copy_kernel`). A thread therefore takes the GIL
once per `advance`, not once per run. Without numba, Python does the same run by run. This module decides nothing about
what is written.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pdcluster.transfer.layout.runs import RunTable, SpanTable

LOG = logging.getLogger(__name__)

REMEMBERED = 8192

Words = NDArray[np.uint64]
NO_STATE: Words = np.zeros(0, dtype=np.uint64)

# Rows of (target address, source address, number of bytes). Target 0 means: only digest.
Table = NDArray[np.uint64]


def table_of(moves: Iterable[tuple[int, int, int]]) -> Table:
    return np.array(list(moves), dtype=np.uint64).reshape(-1, 3)


def copies(runs: RunTable, target: int, source: int) -> Table:
    """Runs between memory at these two addresses."""
    return (runs.rows.take((1, 0, 2), axis=1) + np.array([target, source, 0], dtype=np.int64)).view(np.uint64)


# Address and number of bytes.
Memory = tuple[int, int]


def copies_inside(runs: RunTable, source: Memory, target: Memory, nbytes: int) -> Table | None:
    """As `copies`, with offsets checked. Returns None when the runs do not add up to `nbytes`, or one is empty or
    leaves a memory.
    """
    compiled = native()
    if compiled is None:
        is_inside = runs.read_inside(nbytes, source[1]) and runs.targets.are_inside(target[1])
        return copies(runs, target[0], source[0]) if is_inside else None
    table = np.empty((len(runs), 3), dtype=np.uint64)
    rows = runs.rows if runs.rows.flags.carray else np.require(runs.rows, np.int64, ("C", "W"))
    return (
        table
        if nbytes > 0 and compiled.tabulate(rows, np.array((*source, *target), dtype=np.uint64), table) == nbytes
        else None
    )


def reads(spans: SpanTable, address: int) -> Table:
    """Spans of the memory at this address, to be digested only."""
    table = np.zeros((len(spans), 3), dtype=np.uint64)
    table[:, 1:] = (spans.rows + np.array([address, 0], dtype=np.int64)).view(np.uint64)
    return table


def packing(runs: RunTable, source: int, block: int) -> Table:
    """Runs that gather the memory at `source` into `block`, one after the other."""
    table = np.empty((len(runs), 3), dtype=np.int64)
    table[:, 1], table[:, 2] = runs.rows[:, 0] + source, runs.rows[:, 2]
    table[:, 0] = block + np.cumsum(table[:, 2]) - table[:, 2]
    return table.view(np.uint64)


def packed(spans: SpanTable, address: int, block: int) -> Table:
    """Spans of the memory at `address`, copied from bytes that lie one after the other in `block`."""
    table = np.empty((len(spans), 3), dtype=np.int64)
    table[:, 0], table[:, 2] = spans.rows[:, 0] + address, spans.rows[:, 1]
    table[:, 1] = block + np.cumsum(table[:, 2]) - table[:, 2]
    return table.view(np.uint64)


class _Native:
    """The compiled loop and the C functions that it calls."""

    def __init__(self) -> None:
        kernel, libc = importlib.import_module("pdcluster.transfer.copying.copy_kernel"), ctypes.CDLL(None)
        self.move: Any = kernel.move
        self.tabulate: Any = kernel.tabulate
        pages = importlib.import_module("pdcluster.transfer.copying.page_kernel")
        self.are_distinct: Any = pages.are_distinct
        self.are_below: Any = pages.are_below
        self.pair: Any = pages.pair
        self.new_state: Callable[[], Words] = kernel.new_state
        self.finished: Callable[[Words], int] = kernel.finished
        memmove, clock = (ctypes.cast(each, ctypes.c_void_p).value for each in (libc.memmove, libc.clock_gettime))
        self.calls: Words = np.array([memmove, clock, kernel.SECRET_ADDRESS], dtype=np.uint64)


@functools.cache
def native() -> _Native | None:
    """The compiled loop, loaded once per process; the first load compiles it. Returns None, and logs why, when numba
    does not work here.
    """
    try:
        return _Native()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        LOG.warning("transfers copy and digest run by run in Python: the compiled loop is not to be had (%s)", error)
        return None


class GilWaits:
    """The last REMEMBERED waits of mover threads for the GIL, in seconds. Each runs from the end of a compiled loop to
    the next line of Python.
    """

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=REMEMBERED)


class Payload:
    """The bytes of one write in wire order. `advance` moves them. One thread uses it; the addresses must stay
    mapped.
    """

    def __init__(
        self, table: Table, *, digests: bool, of_copy: bool = False, cached: bool = False, waits: GilWaits | None = None
    ) -> None:
        """of_copy: digest what was stored, because another process may write to the source meanwhile. The compiled loop
        always does so, as it loads each byte once.
        cached: keep the target in the cache, because it is read again soon.
        """
        self._table = table
        self._of_copy = of_copy
        self._past_caches = not cached
        self._waits = waits
        self._native = native()
        self._state = NO_STATE
        self._hash = xxhash.xxh3_64() if digests and self._native is None else None
        self._cursor = np.zeros(4, dtype=np.uint64)
        if self._native is not None:
            self._state = self._native.new_state() if digests else NO_STATE

    def extend(self, table: Table) -> None:
        """Append bytes to a payload that was moved completely."""
        self._table = table
        self._cursor[:2] = 0

    def advance(self, nbytes: int) -> None:
        """Copy and digest the next `nbytes`, or what is left."""
        if self._native is None:
            self._advance_slowly(nbytes)
            return
        self._native.move(
            self._table, self._cursor, nbytes, self._native.calls, self._state, self._past_caches
        )  # without the GIL
        if self._waits is not None:
            _, _, seconds, nanoseconds = self._cursor.tolist()
            self._waits.seconds.append(time.monotonic() - seconds - nanoseconds * 1e-9)

    def _advance_slowly(self, nbytes: int) -> None:
        row, offset = int(self._cursor[0]), int(self._cursor[1])
        while nbytes and row < len(self._table):
            target, source, length = (int(each) for each in self._table[row])
            count = min(nbytes, length - offset)
            if self._hash is not None and not self._of_copy:
                self._hash.update(_bytes(source + offset, count))
            if target:
                ctypes.memmove(target + offset, source + offset, count)
            if self._hash is not None and self._of_copy:
                self._hash.update(_bytes(target + offset, count))
            nbytes -= count
            row, offset = (row, offset + count) if offset + count < length else (row + 1, 0)
        self._cursor[:2] = row, offset

    def digest(self) -> int:
        """xxh3-64 of the bytes moved so far."""
        if self._hash is not None:
            return int(self._hash.intdigest())
        assert self._native is not None and len(self._state), "this payload is moved without a digest"
        return self._native.finished(self._state)


def _bytes(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

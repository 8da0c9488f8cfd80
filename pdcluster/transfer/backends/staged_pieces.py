"""A staged write cut into pieces, each for one block of the reader's ring. Pure, and all pieces of a write at once: in the middle of a transfer
Python has left the caches, and an array's every operation costs tens of microseconds.

A piece that consists of a few long runs is sent from where it lies (straight); one of many short runs is gathered first, because every entry costs
the library time of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster.transfer.copying.copy import Table
from pdcluster.transfer.layout.runs import RunTable

ENTRY_BYTES = 1 << 20
"""Least that an entry of a piece holds on average if the piece has several. Mooncake over TCP took for 64 MiB, on a busy machine, least of 6 rounds,
40 ms of the writer's core by entries of 4 MiB, 46 by 1 MiB, 58 by 512 KiB, 78 by 256 KiB and 101 by 128 KiB: some 0.1 ms for each entry. Gathering
takes 4 to 9 for all of them, and sending is cheaper after it, as the block is in the caches. So short runs are worth gathering up to 1 MiB."""

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """rows: of its runs, where in the block they begin (gathered) or 0, where in memory they lie, and bytes. targets: its spans at the reader, as a
    notice says them. is_straight: each row is an entry of its own for the library."""

    nbytes: int
    num_targets: int
    targets: bytes
    rows: Words
    is_straight: bool

    def packing(self, block: int) -> Table:
        """What copies it into the block at this address."""
        return (self.rows + np.array([block, 0, 0], dtype=np.int64)).view(np.uint64)

    def reading(self) -> Table:
        """What reads it where it lies."""
        return self.rows.view(np.uint64)

    def entries(self) -> list[tuple[int, int, int]]:
        """Of a straight piece: address, place in the block, bytes."""
        at, found = 0, []
        for _, address, nbytes in self.rows.tolist():
            found.append((address, at, nbytes))
            at += nbytes
        return found


def cut(runs: RunTable, address: int, block_bytes: int, *, may_be_straight: bool) -> deque[Piece]:
    """The pieces of these runs, whose sources lie in the memory at this address, in order; all but the last fill a block."""
    rows, firsts = runs.cut(block_bytes)
    ends = np.append(firsts[1:], len(rows))
    lengths, sources = rows[:, 2], rows[:, 0] + address
    begins = np.ones(len(rows), dtype=np.bool_)
    np.not_equal(sources[1:], sources[:-1] + lengths[:-1], out=begins[1:])
    begins[firsts] = True
    targets, table = rows[:, 1:].astype("<i8").tobytes(), np.column_stack([_in_blocks(lengths, block_bytes), sources, lengths])
    sizes, entries = np.add.reduceat(lengths, firsts).tolist(), np.add.reduceat(begins.astype(np.int64), firsts).tolist()
    pieces: deque[Piece] = deque()
    for first, end, nbytes, count in zip(firsts.tolist(), ends.tolist(), sizes, entries, strict=True):
        is_straight = may_be_straight and count <= max(1, nbytes // ENTRY_BYTES)
        own = _joined(table[first:end], begins[first:end]) if is_straight else table[first:end]
        pieces.append(Piece(nbytes, end - first, targets[first * 16 : end * 16], own, is_straight))
    return pieces


def _in_blocks(lengths: Words, block_bytes: int) -> Words:
    """Where in its block each row begins."""
    return (np.cumsum(lengths) - lengths) % block_bytes


def _joined(rows: Words, begins: NDArray[np.bool_]) -> Words:
    """Neighbours in memory as one row, to be read only."""
    firsts = begins.nonzero()[0]
    joined = np.zeros((len(firsts), 3), dtype=np.int64)
    joined[:, 1], joined[:, 2] = rows[firsts, 1], np.add.reduceat(rows[:, 2], firsts)
    return joined

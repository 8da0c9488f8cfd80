"""Small runs through a block: whatever their sizes, the bytes arrive in their places, in wire order, with the digest of
both ends."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.transfer.backends.tcp import BLOCK_BYTES, SCATTERED_BYTES, Block, Packer, Unpacker, straight
from pdcluster.transfer.copying.copy import Payload, table_of
from pdcluster.transfer.layout.runs import RunTable, SpanTable, run_table, span_table
from pdcluster.transfer.layout.spans import CopyRun

SIZE = 4 * BLOCK_BYTES


def scattered(seed: int) -> RunTable:
    """Runs of odd sizes that fill a bit more than two blocks, with gaps at both ends."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9000, 140)
    starts = np.cumsum(lengths + rng.integers(0, 50, 140)) - lengths
    return run_table(
        [
            CopyRun(int(start), int(SIZE - start - count), int(count))
            for start, count in zip(starts, lengths, strict=True)
        ]
    )


def packer(runs: RunTable, source: np.ndarray) -> Packer:
    return Packer(runs, source.ctypes.data, Payload(table_of(()), digests=True, cached=True), Block())


@pytest.mark.parametrize("step", [1000, 77_777, SIZE])
def test_what_is_packed_is_the_runs_in_order_however_much_the_socket_takes(step: int) -> None:
    runs, source = scattered(1), np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
    packed, wire = packer(runs, source), b""
    while not packed.is_done:
        data = b"".join(packed.head())[:step]
        packed.advance(len(data))
        wire += data
    assert wire == b"".join(source[run.source : run.source + run.nbytes].tobytes() for run in runs)


@pytest.mark.parametrize("digests", [False, True])
def test_what_is_unpacked_lies_in_its_places_and_nowhere_else(digests: bool) -> None:
    runs, target = scattered(3), np.zeros(SIZE, dtype=np.uint8)
    wire = np.random.default_rng(4).integers(1, 256, runs.nbytes, dtype=np.uint8).tobytes()
    unpacker, position = Unpacker(runs.targets, target.ctypes.data, Block(), digests=digests), 0
    while unpacker.left:
        view = unpacker.next_view()
        view[:] = wire[position : position + len(view)]
        position += len(view)
        unpacker.put()
    assert b"".join(target[run.target : run.target + run.nbytes].tobytes() for run in runs) == wire
    assert np.count_nonzero(target) == runs.nbytes
    assert unpacker.digest() == (xxhash.xxh3_64(wire).intdigest() if digests else None)


def test_pages_go_as_they_lie_and_pieces_of_pages_are_packed() -> None:
    pages = [(0, SCATTERED_BYTES), (1 << 20, SCATTERED_BYTES)]
    assert straight(span_table(pages)) == pages
    assert straight(span_table([(0, 4096), (8192, 4096), (1 << 20, 4096)])) is None


def test_pieces_that_lie_one_after_the_other_go_as_one() -> None:
    pieces = [(start, 4096) for start in range(0, SCATTERED_BYTES, 4096)]
    assert straight(span_table(pieces)) == [(0, SCATTERED_BYTES)]
    assert straight(SpanTable(span_table(pieces).rows[::-1])) is None


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(1, 200),
)
def test_no_row_of_a_cut_goes_across_the_end_of_a_block_and_all_bytes_are_in_order(
    runs: list[tuple[int, int, int]], block: int
) -> None:
    rows, firsts = RunTable(np.array(runs, dtype=np.int64)).cut(block)
    at, begins = 0, []
    for number, (_, _, nbytes) in enumerate(rows.tolist()):
        assert nbytes > 0
        assert at // block == (at + nbytes - 1) // block
        if at % block == 0:
            begins.append(number)
        at += nbytes
    assert firsts.tolist() == begins
    assert [byte for run in rows.tolist() for byte in pairs_of(*run)] == [
        byte for run in runs for byte in pairs_of(*run)
    ]


def pairs_of(source: int, target: int, nbytes: int) -> list[tuple[int, int]]:
    return [(source + at, target + at) for at in range(nbytes)]

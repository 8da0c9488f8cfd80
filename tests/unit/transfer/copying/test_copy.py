"""Payloads: every byte arrives, and the digest is xxhash's own, however the payload is cut and whether or not the
compiled loop is there."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcluster.transfer.copying import copy
from pdcluster.transfer.copying.copy import GilWaits, Payload, copies, copies_inside, packed, packing, reads, table_of
from pdcluster.transfer.layout.runs import RunTable, run_table
from pdcluster.transfer.layout.spans import CopyRun

SIZE = 1 << 16


@pytest.fixture(params=["compiled", "python"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(copy, "native", lambda: None)
    else:
        assert copy.native() is not None, "numba and xxhash's functions are there in the development environment"
    return str(request.param)


def buffers() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)


def payload_of(runs: list[tuple[int, int, int]], source: np.ndarray, target: np.ndarray, **options: bool) -> Payload:
    """runs: offsets of target and source, number of bytes."""
    return Payload(
        table_of((target.ctypes.data + to, source.ctypes.data + start, count) for to, start, count in runs), **options
    )


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Disjoint runs at any alignment, some longer than what is streamed past the caches."""
    runs, offset = [], draw(st.integers(0, 70))
    for count in draw(st.lists(st.sampled_from([1, 63, 64, 65, 300, 4095, 4096, 4097, 9000]), min_size=1, max_size=6)):
        runs.append((offset, draw(st.integers(0, SIZE - count)), count))
        offset += count + draw(st.integers(0, 70))
    return runs


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("digests", [False, True])
def test_bytes_and_digest_are_right_for_any_runs_and_any_steps(loop: str, cached: bool, digests: bool) -> None:
    @settings(max_examples=60, deadline=None)
    @given(cuts(), st.lists(st.sampled_from([1, 100, 4096, 10000]), max_size=5))
    def check(runs: list[tuple[int, int, int]], steps: list[int]) -> None:
        source, target = buffers()
        wanted, state = target.copy(), xxhash.xxh3_64()
        for to, start, count in runs:
            wanted[to : to + count] = source[start : start + count]
            state.update(source[start : start + count].tobytes())
        payload = payload_of(runs, source, target, digests=digests, of_copy=cached, cached=cached)
        for step in [*steps, SIZE]:
            payload.advance(step)
        assert (target == wanted).all(), "no byte beside the runs is touched"
        assert not digests or payload.digest() == state.intdigest()

    check()


@pytest.mark.parametrize("aligned", [True, False])
def test_a_digest_is_right_at_every_length_around_stripes_and_blocks(aligned: bool) -> None:
    """The compiled loop has an XXH3 of its own, which treats the first 240 bytes, the last stripe and every full block
    in ways of their own."""
    source, target = buffers()
    lengths = sorted(
        {around + more for around in (1, 64, 240, 256, 960, 1024, 2048, 5120) for more in (-1, 0, 1) if around + more}
    )
    shift = 0 if aligned else 3
    for length in lengths:
        for first in {length, 1, 64, 1024, 1025} if length > 1025 else {length, 1}:
            pieces = (
                [(shift, 0, first), (shift + first, first, length - first)] if first < length else [(shift, 0, length)]
            )
            payload = payload_of(pieces, source, target, digests=True)
            payload.advance(length)
            assert payload.digest() == xxhash.xxh3_64_intdigest(source[:length].tobytes()), (length, first)
            assert (target[shift : shift + length] == source[:length]).all()


def test_without_a_target_bytes_are_only_digested(loop: str) -> None:
    source, _ = buffers()
    payload = Payload(table_of([(0, source.ctypes.data, 100), (0, source.ctypes.data + 500, 5000)]), digests=True)
    payload.advance(SIZE)
    assert payload.digest() == xxhash.xxh3_64(source[:100].tobytes() + source[500:5500].tobytes()).intdigest()


def test_a_payload_goes_on_with_its_next_piece(loop: str) -> None:
    source, target = buffers()
    payload = payload_of([(0, 0, 1000)], source, target, digests=True, of_copy=True)
    payload.advance(1000)
    payload.extend(table_of([(target.ctypes.data + 1000, source.ctypes.data + 1000, 24)]))
    payload.advance(24)
    assert (target[:1024] == source[:1024]).all() and payload.digest() == xxhash.xxh3_64(
        source[:1024].tobytes()
    ).intdigest()


def test_more_than_there_is_moves_what_there_is(loop: str) -> None:
    source, target = buffers()
    payload = payload_of([(0, 0, 10)], source, target, digests=True)
    payload.advance(1 << 40)
    payload.advance(1 << 40)
    assert target[:10].tolist() == source[:10].tolist() and not target[10:].any()


def test_waits_for_the_gil_are_noted() -> None:
    source, target = buffers()
    waits = GilWaits()
    payload = Payload(table_of([(target.ctypes.data, source.ctypes.data, SIZE)]), digests=False, waits=waits)
    for _ in range(4):
        payload.advance(SIZE // 4)
    assert len(waits.seconds) == 4 and all(0 <= wait < 60 for wait in waits.seconds)


def test_a_machine_without_the_compiled_loop_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ImportError("no numba")

    monkeypatch.setattr(copy, "_Native", fail)
    assert copy.native.__wrapped__() is None and "no numba" in caplog.text


def test_tables_of_addresses_name_the_bytes_that_runs_and_spans_mean() -> None:
    source, target = buffers()
    block, runs = np.zeros(300, dtype=np.uint8), run_table([CopyRun(5000, 7, 100), CopyRun(64, 900, 200)])
    for table in (
        packing(runs, source.ctypes.data, block.ctypes.data),
        packed(runs.targets, target.ctypes.data, block.ctypes.data),
    ):
        Payload(table, digests=False, cached=True).advance(SIZE)
    assert (target[7:107] == source[5000:5100]).all() and (target[900:1100] == source[64:264]).all() and target.any()
    again = np.zeros(SIZE, dtype=np.uint8)
    Payload(copies(runs, again.ctypes.data, source.ctypes.data), digests=False).advance(SIZE)
    assert (again == target).all()
    payload = Payload(reads(runs.targets, target.ctypes.data), digests=True)
    payload.advance(SIZE)
    assert payload.digest() == xxhash.xxh3_64(block.tobytes()).intdigest()


NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 62]))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=6), st.integers(-1, 60), st.booleans())
@example([((1 << 63) - 1, 0, 1)], 1, False)
def test_runs_are_taken_only_when_all_lie_inside_of_both_memories_and_add_up(
    rows: list[tuple[int, int, int]], nbytes: int, is_compiled: bool
) -> None:
    source, target = (1 << 20, 32), (1 << 30, 24)
    good = all(count > 0 and 0 <= start <= 32 - count and 0 <= to <= 24 - count for start, to, count in rows)
    good = good and 0 < nbytes == sum(count for *_, count in rows)
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(copy, "native", lambda: None)
        table = copies_inside(RunTable(np.array(rows, dtype=np.int64).reshape(-1, 3)), source, target, nbytes)
    assert (table is not None) == good
    if table is not None:
        assert table.tolist() == [[to + (1 << 30), start + (1 << 20), count] for start, to, count in rows]


def test_without_the_compiled_loop_runs_are_judged_alike(loop: str) -> None:
    runs = run_table([CopyRun(0, 16, 8), CopyRun(24, 0, 8)])
    table = copies_inside(runs, (4096, 32), (8192, 24), 16)
    assert table is not None and np.array_equal(table, copies(runs, 8192, 4096)), loop
    assert copies_inside(runs, (4096, 31), (8192, 24), 16) is None
    assert copies_inside(runs, (4096, 32), (8192, 23), 16) is None
    assert copies_inside(runs, (4096, 32), (8192, 24), 15) is None

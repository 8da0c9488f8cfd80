"""Tables of runs and spans do what plain loops over Python's own numbers do, whatever a peer writes into them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdcluster.transfer.layout.runs import (
    MOST_BYTES,
    RunTable,
    SpanTable,
    chained,
    cover,
    merged,
    run_table,
    span_table,
)
from pdcluster.transfer.layout.spans import CopyRun

WORDS = st.one_of(
    st.integers(-3, 200), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 62, MOST_BYTES, MOST_BYTES + 1])
)
WILD = st.lists(st.tuples(WORDS, WORDS), max_size=8)
SPANS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=20)
RUNS = st.lists(
    st.builds(CopyRun, st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 50)), min_size=1, max_size=20
)


def is_inside(offset: int, nbytes: int, limit: int) -> bool:
    return nbytes > 0 and offset >= 0 and offset + nbytes <= limit


@given(WILD, WORDS.filter(lambda limit: limit >= 0))
@example([((1 << 63) - 1, (1 << 63) - 1)], 200)
@example([(1 << 62, 1 << 62), (1 << 62, 1 << 62)], 0)
def test_checks_of_wild_numbers_agree_with_numbers_that_do_not_overflow(
    spans: list[tuple[int, int]], limit: int
) -> None:
    table = span_table(spans)
    assert table.are_inside(limit) == all(is_inside(*span, limit) for span in spans)
    adds_up = bool(spans) and all(nbytes > 0 for _, nbytes in spans) and sum(nbytes for _, nbytes in spans) == limit
    assert table.add_up_to(limit) == (adds_up and limit <= MOST_BYTES)


@given(RUNS, st.integers(-60, 60), st.integers(-60, 60), st.sampled_from([(0, 0), (0, -51), (-1001, 0)]))
def test_our_own_runs_read_so_many_bytes_within_the_region_or_not(
    runs: list[CopyRun], more: int, room: int, wrong: tuple[int, int]
) -> None:
    runs = [*runs, CopyRun(runs[0].source + wrong[0], runs[0].target, runs[0].nbytes + wrong[1])]
    nbytes, end = sum(run.nbytes for run in runs), max(run.source + run.nbytes for run in runs)
    inside = all(is_inside(run.source, run.nbytes, end + room) for run in runs)
    assert run_table(runs).read_inside(nbytes + more, end + room) == (inside and not more)


@given(WILD, st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), max_size=5))
def test_cover_agrees_with_a_loop_over_ranges(spans: list[tuple[int, int]], gaps: list[tuple[int, int]]) -> None:
    ranges, offset = [], 0
    for gap, nbytes in gaps:
        ranges.append((offset + gap, nbytes))
        offset += gap + nbytes
    wanted = all(
        any(nbytes > 0 and start <= offset and offset + nbytes <= start + count for start, count in ranges)
        for offset, nbytes in spans
    )
    assert cover(ranges, span_table(spans)) == wanted == cover(span_table(ranges), span_table(spans))


def test_cover_knows_borders() -> None:
    ranges = ((0, 16), (32, 8))
    assert cover(ranges, span_table([(0, 16), (32, 8), (39, 1)])) and cover((), span_table([]))
    for outside in ((15, 2), (40, 1), (31, 1)):
        assert not cover(ranges, span_table([(0, 16), outside]))
    assert not cover((), span_table([(0, 1)]))


@given(SPANS)
def test_joining_keeps_bytes_and_order(spans: list[tuple[int, int]]) -> None:
    joined = span_table(spans).joined()
    walk = [offset + step for offset, nbytes in spans for step in range(nbytes)]
    assert [offset + step for offset, nbytes in joined for step in range(nbytes)] == walk
    assert all(first[0] + first[1] != second[0] for first, second in itertools.pairwise(joined))


@given(RUNS, st.integers(1, 70))
def test_pieces_are_the_same_bytes_in_full_blocks(runs: list[CopyRun], block_bytes: int) -> None:
    pieces = run_table(runs).pieces(block_bytes)
    assert [piece.nbytes for piece in pieces[:-1]] == [block_bytes] * (len(pieces) - 1) and 0 < pieces[
        -1
    ].nbytes <= block_bytes
    walk = [(run.source + step, run.target + step) for run in runs for step in range(run.nbytes)]
    assert [
        (run.source + step, run.target + step) for piece in pieces for run in piece for step in range(run.nbytes)
    ] == walk


@given(RUNS)
def test_tables_are_sequences_of_what_they_hold(runs: list[CopyRun]) -> None:
    table = run_table(tuple(runs))
    assert (
        list(table) == runs
        and table == runs
        and table[0] == runs[0]
        and table[1:] == runs[1:]
        and len(table) == len(runs)
    )
    assert run_table(table) is table and table.nbytes == sum(run.nbytes for run in runs)
    assert list(table.sources) == [(run.source, run.nbytes) for run in runs]
    assert table.targets == [(run.target, run.nbytes) for run in runs] and hash(table) == hash(run_table(runs))
    assert table != run_table([*runs, CopyRun(0, 0, 1)])


def test_spans_survive_the_wire_and_words_of_peers_beyond_their_sign_are_refused() -> None:
    table = span_table([(0, 5), (1 << 40, 7)])
    assert SpanTable.unpack(table.pack()) == table and table[1] == (1 << 40, 7) and span_table(table) is table
    huge = SpanTable.unpack(b"\xff" * 16)
    assert not huge.are_inside(1 << 40) and not huge.add_up_to(1 << 40) and not cover([(0, 1 << 40)], huge)
    with pytest.raises(ValueError, match="reshape"):
        SpanTable.unpack(b"\x00" * 8)


def test_merged_tables_are_sorted_and_chained_ones_are_not() -> None:
    first, second = span_table([(8, 8), (32, 4)]), span_table([(0, 8), (16, 8)])
    assert merged([first, second]) == [(0, 24), (32, 4)]
    assert chained([first, second]) == [(8, 8), (32, 4), (0, 8), (16, 8)]


def test_a_table_prints_its_first_rows() -> None:
    assert repr(span_table([(1, 2)])) == "SpanTable([(1, 2)])"
    assert repr(RunTable(np.ones((9, 3), dtype=np.int64))).endswith("…)")

"""A write's pieces hold its bytes in their order, whichever way they are sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.transfer.backends.staged import staging
from pdcluster.transfer.backends.staged.polling import LEAST_S, MOST_S, WorkPace
from pdcluster.transfer.backends.staged.staging import ENTRY_BYTES, StagedPiece, cut
from pdcluster.transfer.layout.runs import SpanTable, run_table
from pdcluster.transfer.layout.spans import CopyRun

ADDRESS = 1 << 30
RUNS = st.lists(
    st.builds(CopyRun, st.integers(0, 300), st.integers(0, 1000), st.integers(1, 50)), min_size=1, max_size=20
)


def sent(piece: StagedPiece) -> list[int]:
    """Of which address each byte of the block is."""
    if piece.is_straight:
        entries = piece.entries()
        assert [at for _, at, _ in entries] == [
            sum(nbytes for _, _, nbytes in entries[:index]) for index in range(len(entries))
        ]
        assert piece.reading()[:, 0].tolist() == [0] * len(entries), "it is read only"
        return [address + step for address, _, nbytes in entries for step in range(nbytes)]
    block = np.zeros(piece.nbytes, dtype=np.int64)
    for target, source, nbytes in piece.packing(5000).astype(np.int64).tolist():
        block[target - 5000 : target - 5000 + nbytes] = np.arange(source, source + nbytes)
    return [int(each) for each in block]


@given(RUNS, st.integers(1, 70), st.booleans(), st.sampled_from([1, 8, 40]))
def test_pieces_hold_all_bytes_in_order_and_say_where_they_go(
    runs: list[CopyRun], block_bytes: int, may_be_straight: bool, entry_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "ENTRY_BYTES", entry_bytes)
        pieces = cut(run_table(runs), ADDRESS, block_bytes, may_be_straight=may_be_straight)
    walk = [(ADDRESS + run.source + step, run.target + step) for run in runs for step in range(run.nbytes)]
    assert [address for piece in pieces for address in sent(piece)] == [address for address, _ in walk]
    spans = [span for piece in pieces for span in SpanTable.unpack(piece.targets)]
    assert [offset + step for offset, nbytes in spans for step in range(nbytes)] == [target for _, target in walk]
    for piece in pieces:
        assert (
            len(SpanTable.unpack(piece.targets)) == piece.num_targets
            and sum(n for _, n in SpanTable.unpack(piece.targets)) == piece.nbytes
        )
        assert piece.nbytes == block_bytes or piece is pieces[-1]
        if piece.is_straight:
            assert may_be_straight and len(piece.entries()) <= max(1, piece.nbytes // entry_bytes)
        elif may_be_straight:
            assert len(SpanTable(piece.rows[:, 1:]).joined()) > max(1, piece.nbytes // entry_bytes)


def test_only_long_runs_or_a_single_one_go_straight() -> None:
    long, short = CopyRun(0, 0, ENTRY_BYTES), CopyRun(4 * ENTRY_BYTES, ENTRY_BYTES, ENTRY_BYTES // 2)
    apart = CopyRun(6 * ENTRY_BYTES, ENTRY_BYTES + short.nbytes, short.nbytes)
    found = [
        cut(run_table(runs), 0, 8 * ENTRY_BYTES, may_be_straight=True)[0].is_straight
        for runs in [(long,), (short,), (long, short), (long, short, apart)]
    ]
    assert found == [True, True, False, False]


@given(st.floats(0, 10), st.integers(1, 1 << 24), st.lists(st.floats(1e-5, 0.1), max_size=20))
def test_looks_are_neither_too_often_nor_too_seldom(age_s: float, nbytes: int, seen_s: list[float]) -> None:
    pace = WorkPace()
    for each in seen_s:
        pace.done(each, nbytes)
    assert LEAST_S <= pace.next_look_s(age_s, nbytes) <= MOST_S

"""The traps in what becomes of writes of Mooncake's transfer engine, each with what keeps us out of it. The engine is
one of the same seam whose writes may stay unknown and land later.

Elsewhere: a real receiver is stopped until the real library answers −1, and resumes (tests/faults/test_paused.py, full
suite): what it says ended reads its source no more; bytes, deaths, garbage on the sockets, thousands of runs in one
chunk (tests/contract); the library's calls (`test_mooncake_library`). Not tested here, and why: `*_on_cuda` (exits the
process on failure), copies of device memory on its I/O thread, RDMA keys that leak when a process is killed, addresses
of an unreachable card: they need hardware; no such call is made, and device memory is refused (node.native.process.check). The
queue that stays wedged for a minute after an overflow appears in some trials only: what is tested is that no batch can
get near its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from staged_ends import (
    BLOCK,
    BLOCKS,
    FLYING,
    READER,
    Breaking,
    Ends,
    Slow,
    SlowStraight,
    Straight,
    Ungiving,
    Unreliable,
    eventually,
)

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import Stamp, WriteStatus
from pdcluster.transfer.backends.staged import backend as staged_backend
from pdcluster.transfer.backends.staged import staging
from pdcluster.transfer.layout.spans import CopyRun


@pytest.fixture
def make_ends() -> Iterator[Callable[[Unreliable], Ends]]:
    made: list[Ends] = []

    def make(engine: Unreliable) -> Ends:
        made.append(Ends(engine))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


def test_a_write_of_unknown_outcome_that_lands_late_reaches_no_page_and_its_block_is_not_used_again(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Unreliable(unknown=lambda number: number == 0)
    ends = make_ends(engine)
    assert ends.write(0, 0, 1) is WriteStatus.FAILED, (
        "for the pages it is definite: they were not touched and can not be"
    )
    lost = engine.writes[0]
    for chunk in range(1, 13):
        assert ends.write(chunk, chunk, 1) is WriteStatus.DONE
    assert lost[0] not in {source for source, _, _ in engine.writes[1:]}, (
        "its source block stays as it was: the library may still read it"
    )
    assert lost[1] not in {target for _, target, _ in engine.writes[1:]}, (
        "its target block too: the library may still write it"
    )
    before = ends.target.copy()
    engine.land(0)
    assert (ends.target == before).all() and not ends.target[:BLOCK].any()


def test_when_every_block_is_unknown_a_new_connection_gets_new_ones_and_the_old_memory_stays_mapped(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Unreliable(unknown=lambda number: number < BLOCKS)
    ends = make_ends(engine)
    assert [ends.write(chunk, chunk, 1) for chunk in range(BLOCKS)] == [WriteStatus.FAILED] * BLOCKS
    engine.unknown = lambda _: False

    def works() -> bool:
        try:
            return ends.write(9, 9, 1) is WriteStatus.DONE
        except PeerUnreachable:
            return False

    eventually(works, "a new connection")
    for number in range(BLOCKS):
        engine.land(number)  # would crash if the memory were gone
    assert (ends.target[9 * BLOCK : 10 * BLOCK] == ends.source[9 * BLOCK : 10 * BLOCK]).all() and not ends.target[
        : BLOCKS * BLOCK
    ].any()


def test_only_staging_blocks_are_ever_registered_or_named_to_the_library(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Unreliable()
    ends = make_ends(engine)
    assert ends.write(0, 0, 16) is WriteStatus.DONE
    pools = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in (ends.source, ends.target)]
    addresses = [*engine.registered, *(address for write in engine.writes for address in write[:2])]
    assert addresses and not any(low <= address < high for address in addresses for low, high in pools)


def test_never_more_writes_are_under_way_than_a_ring_has_blocks(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Unreliable()
    ends = make_ends(engine)
    stamps = [Stamp(7, chunk, 1, 16 * BLOCK) for chunk in range(40)]
    handles = [ends.writer.write(READER, 0, 0, stamp, (CopyRun(0, 0, stamp.nbytes),)) for stamp in stamps]
    assert {ends.result(handle) for handle in handles} == {WriteStatus.DONE}
    assert 0 < engine.most <= BLOCKS and len(engine.writes) == 40 * 16


def test_the_library_has_only_a_few_writes_at_a_time_although_blocks_are_free(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Slow()
    ends = make_ends(engine)
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 16 * BLOCK), (CopyRun(0, 0, 16 * BLOCK),))
    eventually(lambda: len(engine.writes) == FLYING, "as many as it may have")
    looks = engine.looks
    eventually(lambda: engine.looks > looks + 20 * FLYING, "turns of the pump that could have submitted more")
    assert len(engine.writes) == FLYING
    engine.may_answer = True
    assert ends.result(handle) is WriteStatus.DONE and engine.most == FLYING
    assert (ends.target[: 16 * BLOCK] == ends.source[: 16 * BLOCK]).all()


# ---------------------------------------------------------------- writes straight from the pages


def test_straight_writes_name_only_their_own_bytes_as_sources_and_register_and_target_only_blocks(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Straight()
    ends = make_ends(engine)
    assert ends.write(0, 3, 6) is WriteStatus.DONE
    address = ends.source.ctypes.data
    assert sorted((source - address, nbytes) for source, _, nbytes in engine.writes) == [
        (n * BLOCK, BLOCK) for n in range(3, 9)
    ]
    pools = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in (ends.source, ends.target)]
    assert not any(
        low <= at < high
        for at in [*engine.registered, *(target for _, target, _ in engine.writes)]
        for low, high in pools
    )
    assert (ends.target[3 * BLOCK : 9 * BLOCK] == ends.source[3 * BLOCK : 9 * BLOCK]).all()


def test_short_runs_are_gathered_and_long_ones_are_not(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Straight()
    ends = make_ends(engine)
    half = BLOCK // 2
    runs = (
        CopyRun(0, 0, half),
        CopyRun(4 * half, half, half),
        CopyRun(8 * half, 2 * half, half),
        CopyRun(9 * half, 3 * half, half),
    )
    assert ends.result(ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 2 * BLOCK), runs)) is WriteStatus.DONE
    (gathered, _, first), (straight, _, second) = engine.writes
    low, high = ends.source.ctypes.data, ends.source.ctypes.data + ends.source.nbytes
    assert not low <= gathered < high and straight == low + 4 * BLOCK and first == second == BLOCK
    assert bytes(ends.target[: 2 * BLOCK]) == b"".join(
        bytes(ends.source[run.source : run.source + run.nbytes]) for run in runs
    )


def test_pages_of_a_write_of_unknown_outcome_stay_with_it_until_the_library_says_that_it_ended(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Straight(unknown=lambda number: number == 0)
    ends = make_ends(engine)
    ends.writer._reads._unknown_s = 0.05
    stamp = Stamp(7, 0, 1, BLOCK)
    handle = ends.writer.write(READER, 0, 0, stamp, (CopyRun(0, 0, BLOCK),))
    assert ends.result(handle) is WriteStatus.UNKNOWN
    for chunk in range(1, 13):
        assert ends.write(chunk, chunk, 1) is WriteStatus.DONE, "others go on meanwhile"
    assert ends.writer.poll(handle) is WriteStatus.UNKNOWN, "no timer frees its pages"
    assert engine.writes[0][1] not in {target for _, target, _ in engine.writes[1:]}, "its block is not used again"
    ends.writer.close(READER)
    assert ends.writer.poll(handle) is WriteStatus.UNKNOWN, (
        "nor does the end of the connection: the library has its own"
    )
    before = ends.target.copy()
    ends.source[:BLOCK] = 0xEE  # as if the page had been given to another request after all
    engine.land(0)
    assert (ends.target == before).all(), "even then it reaches no page"
    engine.lost, engine.unknown = lambda _: True, lambda _: False
    assert ends.writer.poll(handle) is WriteStatus.FAILED


def test_what_ended_at_this_end_fails_at_once_although_it_may_still_land(
    make_ends: Callable[[Unreliable], Ends],
) -> None:
    engine = Straight()
    engine.lost = lambda number: number == 0
    ends = make_ends(engine)
    assert ends.write(0, 0, 1) is WriteStatus.FAILED
    assert [ends.write(chunk, chunk, 1) for chunk in range(1, 9)] == [WriteStatus.DONE] * 8
    assert engine.writes[0][1] not in {target for _, target, _ in engine.writes[1:]}, "its block is not used again"
    before = ends.target.copy()
    engine.land(0)
    assert (ends.target == before).all() and not ends.target[:BLOCK].any()


@pytest.mark.parametrize("ends_by", ["close", "shutdown"])
def test_a_connection_that_ends_frees_no_page_that_the_library_may_still_read(
    make_ends: Callable[[Unreliable], Ends], ends_by: str
) -> None:
    engine = SlowStraight()
    ends = make_ends(engine)
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 16 * BLOCK), (CopyRun(0, 0, 16 * BLOCK),))
    eventually(lambda: len(engine.writes) == FLYING, "the library has some")
    if ends_by == "close":
        ends.writer.close(READER)
    else:
        ends.writer.shutdown()
    eventually(lambda: len(ends.writer._reads) == 1, "its pump let go of it")
    assert ends.writer.poll(handle) is WriteStatus.PENDING
    engine.may_answer = True
    assert ends.result(handle) is WriteStatus.FAILED and len(engine.writes) == FLYING
    assert not ends.target.any() and not len(ends.writer._reads)


@pytest.mark.parametrize("is_last", [True, False])
def test_an_error_of_the_library_in_the_middle_of_a_piece_frees_no_page_that_it_may_still_read(
    make_ends: Callable[[Unreliable], Ends], monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """The second piece has two entries, of which the library took one. is_last: of the write's pieces, so that nothing
    of it waits any more."""
    half = BLOCK // 2
    monkeypatch.setattr(staging, "ENTRY_BYTES", half)
    engine = Breaking()
    ends = make_ends(engine)
    runs = [CopyRun(0, 0, BLOCK), CopyRun(2 * BLOCK, BLOCK, half), CopyRun(4 * BLOCK, BLOCK + half, half)]
    runs += [] if is_last else [CopyRun(6 * BLOCK, 2 * BLOCK, BLOCK)]
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, sum(run.nbytes for run in runs)), runs)
    eventually(lambda: len(ends.writer._reads) == 1, "its pump let go of it")
    engine.may_answer = True
    assert ends.result(handle) is WriteStatus.FAILED
    assert engine.ended == {1, 2}, "it was final before the library ended all that it had"


def test_a_reader_that_answers_nonsense_ends_the_write_all_the_same(
    make_ends: Callable[[Unreliable], Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_backend, "ANSWER_MAGIC", b"KVx1")
    assert make_ends(Straight()).write(0, 0, 1) is WriteStatus.LOST


def test_an_error_of_the_library_when_all_is_over_leaves_no_write_open(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Ungiving()
    ends = make_ends(engine)
    handles = [
        ends.writer.write(
            READER, 0, 0, Stamp(7, chunk, 1, 2 * BLOCK), (CopyRun(2 * chunk * BLOCK, 2 * chunk * BLOCK, 2 * BLOCK),)
        )
        for chunk in range(3)
    ]
    eventually(lambda: len(ends.writer._reads) == 1, "its pump let go of what the library has")
    engine.may_answer = True
    assert [ends.result(handle) for handle in handles] == [WriteStatus.FAILED] * 3
    assert not len(ends.writer._reads)
    eventually(lambda: not engine.registered, "both ends gave their blocks back")

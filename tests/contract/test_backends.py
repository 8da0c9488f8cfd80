"""What every transfer backend must do, run over all of them: bytes move exactly, and only where it was permitted."""

from __future__ import annotations

import random
import select
import time

import numpy as np
import pytest
from backend_ends import HAS_NIXL, NBYTES, REAL, Ends, eventually
from transfer_peer import READER, WRITER

from pdcluster.core.errors import IntegrityError, PeerUnreachable
from pdcluster.transfer.backends.base import Fence, Peer, WriteStatus
from pdcluster.transfer.layout.spans import CopyRun

CHECKS_PERMITS = (*REAL[1:], "fake")


# ---------------------------------------------------------------- moving bytes


def test_bytes_arrive_exactly_where_they_were_sent_and_nowhere_else(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    runs = (CopyRun(0, 4096, 100), CopyRun(5000, 0, 1), CopyRun(200_000, 300_001, 123_457))
    assert ends.result(ends.write(*runs)) is WriteStatus.DONE
    (stamp,) = ends.arrivals(1)
    assert (stamp.nonce, stamp.chunk, stamp.nbytes) == (7, 0, 123_558)
    expected = np.zeros(NBYTES, dtype=np.uint8)
    for run in runs:
        expected[run.target : run.target + run.nbytes] = ends.source.bytes[run.source : run.source + run.nbytes]
    assert (ends.target.bytes == expected).all()


def test_a_done_write_says_how_long_it_took(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    begin = time.monotonic()
    handle = ends.write(CopyRun(0, 0, NBYTES))
    assert ends.result(handle) is WriteStatus.DONE
    duration = ends.writer.take_duration(handle)
    assert duration is not None and 0 < duration <= time.monotonic() - begin
    assert ends.writer.take_duration(handle) is None


def test_many_small_runs_arrive(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    order = random.Random(1).sample(range(NBYTES // 256), 1500)
    runs = tuple(CopyRun(page * 256, (NBYTES // 256 - 1 - page) * 256, 256) for page in order)
    assert ends.result(ends.write(*runs)) is WriteStatus.DONE
    for run in runs:
        assert (
            ends.target.bytes[run.target : run.target + 256] == ends.source.bytes[run.source : run.source + 256]
        ).all()


@pytest.mark.parametrize("name", [*REAL, "fake"])
def test_big_writes_arrive(name: str) -> None:
    ends = Ends(name, 96 << 20)
    ends.connect()
    ends.permit()
    half = 48 << 20
    handles = [ends.write(CopyRun(0, half, half), chunk=0), ends.write(CopyRun(half, 0, half), chunk=1)]
    assert [ends.result(handle) for handle in handles] == [WriteStatus.DONE] * 2
    assert sorted(stamp.chunk for stamp in ends.arrivals(2)) == [0, 1]
    assert (ends.target.bytes[half:] == ends.source.bytes[:half]).all() and (
        ends.target.bytes[:half] == ends.source.bytes[half:]
    ).all()
    ends.close()


def test_many_writes_in_flight_all_arrive_once(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    handles = [ends.write(CopyRun(page * 4096, page * 4096, 4096), chunk=page) for page in range(NBYTES // 4096)]
    assert {ends.result(handle) for handle in handles} == {WriteStatus.DONE}
    assert sorted(stamp.chunk for stamp in ends.arrivals(len(handles))) == list(range(len(handles)))
    assert (ends.target.bytes == ends.source.bytes).all()
    assert ends.reader.arrivals() == []


def test_an_arrival_is_told_only_after_its_payload(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    for value in range(40):
        ends.source.bytes[:] = value
        handle = ends.write(CopyRun(0, 0, NBYTES))
        ends.arrivals(1)
        assert (ends.target.bytes == value).all()
        assert ends.result(handle) is WriteStatus.DONE


def test_the_doorbell_rings_for_arrivals_and_for_answers_and_stops_when_they_are_taken(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    handle = ends.write(CopyRun(0, 0, 64))
    if ends.name != "fake":  # the fake moves only inside calls
        for backend in (ends.reader, ends.writer):
            assert select.select([backend.wakeup_fd], [], [], 30)[0]
    assert ends.result(handle) is WriteStatus.DONE
    ends.arrivals(1)
    for backend in (ends.reader, ends.writer):
        backend.arrivals()
        assert not select.select([backend.wakeup_fd], [], [], 0)[0]


# ---------------------------------------------------------------- what is not allowed


@pytest.mark.parametrize("name", CHECKS_PERMITS)
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown nonce", "unknown_nonce"),
        ("revoked nonce", "unknown_nonce"),
        ("outside its pages", "outside_permit"),
        ("another writer's nonce", "wrong_writer"),
        ("unknown region", "outside_region"),
        ("outside the region", "outside_region"),
    ],
)
def test_a_write_without_a_permit_changes_nothing_and_is_counted(name: str, case: str, reason: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit((4096, 4096), writer=Peer("other", "o1") if case == "another writer's nonce" else WRITER)
    if case == "revoked nonce":
        assert ends.reader.revoke(7) is Fence.FENCED
    run = {"outside its pages": CopyRun(0, 4000, 4096), "outside the region": CopyRun(0, NBYTES - 8, 4096)}.get(
        case, CopyRun(0, 4096, 4096)
    )
    handle = ends.write(run, nonce=8 if case == "unknown nonce" else 7, region=3 if case == "unknown region" else 0)
    assert ends.result(handle) is WriteStatus.REFUSED
    assert ends.reader.arrivals() == [] and not ends.target.bytes.any() and ends.reader.counters[reason] >= 1
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE, "the connection goes on"
    ends.close()


def test_shm_refuses_targets_outside_the_region_at_the_writer_and_drops_stamps_nobody_asked_for() -> None:
    ends = Ends("shm")
    ends.connect()
    assert ends.result(ends.write(CopyRun(0, NBYTES - 8, 4096))) is WriteStatus.FAILED
    assert ends.result(ends.write(CopyRun(0, 0, 64), region=3)) is WriteStatus.FAILED
    ends.result(ends.write(CopyRun(0, 0, 64), nonce=8))
    eventually(lambda: ends.reader.counters["unknown_nonce"], "the drop is counted")
    assert ends.result(ends.write(CopyRun(0, NBYTES - 8, 4096))) is WriteStatus.FAILED, "its memory is mapped by now"
    assert ends.reader.arrivals() == []
    assert ends.reader.revoke(7) is Fence.CANNOT_FENCE
    ends.close()


def test_a_source_outside_the_region_is_our_own_mistake(ends: Ends) -> None:
    if ends.name == "fake":
        pytest.skip("the fake trusts its test")
    ends.connect()
    for run in (CopyRun(NBYTES - 8, 0, 64), CopyRun(-8, 0, 64)):
        with pytest.raises(IntegrityError):
            ends.write(run)


def test_writing_to_a_peer_that_was_not_connected_is_refused(ends: Ends) -> None:
    with pytest.raises(PeerUnreachable, match="call connect first"):
        ends.write(CopyRun(0, 0, 64))


def test_an_advert_that_is_no_advert_is_refused(ends: Ends) -> None:
    with pytest.raises(PeerUnreachable):
        ends.writer.connect(READER, b"\xff\xfe what")


@pytest.mark.parametrize("run_bytes", [32 << 20, 4096])
def test_a_revoke_in_the_middle_of_a_stream_of_writes_stops_it_at_once(run_bytes: int) -> None:
    """FENCED means now: what is in memory when `revoke` returns stays."""
    for name in ("tcp", "mooncake", *(["nixl"] if HAS_NIXL else [])):
        ends = Ends(name, 32 << 20)
        ends.connect()
        ends.permit()
        runs = [CopyRun(offset, offset, run_bytes) for offset in range(0, 32 << 20, run_bytes)]
        handles = [ends.write(*runs, chunk=chunk) for chunk in range(4)]
        eventually(lambda ends=ends: ends.target.bytes[:4096].any(), "the first bytes")
        assert ends.reader.revoke(7) is Fence.FENCED
        ends.target.bytes[:] = 0
        results = [ends.result(handle) for handle in handles]
        assert not ends.target.bytes.any()
        assert results[-1] is WriteStatus.REFUSED
        ends.close()

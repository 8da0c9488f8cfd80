"""Backends that digest on the way: both ends get xxh3-64 of the payload in wire order, only when it was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from backend_ends import NBYTES, REAL, Ends, eventually
from transfer_peer import READER, WRITER

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import Arrival, Handle, Permit, Stamp, WriteStatus
from pdcluster.transfer.layout.spans import CopyRun

LARGE = (CopyRun(4096, 0, 3000), CopyRun(0, 100_000, 65_536), CopyRun(500_001, 300_007, 200_003))
SMALL = tuple(CopyRun(7 + 2001 * index, NBYTES - 1999 * (index + 1), 1990 + index % 7) for index in range(300))


@pytest.fixture(params=REAL)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    ends.source.bytes[:] = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)
    ends.connect()
    yield ends
    ends.close()


def move(
    ends: Ends, runs: tuple[CopyRun, ...] = LARGE, *, at_writer: bool, at_reader: bool
) -> tuple[int | None, Arrival]:
    ends.reader.permit(Permit(7, WRITER, 0, ((0, NBYTES),), at_reader))
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, sum(run.nbytes for run in runs)), runs, at_writer)
    assert ends.result(handle) is WriteStatus.DONE
    arrivals: list[Arrival] = []
    eventually(lambda: arrivals.extend(ends.reader.arrivals()) or arrivals, "an arrival")
    return ends.writer.take_digest(handle), arrivals[0]


@pytest.mark.parametrize("runs", [LARGE, SMALL], ids=["large", "small"])
def test_both_ends_digest_the_same_payload_in_the_order_of_its_runs(ends: Ends, runs: tuple[CopyRun, ...]) -> None:
    payload = b"".join(ends.source.bytes[run.source : run.source + run.nbytes].tobytes() for run in runs)
    sent, arrival = move(ends, runs, at_writer=True, at_reader=True)
    assert sent == arrival.digest == xxhash.xxh3_64(payload).intdigest()
    landed = b"".join(ends.target.bytes[offset : offset + nbytes].tobytes() for offset, nbytes in arrival.spans)
    assert landed == payload and arrival.stamp == Stamp(7, 0, 1, len(payload))


def test_nothing_is_digested_that_nobody_asked_for(ends: Ends) -> None:
    sent, arrival = move(ends, at_writer=False, at_reader=False)
    assert sent is None and arrival.digest is None


def test_a_digest_is_given_once(ends: Ends) -> None:
    ends.reader.permit(Permit(7, WRITER, 0, ((0, NBYTES),), True))
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 64), (CopyRun(0, 0, 64),), True)
    assert ends.result(handle) is WriteStatus.DONE
    assert ends.writer.take_digest(handle) is not None and ends.writer.take_digest(handle) is None


# Far more than a socket holds, so that a write goes out in many pieces of any length.
HUGE_BYTES = 24 << 20
HUGE = tuple(
    CopyRun(HUGE_BYTES // 8 * (7 - index), HUGE_BYTES // 8 * index, HUGE_BYTES // 8 - 4099) for index in range(8)
)


def digest_of(ends: Ends, runs: tuple[CopyRun, ...]) -> int:
    return xxhash.xxh3_64(
        b"".join(ends.source.bytes[run.source : run.source + run.nbytes].tobytes() for run in runs)
    ).intdigest()


def begin(ends: Ends, chunk: int, runs: tuple[CopyRun, ...], trial: int = 1) -> Handle:
    return ends.writer.write(READER, 0, 0, Stamp(7, chunk, trial, sum(run.nbytes for run in runs)), runs, True)


def test_writes_of_many_pieces_on_several_connections_at_once_keep_their_digests_apart() -> None:
    ends = Ends("tcp", HUGE_BYTES)
    ends.connect()
    ends.reader.permit(Permit(7, WRITER, 0, ((0, HUGE_BYTES),), True))
    parts = HUGE[:4], HUGE[4:]
    handles = [begin(ends, chunk, runs) for chunk, runs in enumerate(parts)]
    assert [ends.result(handle) for handle in handles] == [WriteStatus.DONE] * 2
    arrivals: list[Arrival] = []
    eventually(lambda: arrivals.extend(ends.reader.arrivals()) or len(arrivals) == 2, "both arrivals")
    landed = {arrival.stamp.chunk: arrival.digest for arrival in arrivals}
    for chunk, runs in enumerate(parts):
        assert ends.writer.take_digest(handles[chunk]) == landed[chunk] == digest_of(ends, runs)
    ends.close()


def test_a_write_whose_connection_was_cut_has_no_digest_and_is_digested_from_its_start_when_it_is_sent_again() -> None:
    ends = Ends("tcp", HUGE_BYTES)
    ends.connect()
    ends.reader.permit(Permit(7, WRITER, 0, ((0, HUGE_BYTES),), True))
    cut = begin(ends, 0, HUGE)
    eventually(lambda: ends.target.bytes[:4096].any(), "the first bytes land")
    ends.reader.close(WRITER)
    status = ends.result(cut)
    assert status in (WriteStatus.LOST, WriteStatus.DONE)
    assert (ends.writer.take_digest(cut) is not None) is (status is WriteStatus.DONE)
    ends.reader.permit(Permit(7, WRITER, 0, ((0, HUGE_BYTES),), True))
    again: list[Handle] = []
    eventually(lambda: begins_again(ends, again), "the reader is reached again")
    assert ends.result(again[0]) is WriteStatus.DONE
    assert ends.writer.take_digest(again[0]) == digest_of(ends, HUGE)
    ends.close()


def begins_again(ends: Ends, handles: list[Handle]) -> bool:
    try:
        ends.connect()
        handles.append(begin(ends, 0, HUGE, trial=2))
    except PeerUnreachable:
        return False
    return True

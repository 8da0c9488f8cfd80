"""What a reader by shared memory makes of notices: when a copy counts as landed, and what is dropped."""

import numpy as np
import pytest
import xxhash

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import Peer, Permit, Region, Stamp
from pdcluster.transfer.backends.ledger import Arrivals, Counts, Doorbell, Permits
from pdcluster.transfer.backends.shm_frames import (
    MAX_NOTICE_SPANS,
    CopyNotice,
    Notices,
    decode_notice,
    pack_notice,
    pack_progress,
)
from pdcluster.transfer.layout.runs import span_table

WRITER, OTHER = Peer("w", "w1"), Peer("o", "o1")
SPANS = span_table([(4096, 1024), (512, 512)])
STAMP = Stamp(7, 3, 1, 1536)


class Reader:
    """One connection's notices over memory of 8 KiB, with one permit."""

    def __init__(self, *, digests: bool = True) -> None:
        self.memory = np.arange(8192, dtype=np.uint8)
        self.counts = Counts()
        self.permits = Permits(self.counts)
        self.doorbell = Doorbell()
        self.arrivals = Arrivals(self.doorbell)
        self.permits.grant(Permit(7, WRITER, 0, span_table([(0, 8192)]), digests))
        regions = {0: Region(0, self.memory.ctypes.data, self.memory.nbytes)}
        self._notices = Notices(regions, self.permits, self.arrivals, self.counts)

    def hear(self, *frames: bytes, peer: Peer = WRITER) -> None:
        for frame in frames:
            self._notices.take(peer, frame)

    def expected(self) -> int:
        return xxhash.xxh3_64_intdigest(
            b"".join(self.memory[offset : offset + nbytes].tobytes() for offset, nbytes in SPANS)
        )


@pytest.fixture
def reader() -> Reader:
    return Reader()


def begun(stamp: Stamp = STAMP) -> bytes:
    return pack_notice(CopyNotice(stamp, 0, SPANS, has_begun=True))


def test_a_copy_that_tells_its_progress_lands_with_its_last_byte_and_the_digest_of_all(reader: Reader) -> None:
    reader.hear(begun(), pack_progress(700), pack_progress(1535))
    assert reader.arrivals.take() == []
    reader.hear(pack_progress(1536))
    (arrival,) = reader.arrivals.take()
    assert (arrival.stamp, arrival.spans, arrival.digest) == (STAMP, SPANS, reader.expected())


def test_spans_that_follow_each_other_are_one_in_the_arrival_of_a_copy_that_told_its_progress(reader: Reader) -> None:
    """The reader's loop compares them with its pages when nothing else is left to wait for."""
    spans = span_table([(4096, 512), (4608, 512), (512, 512)])
    reader.hear(pack_notice(CopyNotice(STAMP, 0, spans, has_begun=True)), pack_progress(1536))
    (arrival,) = reader.arrivals.take()
    assert (list(arrival.spans), arrival.digest) == (list(SPANS), reader.expected())


def test_what_is_digested_is_what_lay_there_when_the_writer_told_of_it(reader: Reader) -> None:
    expected = reader.expected()
    reader.memory[512:1024] = 0
    reader.hear(begun(), pack_progress(1024))
    reader.memory[512:1024] = np.arange(512, 1024).astype(np.uint8)  # copied later
    reader.hear(pack_progress(1536))
    assert reader.arrivals.take()[0].digest == expected


def test_a_finished_copy_lands_by_one_notice_and_the_same_digest(reader: Reader) -> None:
    reader.hear(pack_notice(CopyNotice(STAMP, 0, SPANS)))
    assert reader.arrivals.take()[0].digest == reader.expected()


def test_nothing_is_digested_for_a_permit_that_wants_no_digests() -> None:
    reader = Reader(digests=False)
    reader.hear(begun(), pack_progress(1536))
    assert reader.arrivals.take()[0].digest is None


def test_a_permit_that_is_revoked_in_the_middle_drops_the_copy(reader: Reader) -> None:
    reader.hear(begun(), pack_progress(700))
    reader.permits.revoke(7)
    reader.hear(pack_progress(1000), pack_progress(1536))
    assert reader.arrivals.take() == [] and reader.counts.by_reason["revoked_while_landing"] == 1


def test_a_permit_that_came_back_does_not_count_for_a_copy_that_began_before(reader: Reader) -> None:
    reader.hear(begun(), pack_progress(700))
    reader.permits.revoke(7)
    reader.permits.grant(Permit(7, WRITER, 0, span_table([(0, 8192)]), True))
    reader.hear(pack_progress(1536))
    assert reader.arrivals.take() == []


def test_a_copy_that_nobody_permits_is_heard_to_its_end_and_dropped(reader: Reader) -> None:
    reader.hear(begun(Stamp(8, 0, 1, 1536)), pack_progress(1536), peer=WRITER)
    reader.hear(begun(), pack_progress(1536), peer=OTHER)
    assert reader.arrivals.take() == [] and dict(reader.counts.by_reason) == {"unknown_nonce": 1, "wrong_writer": 1}


def test_a_copy_that_ended_in_the_middle_never_lands(reader: Reader) -> None:
    reader.hear(begun(), pack_progress(700), begun(Stamp(7, 4, 1, 1536)), pack_progress(1536))
    assert [arrival.stamp.chunk for arrival in reader.arrivals.take()] == [4]


@pytest.mark.parametrize("told", [(700, 700), (700, 600), (0,), (1537,), (1 << 63,), (1536, 1536)])
def test_progress_that_can_not_be_ends_the_connection(reader: Reader, told: tuple[int, ...]) -> None:
    reader.hear(begun(), *map(pack_progress, told[:-1]))
    with pytest.raises(ProtocolError):
        reader.hear(pack_progress(told[-1]))


def test_progress_of_nothing_ends_the_connection(reader: Reader) -> None:
    with pytest.raises(ProtocolError):
        reader.hear(pack_progress(1))


def test_a_copy_does_not_begin_without_its_places() -> None:
    with pytest.raises(ProtocolError):
        decode_notice(pack_notice(CopyNotice(STAMP, 0, span_table(()), has_begun=True)))


def test_a_notice_with_too_many_places_comes_without_them() -> None:
    many = span_table([(2 * number, 1) for number in range(MAX_NOTICE_SPANS + 1)])
    notice = decode_notice(pack_notice(CopyNotice(Stamp(7, 0, 1, len(many)), 0, many)))
    assert isinstance(notice, CopyNotice) and len(notice.spans) == 0

"""What movers and owner share."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

import pytest

from pdcluster.transfer.backends.base import Arrival, Peer, Permit, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import Arrivals, Counts, Doorbell, Permits, Writes

ME, OTHER = Peer("p0", "a"), Peer("p0", "b")


def is_ringing(doorbell: Doorbell) -> bool:
    poller = select.poll()
    poller.register(doorbell.fd, select.POLLIN)
    return bool(poller.poll(0))


def test_a_doorbell_rings_until_arrivals_are_taken() -> None:
    doorbell = Doorbell()
    arrivals = Arrivals(doorbell)
    stamp = Stamp(1, 0, 1, 8)
    arrivals.add(stamp)
    arrivals.add(stamp)
    assert is_ringing(doorbell)
    assert arrivals.take() == [Arrival(stamp), Arrival(stamp)]
    assert not is_ringing(doorbell)
    assert arrivals.take() == []
    doorbell.close()
    doorbell.ring()
    doorbell.close()


def test_a_doorbell_that_rings_is_not_rung_again_and_rings_anew_when_it_was_cleared() -> None:
    doorbell = Doorbell()
    doorbell.clear()
    for _ in range(2):
        doorbell.ring()
        doorbell.ring()
        assert is_ringing(doorbell)
        doorbell.clear()
        assert not is_ringing(doorbell)
    doorbell.close()
    doorbell.clear()


@pytest.fixture
def amid_ringing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Doorbell, bool, Callable[[], object]], None]:
    """Ring a bell, and do something in another thread right before or after it is written to."""
    write = os.eventfd_write

    def ring(doorbell: Doorbell, is_written: bool, act: Callable[[], object]) -> None:
        def written(fd: int, value: int) -> None:
            if is_written:
                write(fd, value)
            other = threading.Thread(target=act)
            other.start()
            other.join(20)
            assert not other.is_alive(), "it waits for the thread that rings"
            if not is_written:
                write(fd, value)

        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd_write", written)
            doorbell.ring()

    return ring


def test_whoever_clears_a_bell_does_not_wait_for_the_thread_that_wakes_him(amid_ringing: Callable[..., None]) -> None:
    doorbell = Doorbell()
    amid_ringing(doorbell, True, doorbell.clear)
    assert not is_ringing(doorbell)
    doorbell.ring()
    assert is_ringing(doorbell)
    doorbell.close()


def test_a_bell_that_is_cleared_before_it_was_written_to_rings(amid_ringing: Callable[..., None]) -> None:
    doorbell = Doorbell()
    amid_ringing(doorbell, False, doorbell.clear)
    assert is_ringing(doorbell)
    doorbell.clear()
    assert not is_ringing(doorbell)
    doorbell.ring()
    assert is_ringing(doorbell), "what was cleared is rung again"
    doorbell.close()


def test_a_descriptor_is_not_closed_while_it_is_about_to_be_written_to(amid_ringing: Callable[..., None]) -> None:
    doorbell = Doorbell()
    fd, seen = doorbell.fd, []
    amid_ringing(doorbell, False, lambda: (doorbell.close(), seen.append(os.fstat(fd))))
    assert seen and doorbell.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    doorbell.close()


def test_whoever_sleeps_until_the_bell_rings_misses_nothing_of_what_several_threads_bring() -> None:
    doorbell, each = Doorbell(), 500
    brought = Arrivals(doorbell)
    threads = [threading.Thread(target=lambda: [brought.add(Stamp(1, 0, 1, 8)) for _ in range(each)]) for _ in range(4)]
    poller, taken = select.poll(), 0
    poller.register(doorbell.fd, select.POLLIN)
    for thread in threads:
        thread.start()
    while taken < 4 * each:
        assert poller.poll(20_000), "something was brought, and nobody rang"
        taken += len(brought.take())
    for thread in threads:
        thread.join()
    assert not is_ringing(doorbell) or not brought.take()
    doorbell.close()


def test_the_first_final_answer_stays_and_is_given_once() -> None:
    doorbell = Doorbell()
    writes = Writes(doorbell)
    handle = writes.new()
    assert writes.poll(handle) is WriteStatus.PENDING
    writes.settle(handle, WriteStatus.UNKNOWN)
    assert writes.poll(handle) is WriteStatus.UNKNOWN
    assert writes.poll(handle) is WriteStatus.UNKNOWN
    writes.settle(handle, WriteStatus.FAILED)
    writes.settle(handle, WriteStatus.DONE)
    assert writes.poll(handle) is WriteStatus.FAILED
    with pytest.raises(KeyError):
        writes.poll(handle)
    doorbell.close()


def test_a_done_write_says_once_how_long_it_took_and_another_never() -> None:
    doorbell, now = Doorbell(), [5.0]
    writes = Writes(doorbell, lambda: now[0])
    good, bad = writes.new(), writes.new()
    now[0] = 7.5
    writes.settle(good, WriteStatus.DONE)
    writes.settle(bad, WriteStatus.FAILED)
    now[0] = 9.0
    assert writes.poll(good) is WriteStatus.DONE and writes.poll(bad) is WriteStatus.FAILED
    assert writes.take_duration(good) == 2.5
    assert writes.take_duration(good) is None and writes.take_duration(bad) is None
    doorbell.close()


@pytest.mark.parametrize(
    ("writer", "nonce", "region", "span", "reason"),
    [
        (ME, 8, 0, (0, 8), "unknown_nonce"),
        (OTHER, 7, 0, (0, 8), "wrong_writer"),
        (ME, 7, 1, (0, 8), "outside_permit"),
        (ME, 7, 0, (8, 9), "outside_permit"),
        (ME, 7, 0, (15, 2), "outside_permit"),
        (ME, 7, 0, (16, 8), "outside_permit"),
        (ME, 7, 0, (-8, 8), "outside_permit"),
        (ME, 7, 0, (0, 0), "outside_permit"),
        (ME, 7, 0, (0, -4), "outside_permit"),
    ],
)
def test_a_write_without_a_fitting_permit_is_counted_by_reason(
    writer: Peer, nonce: int, region: int, span: tuple[int, int], reason: str
) -> None:
    counts = Counts()
    permits = Permits(counts)
    permits.grant(Permit(7, ME, 0, ((0, 16), (32, 8))))
    assert permits.find(writer, nonce, region, [span]) is None
    assert counts.by_reason == {reason: 1}


def test_a_permit_allows_all_of_its_ranges_until_it_is_revoked() -> None:
    permits = Permits(Counts())
    permit = Permit(7, ME, 0, ((0, 16), (32, 8)))
    permits.grant(permit)
    assert permits.find(ME, 7, 0, [(0, 16), (36, 4)]) is permit
    assert permits.is_current(permit)
    assert permits.revoke(7)
    assert not permits.is_current(permit)
    assert not permits.revoke(7)

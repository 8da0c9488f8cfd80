"""What is remembered of boots that were declared dead: no more than is needed, and what is forgotten lets nobody in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from transfer_harness import WRITER, Pair

from pdcluster.core.messages import Abort, Endpoint
from pdcluster.transfer.backends import shm
from pdcluster.transfer.backends.base import Fence, Peer
from pdcluster.transfer.backends.shm import ShmBackend

ME = Peer("d0", "d0-1")


def other_boot(number: int) -> Peer:
    return Peer("p0", f"p0-{number}")


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "never"
        time.sleep(0.002)


# ---------------------------------------------------------------- the reader


def test_a_dead_boot_is_forgotten_when_its_last_ticket_is_reclaimed() -> None:
    pair = Pair(checks_permits=False)
    for number in range(50):
        boot = other_boot(number)
        pair.reader.open("r", 0, Endpoint(boot.node, boot.incarnation, "p:1"), [number], 4, 0, 30.0)
        pair.reader.peer_gone(boot)
        pair.reader.peer_gone(Peer("p1", f"never-met-{number}"))
        pair.poll()
    assert len(pair.reclaimed) == 50 and not pair.reader._aborts.gone


def test_a_dead_boot_is_remembered_as_long_as_its_pages_wait_for_proof() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open([3, 9], 8)
    pair.writer.open(ticket)
    pair.writer.push(ticket.nonce, [10], 0, 4)
    pair.poll()
    pair.reader.peer_gone(WRITER)
    silently(pair)
    assert set(pair.reader._aborts.gone) == {WRITER} and pair.reader.quarantined_pages == 2, "it may still write"
    pair.network.kill(WRITER)
    silently(pair)
    assert pair.reader.is_idle() and not pair.reader._aborts.gone


def test_a_dead_boot_whose_pages_wait_is_called_ever_more_seldom() -> None:
    """Each call dials: a boot that refuses connections is gone again at once."""
    pair = Pair(checks_permits=False)
    for pages in ([3, 9], [5]):
        ticket = pair.open(pages, 4 * len(pages))
        pair.writer.open(ticket)
        pair.writer.push(ticket.nonce, [10], 0, 4)
        pair.poll()
        pair.reader.peer_gone(WRITER)
        pair.poll()
    calls, since = [], pair.clock.now
    while pair.clock.now < since + 60.0:
        pair.inbox.clear()
        pair.reader.peer_gone(WRITER)  # that call failed, too
        pair.poll()
        calls += [pair.clock.now] * any(isinstance(message, Abort) for _, message in pair.inbox)
        pair.clock.now = max(pair.reader.next_deadline() or 0.0, pair.clock.now + 0.01)
    assert len(calls) < 25 and max(later - one for one, later in itertools.pairwise(calls)) < 4.1
    assert pair.reader.quarantined_pages == 3
    pair.run(5.0)
    assert pair.reader.is_idle(), "it lives after all, and answered"


def test_a_writer_is_suspected_while_pages_wait_for_its_end_and_nobody_answers() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open([3, 9], 8)
    pair.writer.open(ticket)
    pair.writer.push(ticket.nonce, [10], 0, 4)
    pair.poll()
    assert not pair.reader.is_suspected(WRITER)
    pair.reader.abort(ticket.nonce, "no longer wanted")
    pair.poll()
    pair.inbox.clear()  # the writer stands still: it hears no Abort
    assert not pair.reader.is_suspected(WRITER), "it may be about to answer"
    silently(pair)
    assert pair.reader.is_suspected(WRITER) and not pair.reader.is_suspected(other_boot(2))
    pair.run(5.0)
    assert pair.reader.is_idle() and not pair.reader.is_suspected(WRITER), "it answered"


def test_a_dead_writer_is_suspected_until_there_is_proof() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open([3, 9], 8)
    pair.writer.open(ticket)
    pair.writer.push(ticket.nonce, [10], 0, 4)
    pair.poll()
    pair.reader.peer_gone(WRITER)
    assert pair.reader.is_suspected(WRITER)
    pair.network.kill(WRITER)
    silently(pair)
    assert not pair.reader.is_suspected(WRITER)


def silently(pair: Pair) -> None:
    """Some seconds in which no message arrives."""
    for _ in range(50):
        pair.clock.now += 0.1
        pair.poll()


def test_a_ticket_that_was_fenced_is_not_written_by_the_connection_of_a_later_one() -> None:
    """The writer lives, and opened it before its boot was declared dead; it had written nothing, and so was fenced by
    refusing what it holds."""
    pair = Pair(checks_permits=False)
    old = pair.open([3, 9], 8)
    pair.writer.open(old)
    before = [pair.target.page(page) for page in (3, 9)]
    pair.reader.peer_gone(WRITER)
    pair.poll()
    pair.inbox.clear()  # the Abort is lost
    assert len(pair.reclaimed) == 1 and pair.reader.is_idle()
    for page in (20, 30, 40):  # the first of them may be refused as well: its hello was said with the old advert
        pair.send_all(pair.open([page, page + 1], 8), [12, 13])
        pair.run(1.0)
    assert pair.landed
    pair.writer.push(old.nonce, [10, 11], 0, 8)
    pair.run(1.0)
    assert [pair.target.page(page) for page in (3, 9)] == before
    assert pair.writer.is_idle() and len(pair.gave_up) >= 1


# ---------------------------------------------------------------- shared memory


@pytest.fixture
def reader() -> Iterator[ShmBackend]:
    backend = ShmBackend(ME)
    yield backend
    backend.shutdown()


def test_shm_remembers_a_bounded_number_of_fenced_boots_and_lets_none_in_that_it_forgot(
    reader: ShmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "MAX_BARRED", 8)
    old = reader.advert()
    for number in range(30):
        assert reader.close(other_boot(number)) is Fence.FENCED
        assert len(reader._least_epoch) <= 8
    for number in (0, 15, 29):
        assert not is_let_in(other_boot(number), reader, old), "what it holds is older than its fence"
        assert is_let_in(other_boot(number), reader, reader.advert()), "a ticket that was issued since"


def test_forgetting_costs_those_who_never_came_only_the_tickets_they_hold(
    reader: ShmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be told from the forgotten ones. Who is connected already goes on."""
    monkeypatch.setattr(shm, "MAX_BARRED", 2)
    living, late, old = Peer("p7", "p7-1"), Peer("p8", "p8-1"), reader.advert()
    connected = ShmBackend(living)
    connected.connect(ME, old)
    eventually(lambda: len(reader._met))
    for number in range(4):
        reader.close(other_boot(number))
    connected.connect(ME, old)
    assert connected._movers[ME].inbox.failed_at is None
    assert not is_let_in(late, reader, old)
    assert is_let_in(late, reader, reader.advert())
    connected.shutdown()


def is_let_in(boot: Peer, reader: ShmBackend, advert: bytes) -> bool:
    writer = ShmBackend(boot)
    refused = reader.counters["bad_frame"]
    writer.connect(ME, advert)
    eventually(lambda: reader.counters["bad_frame"] > refused or not reader._met.have_exited(boot))
    writer.shutdown()
    return reader.counters["bad_frame"] == refused

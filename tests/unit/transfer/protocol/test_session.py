"""The transfer protocol, Writer against Reader, over scripted media."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fake_backend import Fault
from transfer_harness import LOGPROBS, PAGE_BYTES, PAGE_TOKENS, QUICK, READER, WRITER, Pair

from pdcluster.core.errors import IntegrityError, PeerUnreachable, TransferError
from pdcluster.core.messages import Abort, AbortAck, ChunkEntry, Commit, CommitAck, Leg, pack_tokens
from pdcluster.transfer.backends.base import Peer, Stamp, WriteStatus
from pdcluster.transfer.protocol import writer
from pdcluster.transfer.protocol.session import Acked, Drained, Landed, Reclaimed, TicketFailed, TicketGaveUp
from pdcluster.transfer.protocol.writer import Writer

PAGES = [10, 11, 30, 31, 32, 5]
SOURCE = [3, 4, 5, 20, 21, 40]
TOKENS = 22  # 5.5 pages of 4


def intact(pair: Pair, first: int = 0) -> bool:
    return all(
        pair.source.page(source) == pair.target.page(target)
        for source, target in zip(SOURCE[first:], PAGES[first:], strict=True)
    )


def assert_idle(pair: Pair) -> None:
    assert pair.writer.is_idle() and pair.reader.is_idle() and pair.reader.quarantined_pages == 0


def by_first_trial(fault: Fault, chunk: int = 0, trials: int = 1) -> object:
    """That fault for the first tries of one chunk, nothing for the rest."""
    return lambda stamp: fault if stamp.chunk == chunk and stamp.trial <= trials else Fault()


# ---------------------------------------------------------------- the good way


def test_kv_lands_and_both_sides_end_once() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    assert ticket.nonce < 1 << 64 and [name for name, _ in ticket.reader.adverts] == ["fake"]
    pair.send_all(ticket, SOURCE)
    pair.run(1.0)
    assert intact(pair)
    (landed,) = pair.landed
    assert isinstance(landed, Landed) and (landed.first_token, landed.first_logprobs) == (42, LOGPROBS)
    (acked,) = pair.acked
    assert (
        isinstance(acked, Acked)
        and acked.stats.nbytes == 6 * PAGE_BYTES
        and acked.stats.chunks == 3
        and acked.stats.backend == "fake"
    )
    assert pair.drained == [Drained(ticket.nonce)] and not pair.gave_up and not pair.failed and not pair.reclaimed
    assert_idle(pair)
    assert pair.writer.next_deadline() is None and pair.reader.next_deadline() is None


def test_only_the_suffix_that_the_reader_lacks_is_written() -> None:
    pair = Pair()
    before = [pair.target.page(page) for page in PAGES[:2]]
    ticket = pair.open(PAGES, TOKENS, cached=8)
    pair.send_all(ticket, SOURCE)
    pair.run(1.0)
    assert len(pair.landed) == 1 and intact(pair, 2)
    assert [pair.target.page(page) for page in PAGES[:2]] == before


def test_a_fully_cached_prompt_needs_no_write_but_still_brings_the_first_token() -> None:
    pair = Pair()
    ticket = pair.open(PAGES[:5], 20, cached=20)
    pair.send_all(ticket, SOURCE)
    pair.run(0.5)
    assert [event.first_token for event in pair.landed if isinstance(event, Landed)] == [42]
    assert_idle(pair)


def test_chunks_are_pushed_as_prefill_makes_them() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS, cached=4)
    pair.writer.open(ticket)
    pair.writer.push(ticket.nonce, SOURCE[:3], 0, 12)
    pair.run(0.2)
    assert pair.target.page(11) == pair.source.page(4) and pair.target.page(30) == pair.source.page(5)
    pair.writer.push(ticket.nonce, SOURCE[3:5], 12, 8)
    pair.run(0.2)
    pair.writer.push(ticket.nonce, SOURCE[5:], 20, 2)
    pair.writer.finish(ticket.nonce, 1, None)
    pair.run(0.5)
    assert len(pair.landed) == 1 and intact(pair, 1)


@pytest.mark.parametrize("groups", [[(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 4)]])
def test_the_last_tokens_may_be_pushed_in_groups_of_layers(groups: list[tuple[int, int]]) -> None:
    pair = Pair(num_layers=4)
    ticket = pair.open(PAGES, TOKENS, cached=4)
    pair.writer.open(ticket)
    pair.writer.push(ticket.nonce, SOURCE[:3], 0, 12)
    for layers in groups:
        pair.writer.push(ticket.nonce, SOURCE[3:], 12, TOKENS - 12, layers)
        pair.run(0.2)
        done = layers[1] * PAGE_BYTES // 4
        assert pair.target.page(PAGES[-1])[:done] == pair.source.page(SOURCE[-1])[:done], (
            "a group arrives before the next is pushed"
        )
    pair.writer.finish(ticket.nonce, 1, None)
    pair.run(0.5)
    assert len(pair.landed) == 1 and intact(pair, 1)
    assert_idle(pair)


def test_a_group_of_layers_that_does_not_verify_is_sent_again_alone() -> None:
    pair = Pair(lambda stamp: Fault(flip_byte=3) if stamp.chunk == 2 and stamp.trial == 1 else Fault(), num_layers=4)
    ticket = pair.open(PAGES, TOKENS, cached=4)
    pair.writer.open(ticket)
    for layers in ((0, 2), (2, 4)):
        pair.writer.push(ticket.nonce, SOURCE[1:], 4, TOKENS - 4, layers)
    pair.writer.finish(ticket.nonce, 1, None)
    pair.run(1.0)
    assert len(pair.landed) == 1 and intact(pair, 1)
    assert pair.writer.counters["resent_chunks"] == 1
    assert_idle(pair)


@pytest.mark.parametrize("layers", [[(1, 4)], [(0, 0)], [(0, 5)], [(0, 2), (1, 4)], [(0, 2), (3, 4)]])
def test_layers_out_of_order_are_our_own_mistake(layers: list[tuple[int, int]]) -> None:
    pair = Pair(num_layers=4)
    ticket = pair.open(PAGES, TOKENS)
    pair.writer.open(ticket)
    *good, bad = layers
    for each in good:
        pair.writer.push(ticket.nonce, SOURCE, 0, TOKENS, each)
    with pytest.raises(IntegrityError, match="is next"):
        pair.writer.push(ticket.nonce, SOURCE, 0, TOKENS, bad)
    pair.close()


def test_other_tokens_wait_until_all_layers_were_pushed() -> None:
    pair = Pair(num_layers=4)
    ticket = pair.open(PAGES, TOKENS)
    pair.writer.open(ticket)
    pair.writer.push(ticket.nonce, SOURCE[:3], 0, 12, (0, 2))
    with pytest.raises(IntegrityError, match="is next"):
        pair.writer.push(ticket.nonce, SOURCE, 0, TOKENS, (2, 4))
    pair.close()


def test_bytes_in_flight_per_peer_are_bounded_and_tickets_take_turns() -> None:
    pair = Pair(lambda _: Fault(delay_s=1.0))
    first, second = pair.open(list(range(20)), 80), pair.open(list(range(30, 50)), 80)
    for ticket in (first, second):
        pair.send_all(ticket, list(range(20)))
    pair.poll()
    flying = [write.stamp for write in pair.network.writes]
    assert sum(stamp.nbytes for stamp in flying) == QUICK.window_bytes
    assert (
        [stamp.nonce for stamp in flying].count(first.nonce)
        == [stamp.nonce for stamp in flying].count(second.nonce)
        == 2
    )
    pair.run(20, tick=0.5)
    assert len(pair.landed) == 2
    assert_idle(pair)


def test_verification_is_spread_over_polls() -> None:
    pair = Pair()
    ticket = pair.open(list(range(20)), 80)
    pair.send_all(ticket, list(range(20)))
    polls = 0
    while not pair.landed:
        pair.step(0.001)
        polls += 1
    assert polls >= 20 * PAGE_BYTES // QUICK.verify_bytes


# ---------------------------------------------------------------- tickets that are refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_tokens": 8}, "both nodes need the same"),
        ({"page_tokens": 5, "page_bytes": 80}, "no multiple of this cluster's 4"),
        ({"page_tokens": 0, "page_bytes": 0}, "both nodes need the same"),
        ({"page_bytes": 128}, "both nodes need the same"),
        ({"ranks": 0}, "cannot be dealt out"),
        ({"num_tokens": 0}, "must start a page"),
        ({"cached_tokens": 3}, "must start a page"),
        ({"cached_tokens": 24}, "must start a page"),
        ({"cached_tokens": -4}, "must start a page"),
        ({"num_tokens": 25}, "too few"),
        ({"pages": b"abc"}, "too few"),
        ({"pages": pack_tokens([1, 1, 2, 3, 4, 5])}, "names a page twice"),
        ({"pages": pack_tokens([-1, 1, 2, 3, 4, 5])}, "negative page"),
        ({"deadline_s": 0.0}, "s left"),
        ({"deadline_s": float("nan")}, "s left"),
    ],
)
def test_a_malformed_ticket_is_refused_by_name(change: dict[str, object], message: str) -> None:
    pair = Pair()
    ticket = msgspec.structs.replace(pair.open(PAGES, TOKENS), **change)
    with pytest.raises(TransferError, match=message):
        pair.writer.open(ticket)
    assert pair.writer.is_idle()


def test_kinds_of_pages_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_FITS", 2)
    pair = Pair()
    for page_tokens in (4, 8, 12, 16, 4):
        ticket = pair.reader.open("r", page_tokens, WRITER, PAGES, TOKENS, 0, 5.0)
        page_bytes = ticket.page_bytes // ticket.page_tokens * page_tokens
        pair.writer.open(msgspec.structs.replace(ticket, page_tokens=page_tokens, page_bytes=page_bytes))
        assert 1 <= len(pair.writer._fits) <= 2
        pair.reader.abort(ticket.nonce, "only its pages were of interest")
        pair.run(1.0)
    assert_idle(pair)


def test_a_ticket_for_another_boot_of_the_writer_is_refused() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    with pytest.raises(TransferError, match="boot"):
        pair.writer.open(
            msgspec.structs.replace(ticket, writer=msgspec.structs.replace(ticket.writer, incarnation="older"))
        )


def test_a_ticket_is_used_once() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    with pytest.raises(TransferError, match="opened before"):
        pair.writer.open(ticket)
    pair.run(1.0)
    with pytest.raises(TransferError, match="opened before"):
        pair.writer.open(ticket)


def test_no_common_backend_is_said_with_both_sides() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    strange = msgspec.structs.replace(ticket, reader=msgspec.structs.replace(ticket.reader, adverts=(("smoke", b""),)))
    with pytest.raises(PeerUnreachable, match=r"offers \['smoke'\], this node has \['fake'\]"):
        pair.writer.open(strange)


def test_the_next_backend_is_used_when_the_best_does_not_connect() -> None:
    pair = Pair(media=("fast", "slow"))
    ticket = pair.open(PAGES, TOKENS)
    adverts = tuple((name, b"stale" if name == "fast" else advert) for name, advert in ticket.reader.adverts)
    ticket = msgspec.structs.replace(ticket, reader=msgspec.structs.replace(ticket.reader, adverts=adverts))
    assert pair.writer.open(ticket) == "slow"


def test_our_own_mistakes_are_integrity_errors() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    for pages, tokens, cached in (
        (PAGES, 10, 0),
        ([1, 1], 8, 0),
        ([64], 4, 0),
        ([1], 8, 0),
        ([1, 2], 8, 3),
        ([1], 0, 0),
    ):
        with pytest.raises(IntegrityError):
            pair.open(pages, tokens, cached)
    pair.writer.open(ticket)
    for pages, first, count in (([3], 2, 4), ([3], 0, 3), ([3], 8, 4), ([3], 0, 8), ([99], 0, 4), (SOURCE, 0, 28)):
        with pytest.raises(IntegrityError):
            pair.writer.push(ticket.nonce, pages, first, count)
    pair.writer.push(ticket.nonce, SOURCE[:2], 0, 8)
    with pytest.raises(IntegrityError, match="8 of 22"):
        pair.writer.finish(ticket.nonce, 1, None)


# ---------------------------------------------------------------- faults of the medium


def test_a_failed_chunk_is_written_again() -> None:
    pair = Pair(by_first_trial(Fault(status=WriteStatus.FAILED), chunk=1, trials=2))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(1.0)
    assert len(pair.acked) == 1 and intact(pair) and pair.writer.ladder.failures == {"failed": 2}
    assert_idle(pair)


def test_after_bounded_failures_the_writer_gives_up_and_the_reader_gets_its_pages_back() -> None:
    pair = Pair(by_first_trial(Fault(status=WriteStatus.FAILED), chunk=1, trials=99))
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.run(1.0)
    (gave_up,) = pair.gave_up
    assert isinstance(gave_up, TicketGaveUp) and "failed 3 times" in gave_up.reason
    (failed,) = pair.failed
    assert isinstance(failed, TicketFailed) and "gave up" in failed.reason
    assert pair.drained == [Drained(ticket.nonce)] and pair.reclaimed == [Reclaimed(ticket.nonce)]
    assert_idle(pair)


def test_a_chunk_that_one_backend_cannot_write_goes_by_the_other() -> None:
    pair = Pair(
        media=("fast", "slow"), plans={"fast": by_first_trial(Fault(status=WriteStatus.FAILED), chunk=1, trials=99)}
    )
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(1.0)
    (acked,) = pair.acked
    assert isinstance(acked, Acked) and acked.stats.backend == "fast" and intact(pair), (
        "two of the three chunks went by fast"
    )
    assert pair.writer.ladder.resends == {"same_path": 2, "other_path": 1}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(flip_byte=0),
        Fault(flip_byte=2 * PAGE_BYTES - 1),
        Fault(torn_bytes=PAGE_BYTES),
        Fault(torn_bytes=0),
        Fault(arrivals=0),
    ],
    ids=["first byte flipped", "last byte flipped", "torn", "nothing landed", "stamp dropped"],
)
def test_what_does_not_verify_is_asked_for_again(fault: Fault) -> None:
    pair = Pair(by_first_trial(fault, chunk=1))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(4.0)
    (acked,) = pair.acked
    assert isinstance(acked, Acked) and acked.stats.resent == 1 and intact(pair) and len(pair.landed) == 1
    assert_idle(pair)


def test_what_never_verifies_is_refused_and_never_served() -> None:
    pair = Pair(by_first_trial(Fault(flip_byte=7), chunk=2, trials=99))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(4.0)
    assert not pair.landed and not pair.acked
    assert len(pair.failed) == len(pair.gave_up) == len(pair.reclaimed) == len(pair.drained) == 1
    assert pair.reader.counters["digest_mismatch"] == QUICK.rounds + 1
    assert_idle(pair)


def test_without_digests_a_bit_flip_is_not_seen_so_it_is_the_digest_that_protects() -> None:
    pair = Pair(by_first_trial(Fault(flip_byte=7), chunk=2), settings=replace(QUICK, digests=False))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(1.0)
    assert len(pair.landed) == 1 and not intact(pair)


def test_duplicated_and_late_stamps_are_counted_and_change_nothing() -> None:
    pair = Pair(lambda stamp: Fault(arrivals=3, arrival_s=0.2 * stamp.chunk))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(2.0)
    assert len(pair.landed) == 1 and intact(pair)
    assert pair.reader.counters["duplicate_arrival"] + pair.reader.counters["late_arrival"] == 6


@pytest.mark.parametrize("checks", [True, False], ids=["fencing medium", "direct medium"])
def test_an_unknown_write_ends_the_ticket_and_pins_the_source_until_it_settles(checks: bool) -> None:
    pair = Pair(by_first_trial(Fault(delay_s=5.0, unknown_s=0.2)), checks_permits=checks)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.run(1.0)
    assert len(pair.gave_up) == 1 and not pair.drained and not pair.acked
    pair.reader.abort(ticket.nonce, "the router heard that the writer gave up")
    pair.run(2.0)
    assert not pair.drained, "the write still reads the source"
    assert len(pair.reclaimed) == (1 if checks else 0), "only a fence of its own lets the reader go on"
    assert pair.reader.quarantined_pages == (0 if checks else 6)
    pair.run(4.0)
    assert len(pair.drained) == len(pair.reclaimed) == 1
    assert_idle(pair)


def test_a_lost_write_frees_the_source_but_the_target_waits_for_a_fence() -> None:
    pair = Pair(by_first_trial(Fault(delay_s=3.0, lost_s=0.1)), checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.run(1.0)
    assert len(pair.gave_up) == len(pair.drained) == len(pair.failed) == 1
    pair.run(5.0)
    assert not pair.reclaimed and pair.reader.quarantined_pages == 6
    pair.network.kill(WRITER)
    pair.reader.peer_gone(WRITER)
    pair.run(1.0)
    assert pair.reclaimed == [Reclaimed(ticket.nonce)]
    assert_idle(pair)


@pytest.mark.parametrize("is_asked_late", [False, True])
@pytest.mark.parametrize("lost_by", ["fencing", "direct"])
def test_a_lost_write_asks_for_the_fence_of_its_own_medium_only(lost_by: str, is_asked_late: bool) -> None:
    """A reader that offers both, and a writer that can use one of them: where shm and tcp are offered, one on another
    host."""
    plans = {lost_by: by_first_trial(Fault(delay_s=3.0, lost_s=0.1))}
    pair = Pair(media=("direct", "fencing"), plans=plans, checks_permits={"direct": False, "fencing": True})
    pair.writer._order = (lost_by,)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.run(0.05)
    if is_asked_late:  # what the writer says unasked gets lost
        while not pair.drained:
            pair.clock.now += 0.05
            pair.poll()
        pair.inbox.clear()
        pair.reader.abort(ticket.nonce, "the router heard that the writer gave up")
    pair.run(1.0)
    assert len(pair.failed) == len(pair.gave_up) == len(pair.drained) == 1
    assert pair.reader.quarantined_pages == (0 if lost_by == "fencing" else 6)
    pair.kill(WRITER)
    pair.reader.peer_gone(WRITER)
    pair.run(1.0)
    assert pair.reclaimed == [Reclaimed(ticket.nonce)]
    assert_idle(pair)


@pytest.mark.parametrize("bound", [9, 1])
def test_a_lost_write_is_remembered_as_long_as_its_reader_may_ask(bound: int) -> None:
    """Long after the ticket's deadline; when there were too many of them, no Abort is proof any more."""
    pair = Pair(
        lambda stamp: Fault(delay_s=1e6, lost_s=0.1),
        checks_permits=False,
        settings=replace(QUICK, max_lost_tickets=bound),
    )
    tickets = [pair.open([page], PAGE_TOKENS, deadline_s=5.0) for page in PAGES[:3]]
    for ticket in tickets[:2]:
        pair.send_all(ticket, SOURCE)
    while len(pair.drained) < 2:
        pair.clock.now += 0.05
        pair.poll()
    pair.inbox.clear()  # what it said unasked is lost
    pair.clock.now += 60.0
    pair.poll()
    pair.writer.open(pair.open([PAGES[4]], PAGE_TOKENS))  # forgets what it may
    pair.run(5.0)
    assert len(pair.failed) == 3 and {each.nonce for each in pair.reclaimed} == (
        {tickets[2].nonce} if bound == 9 else set()
    )


def test_an_ack_that_names_a_medium_nobody_offered_is_no_proof() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.reader.abort(ticket.nonce, "client left")
    pair.reader.handle(WRITER, AbortAck(ticket.nonce, "x", ("carrier pigeon",)))
    assert pair.reader.quarantined_pages == 6 and pair.reader.counters["bad_abort_ack"] == 1


# ---------------------------------------------------------------- aborts, deadlines, deaths


def test_a_reader_that_can_fence_reclaims_at_once_and_late_writes_do_not_land() -> None:
    pair = Pair(lambda _: Fault(delay_s=1.0))
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.step(0.6)  # nothing or half of it landed
    pair.reader.abort(ticket.nonce, "client left")
    pair.poll()
    assert pair.failed == [TicketFailed(ticket.nonce, "client left")] and pair.reclaimed == [Reclaimed(ticket.nonce)]
    for page in PAGES:
        pair.target.fill(page, 0xEE)
    pair.run(3.0)
    assert all(pair.target.page(page) == b"\xee" * PAGE_BYTES for page in PAGES)
    assert len(pair.gave_up) == len(pair.drained) == 1
    assert_idle(pair)


def test_a_reader_that_cannot_fence_waits_for_the_writers_word() -> None:
    pair = Pair(lambda _: Fault(delay_s=1.0), checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.poll()
    pair.reader.abort(ticket.nonce, "client left")
    pair.run(0.9)
    assert len(pair.failed) == 1 and not pair.reclaimed and pair.reader.quarantined_pages == 6
    with pytest.raises(IntegrityError, match="belongs to a ticket"):
        pair.open(PAGES[2:3], 4)
    pair.run(0.5)
    assert len(pair.reclaimed) == len(pair.drained) == 1
    assert_idle(pair)


def test_an_abort_that_overtakes_its_ticket_leaves_a_tombstone() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open(PAGES, TOKENS, deadline_s=5.0)
    pair.reader.abort(ticket.nonce, "deadline of the request")
    pair.run(0.2)
    assert pair.reclaimed == [Reclaimed(ticket.nonce)], "AbortAck: never started"
    with pytest.raises(TransferError, match="aborted by its reader"):
        pair.writer.open(ticket)
    assert pair.writer.is_idle()


def test_tombstones_are_bounded() -> None:
    pair = Pair(settings=replace(QUICK, max_tombstones=2))
    for nonce in range(4):
        pair.writer.handle(READER, Abort(nonce, "x", 5.0))
    pair.writer.handle(READER, Abort(9, "x", float("inf")))
    assert pair.writer.counters["tombstone_refused"] == 3
    pair.poll()
    assert [message.nonce for _, message in pair.inbox if isinstance(message, AbortAck)] == [0, 1]


def test_a_lost_abort_ack_is_sent_again() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.reader.abort(ticket.nonce, "client left")
    pair.poll()
    pair.deliver()
    pair.poll()
    pair.inbox.clear()  # the AbortAck is lost
    pair.run(0.1)
    assert not pair.reclaimed
    pair.run(0.5)
    assert len(pair.reclaimed) == 1


def test_the_writers_abort_reaches_the_reader_unasked() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.writer.open(ticket)
    pair.writer.abort(ticket.nonce, "out of memory")
    pair.writer.abort(ticket.nonce, "again")
    pair.writer.push(ticket.nonce, SOURCE, 0, TOKENS)
    pair.writer.finish(ticket.nonce, 1, None)
    pair.run(0.3)
    assert pair.gave_up == [TicketGaveUp(ticket.nonce, "out of memory")]
    assert pair.reclaimed == [Reclaimed(ticket.nonce)] and "out of memory" in str(pair.failed)
    assert_idle(pair)


def test_both_sides_end_at_the_tickets_deadline_without_a_message() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open(PAGES, TOKENS, deadline_s=2.0)
    pair.writer.open(ticket)
    for _ in range(50):
        pair.clock.now += 0.1
        pair.poll()
        pair.inbox.clear()
    assert len(pair.gave_up) == len(pair.drained) == len(pair.failed) == 1
    assert not pair.reclaimed and pair.reader.quarantined_pages == 6, "a deadline is no proof"


def test_a_commit_without_an_answer_is_repeated_and_then_given_up() -> None:
    pair = Pair()
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    commits = 0
    for _ in range(150):
        pair.clock.now += 0.1
        pair.poll()
        commits += sum(isinstance(message, Commit) for _, message in pair.inbox)
        pair.inbox.clear()
    assert commits > 10 and "no answer to Commit" in str(pair.gave_up) and len(pair.drained) == 1


def test_a_lost_commit_ack_is_answered_the_same_way_again() -> None:
    pair = Pair()
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    while not pair.landed:
        pair.step(0.01)
        pair.inbox = [(to, message) for to, message in pair.inbox if not isinstance(message, CommitAck)]
    assert not pair.acked
    pair.run(1.0)
    assert len(pair.acked) == len(pair.landed) == 1


def test_a_commit_for_a_dead_ticket_is_refused() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.poll()
    pair.reader.abort(ticket.nonce, "client left")
    pair.inbox.clear()
    pair.reader_events.clear()
    pair.reader.poll()
    pair.reader.handle(WRITER, Commit(ticket.nonce, PAGE_TOKENS, (Leg(0, 0, 0, 1, ()),), 1))
    pair.poll()
    assert any(isinstance(message, CommitAck) and message.refused for _, message in pair.inbox)


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        ((0, 0, 8, 0, 1, 128, 0),),
        ((0, 0, 8, 0, 1, 128, 0), (1, 8, 14, 0, 1, 255, 0)),
        ((0, 0, 8, 0, 1, 128, 0), (0, 8, 14, 0, 1, 256, 0)),
        ((0, 0, 8, 0, 1, 128, 0), (1, 4, 18, 0, 1, 320, 0)),
        ((0, 0, 6, 0, 1, 128, 0), (1, 6, 16, 0, 1, 256, 0)),
        ((0, 0, 26, 0, 1, 448, 0),),
        ((0, 0, 22, 1, 1, 384, 0),),
        ((0, 0, 22, 0, 2, 768, 0),),
        ((0, 0, 22, 0, 1, 384, 0), (1, 0, 22, 0, 1, 384, 0)),
        ((0, 0, -1, 0, 1, 0, 0), (1, -1, 23, 0, 1, 384, 0)),
    ],
)
def test_a_commit_that_does_not_cover_the_tokens_exactly_is_refused(chunks: tuple[tuple[int, ...], ...]) -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    pair.reader.handle(
        WRITER, Commit(ticket.nonce, PAGE_TOKENS, (Leg(0, 0, 0, 1, tuple(ChunkEntry(*chunk) for chunk in chunks)),), 1)
    )
    pair.run(0.2)
    assert not pair.landed and len(pair.failed) == 1 and pair.reader.counters["bad_commit"] == 1
    assert_idle(pair)


def test_a_commit_without_any_leg_is_refused() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    pair.reader.handle(WRITER, Commit(ticket.nonce, PAGE_TOKENS, (), 1))
    pair.run(0.2)
    assert not pair.landed and len(pair.failed) == 1 and pair.reader.counters["bad_commit"] == 1
    assert_idle(pair)


def test_a_dead_writers_pages_come_back_by_the_mediums_fence() -> None:
    pair = Pair(lambda _: Fault(delay_s=1.0), checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.step(0.1)
    pair.reader.peer_gone(WRITER)
    pair.inbox.clear()
    pair.clock.now += 60
    pair.poll()
    assert len(pair.failed) == 1 and not pair.reclaimed, "a lease's end is no proof: the writer may only be paused"
    pair.network.kill(WRITER)
    pair.clock.now += 1
    pair.poll()
    assert pair.reclaimed == [Reclaimed(ticket.nonce)]
    assert pair.reader.is_idle()


def test_a_dead_reader_frees_the_writer() -> None:
    pair = Pair(lambda _: Fault(delay_s=1.0))
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.poll()
    pair.network.kill(READER)
    pair.writer.peer_gone(READER)
    pair.writer_events += [event for event in pair.writer.poll() if isinstance(event, (TicketGaveUp, Drained))]
    assert [type(event) for event in pair.writer_events] == [TicketGaveUp, Drained]
    assert pair.writer.is_idle()


def test_messages_of_another_boot_are_dropped_and_counted() -> None:
    pair = Pair(checks_permits=False)
    ticket = pair.open(PAGES, TOKENS)
    pair.writer.open(ticket)
    older_reader, older_writer = Peer(READER.node, "older"), Peer(WRITER.node, "older")
    pair.writer.handle(older_reader, Abort(ticket.nonce, "x", 1.0))
    pair.writer.handle(older_reader, CommitAck(ticket.nonce))
    pair.reader.handle(older_writer, Commit(ticket.nonce, PAGE_TOKENS, (Leg(0, 0, 0, 1, ()),), 1))
    pair.reader.handle(older_writer, AbortAck(ticket.nonce, "x"))
    assert pair.writer.counters["foreign_message"] == 2 and pair.reader.counters["foreign_message"] == 2
    pair.writer.push(ticket.nonce, SOURCE, 0, TOKENS)
    pair.writer.finish(ticket.nonce, 42, None)
    pair.run(1.0)
    assert len(pair.landed) == len(pair.acked) == 1


def last_page_after_a_late_duplicate(writer_class: type[Writer]) -> bytes:
    """Chunk 2 (the partial last page) is resent once; after the reader took the KV, the old request for a resend and
    the old Commit come again."""
    pair = Pair(by_first_trial(Fault(flip_byte=0), chunk=2), checks_permits=False, writer_class=writer_class)
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    asked: list[CommitAck] = []
    first: list[Commit] = []
    while not pair.landed:
        pair.poll()
        asked += [message for _, message in pair.inbox if isinstance(message, CommitAck) and message.resend]
        first += [message for _, message in pair.inbox if isinstance(message, Commit) and message.round == 0]
        pair.deliver(None if not pair.landed else 0)
        pair.clock.now += 0.01
    pair.target.fill(PAGES[-1], 0x77)  # decode goes on in the last, partial page
    pair.writer.handle(READER, asked[0])
    pair.reader.handle(WRITER, first[0])
    pair.run(1.0)
    assert len(pair.acked) == len(pair.landed) == 1
    assert_idle(pair)
    return pair.target.page(PAGES[-1])


class TakesAnyRound(Writer):
    """Breaks R7."""

    def handle(self, sender: Peer, message: CommitAck | Abort) -> None:
        outgoing = self._open.get(message.nonce)
        if isinstance(message, CommitAck) and outgoing is not None:
            message = CommitAck(message.nonce, message.resend, message.refused, outgoing.round)
        super().handle(sender, message)


def test_a_late_duplicate_of_an_older_round_reopens_nothing() -> None:
    assert last_page_after_a_late_duplicate(Writer) == b"\x77" * PAGE_BYTES


def test_without_rounds_it_would_overwrite_live_kv() -> None:
    assert last_page_after_a_late_duplicate(TakesAnyRound) != b"\x77" * PAGE_BYTES


def test_stats_of_a_stamp_know_their_trial() -> None:
    seen: list[Stamp] = []

    def plan(stamp: Stamp) -> Fault:
        seen.append(stamp)
        return Fault(status=WriteStatus.FAILED) if stamp.trial == 1 and stamp.chunk == 0 else Fault()

    pair = Pair(plan)
    pair.send_all(pair.open(PAGES[:1], 4), SOURCE)
    pair.run(0.5)
    assert [(stamp.chunk, stamp.trial, stamp.nbytes) for stamp in seen] == [(0, 1, PAGE_BYTES), (0, 2, PAGE_BYTES)]


def test_a_ticket_for_kv_of_other_weights_is_refused() -> None:
    pair = Pair()
    ticket = pair.open(PAGES, TOKENS)
    assert ticket.weights == ""
    with pytest.raises(TransferError, match="weights 'B', and this node has ''"):
        pair.writer.open(msgspec.structs.replace(ticket, weights="B"))
    assert pair.writer.counters["other_weights"] == 1
    pair.send_all(ticket, SOURCE)  # nothing of it was kept
    pair.run(1.0)
    assert intact(pair)

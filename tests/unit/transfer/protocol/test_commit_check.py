"""A Commit and its chunks, whichever comes first: it is looked at once or, when it says just what arrived, not at all,
and what arrives later, or never, still decides."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fake_backend import Fault
from transfer_harness import PAGE_BYTES, PAGE_TOKENS, QUICK, READER, WRITER, Pair, take_digests

from pdcluster.core.messages import ChunkEntry, Commit, Leg
from pdcluster.transfer.backends.base import Fence, Stamp
from pdcluster.transfer.layout.spans import CopyRun
from pdcluster.transfer.protocol import reader

PAGES, SOURCE, TOKENS = [10, 11, 30, 31], [3, 4, 5, 20], 16


def is_intact(pair: Pair) -> bool:
    return all(
        pair.source.page(source) == pair.target.page(target) for source, target in zip(SOURCE, PAGES, strict=True)
    )


def test_a_commit_is_looked_at_once_however_often_the_reader_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    plain = reader.covers_all
    monkeypatch.setattr(
        reader, "covers_all", lambda shape, ticket, commit: looks.append(commit.round) or plain(shape, ticket, commit)
    )
    pair = Pair(lambda stamp: Fault(arrival_s=0.5 * stamp.chunk))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    for _ in range(20):
        pair.run(0.05)
    assert looks == [0] and len(pair.landed) == 1 and is_intact(pair)
    pair.reader.check_integrity()


def test_a_chunk_whose_stamp_never_comes_is_asked_for_again_and_its_second_commit_is_looked_at_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    plain = reader.covers_all
    monkeypatch.setattr(
        reader, "covers_all", lambda shape, ticket, commit: looks.append(commit.round) or plain(shape, ticket, commit)
    )
    pair = Pair(lambda stamp: Fault(arrivals=0 if (stamp.chunk, stamp.trial) == (1, 1) else 1))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(5.0)
    assert looks == [0, 1] and pair.writer.counters["resent_chunks"] == 1 and len(pair.landed) == 1 and is_intact(pair)


@pytest.mark.parametrize("digests", [True, False])
def test_a_commit_that_says_just_what_arrived_is_not_looked_at_part_by_part(
    monkeypatch: pytest.MonkeyPatch, digests: bool
) -> None:
    monkeypatch.setattr(reader, "covers_all", lambda shape, ticket, commit: pytest.fail("it was looked at"))
    pair = Pair(settings=replace(QUICK, digests=digests))
    if digests:
        take_digests(pair)
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(1.0)
    assert len(pair.landed) == 1 and is_intact(pair)


def test_a_chunk_that_was_asked_for_again_is_not_believed_before_it_came() -> None:
    """Its digest was wrong in the Commit, not in the pages."""
    pair = Pair()
    take_digests(pair)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.poll()
    pair.poll()
    ((_, good),) = pair.inbox
    assert isinstance(good, Commit)
    (leg,) = good.legs
    spoiled = (*leg.chunks[:-1], msgspec.structs.replace(leg.chunks[-1], digest=leg.chunks[-1].digest ^ 1))
    pair.reader.handle(WRITER, msgspec.structs.replace(good, legs=(msgspec.structs.replace(leg, chunks=spoiled),)))
    pair.reader.poll()
    assert pair.reader.counters["chunks_asked_again"] == 1
    pair.reader.handle(WRITER, msgspec.structs.replace(good, round=1))
    pair.reader.poll()
    assert pair.reader.open_tickets == 1 and pair.reader.counters["landed"] == 0


def commit_of(nonce: int, round_: int, *sizes: int) -> Commit:
    """Chunks of so many pages, one after the other, each in its try of that round."""
    entries, at = [], 0
    for index, pages in enumerate(sizes):
        entries.append(ChunkEntry(index, at * PAGE_TOKENS, pages * PAGE_TOKENS, 0, 1, pages * PAGE_BYTES, 0, round_))
        at += pages
    return Commit(nonce, PAGE_TOKENS, (Leg(0, 0, 0, 1, tuple(entries)),), 1, round=round_)


def test_bytes_that_arrived_and_were_asked_for_again_do_not_stand_for_those_that_never_came() -> None:
    """A writer that cuts otherwise in the second round, and leaves half of the ticket out, brings as many bytes as the
    ticket has."""
    pair = Pair(settings=replace(QUICK, digests=False))
    ticket = pair.open(PAGES, TOKENS)
    end = pair.source.backends["fake"]
    end.connect(READER, dict(ticket.reader.adverts)["fake"])
    for round_, sizes in enumerate([(1, 3), (2,)]):
        end.write(
            READER,
            0,
            0,
            Stamp(ticket.nonce, 0, round_, 2 * PAGE_BYTES),
            (CopyRun(0, PAGES[0] * PAGE_BYTES, 2 * PAGE_BYTES),),
        )
        pair.poll()
        pair.reader.handle(WRITER, commit_of(ticket.nonce, round_, *sizes))
        pair.clock.now += QUICK.arrival_s
        pair.poll()
    assert pair.reader.counters["chunks_asked_again"] == 2
    assert not pair.landed and len(pair.failed) == 1


def test_what_comes_while_the_permit_is_revoked_is_judged_at_once() -> None:
    """Another try, of other bytes, whose stamp was on its way: nothing comes after it that would be worth waiting
    for."""
    pair = Pair(settings=replace(QUICK, digests=False))
    ticket = pair.open(PAGES, TOKENS)
    target = pair.target.backends["fake"]
    revoke = target.revoke

    def late(nonce: int) -> Fence:
        target._arrivals.add(Stamp(ticket.nonce, 1, 7, PAGE_BYTES))
        return revoke(nonce)

    target.revoke = late  # type: ignore[method-assign]
    for index in range(2):
        target._arrivals.add(Stamp(ticket.nonce, index, 0, 2 * PAGE_BYTES))
    pair.poll()
    pair.reader.handle(WRITER, commit_of(ticket.nonce, 0, 2, 2))
    pair.poll()
    assert not pair.landed and pair.reader.counters["chunks_asked_again"] == 1

"""Nodes whose ranks each have a transfer endpoint of their own: every leg goes from rank to rank, over real media and
real channels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from backend_ends import eventually
from rank_nodes import LAYERS, NUM_PAGES, RankNodes, random_kv
from transfer_peer import READER, WRITER

from pdcluster.core.errors import IntegrityError, PeerUnreachable
from pdcluster.core.messages import Abort, Commit, CommitAck
from pdcluster.node.native.tensor_parallel import endpoint_client
from pdcluster.node.native.tensor_parallel.channel import frame
from pdcluster.node.native.tensor_parallel.messages import Allow, Arrived, Close, DigestResult, Revoke, WriteRequest
from pdcluster.transfer.backends.base import Arrival, Fence, Peer, Permit, Stamp, WriteStatus
from pdcluster.transfer.backends.ranked import MAGIC, MAX_RANKS, pack_adverts, unpack_adverts
from pdcluster.transfer.layout.geometry import plan_courses
from pdcluster.transfer.layout.runs import SpanTable
from pdcluster.transfer.layout.spans import CopyRun, digest
from pdcluster.transfer.protocol.reader_state import Incoming
from pdcluster.transfer.protocol.session import Acked, Drained, Landed, Reclaimed, TicketFailed, TicketGaveUp

pytestmark = pytest.mark.timeout(120)

SIDES = list(itertools.product((1, 2, 4), (1, 2, 4), ((16, 16), (16, 64), (48, 32))))
SAMPLE = random.Random(7).sample(SIDES, 6)


def layouts() -> Iterator[object]:
    for medium, (writers, readers, pages) in itertools.product(("tcp", "shm"), SIDES):
        marks = () if (writers, readers, pages) in SAMPLE else (pytest.mark.full,)
        yield pytest.param(
            medium, (writers, readers), pages, marks=marks, id=f"{medium}-{writers}to{readers}-{pages[0]}to{pages[1]}"
        )


@pytest.fixture
def nodes() -> Iterator[RankNodes]:
    nodes = RankNodes("tcp", (2, 4))
    yield nodes
    nodes.close()


def scattered(num_tokens: int, page_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(NUM_PAGES), -(-num_tokens // page_tokens))


@pytest.mark.parametrize(("medium", "ranks", "page_tokens"), list(layouts()))
def test_kv_comes_whole_from_any_ranks_to_any_ranks(
    medium: str, ranks: tuple[int, int], page_tokens: tuple[int, int]
) -> None:
    nodes = RankNodes(medium, ranks, page_tokens)
    commits: list[Commit] = []
    nodes.pass_on = lambda _to, message: not isinstance(message, Commit) or not commits.append(message)
    num_tokens, kv = 187, random_kv(187)
    sources, targets = scattered(num_tokens, page_tokens[0], 1), scattered(num_tokens, page_tokens[1], 2)
    nodes.source.fill(sources, kv)
    ticket = nodes.open(targets, num_tokens)
    nodes.until(lambda: nodes.reader.is_permitted(ticket.nonce))
    nodes.writer.open(ticket)
    nodes.writer.push(ticket.nonce, sources, 0, 96)
    for first in range(LAYERS):
        nodes.writer.push(ticket.nonce, sources[96 // page_tokens[0] :], 96, num_tokens - 96, (first, first + 1))
    nodes.writer.finish(ticket.nonce, 5, None)
    nodes.until(lambda: nodes.count(Drained))
    assert nodes.count(Landed) == nodes.count(Acked) == 1, nodes.events
    assert nodes.target.differs(targets, kv) == []
    legs = [(leg.rank, leg.reader_rank, leg.first_head, leg.first_head + leg.num_heads) for leg in commits[0].legs]
    assert legs == [(c.writer_rank, c.reader_rank, c.first_head, c.end_head) for c in plan_courses(4, *ranks)]
    assert all(leg.chunks for leg in commits[0].legs)
    assert nodes.reader.is_idle() and nodes.writer.is_idle() and not nodes.source.lost + nodes.target.lost
    nodes.close()


def test_nobody_hears_of_a_ticket_before_every_rank_takes_its_writes() -> None:
    nodes = RankNodes("tcp", (1, 2), waiting=True)
    ticket = nodes.open([1, 2, 3], 40)
    nodes.step()
    assert not nodes.reader.is_permitted(ticket.nonce)
    nodes.target.go()
    nodes.until(lambda: nodes.reader.is_permitted(ticket.nonce))
    assert nodes.reader.is_permitted(1), "a ticket that is over holds nobody up"
    nodes.close()


def test_a_chunk_that_a_rank_finds_spoiled_is_sent_again_once_the_rank_permits_it(
    nodes: RankNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Incoming, "digest_on_arrival", lambda *_: None)  # so that every rank reads what it has
    kv, acks = random_kv(64), []

    def spoil(_to: Peer, message: object) -> bool:
        if isinstance(message, Commit) and message.round == 0:
            nodes.target.page(3, 9)[1, 0, 0, 2, 0] ^= 1
        if isinstance(message, CommitAck):
            acks.append(message)
        return True

    nodes.pass_on = spoil
    nodes.source.fill([4, 1, 7, 0], kv)
    nodes.send(nodes.open([9, 2, 5, 6], 64), [4, 1, 7, 0])
    nodes.until(lambda: nodes.count(Drained))
    assert nodes.count(Landed) == 1 and nodes.target.differs([9, 2, 5, 6], kv) == []
    assert [len(ack.resend) for ack in acks] == [1, 0] and nodes.reader.counters["digest_mismatch"] == 1


def test_one_leg_that_never_verifies_ends_the_whole_ticket(nodes: RankNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Incoming, "digest_on_arrival", lambda *_: None)

    def spoil(_to: Peer, message: object) -> bool:
        if isinstance(message, Commit):
            nodes.target.page(2, 9)[0, 1, 0, 0, 0] ^= 1
        return True

    nodes.pass_on = spoil
    nodes.source.fill([4, 1], random_kv(32))
    nodes.send(nodes.open([9, 2], 32), [4, 1])
    nodes.until(lambda: nodes.count(Reclaimed) and nodes.count(Drained))
    assert (
        nodes.count(Landed) == nodes.count(Acked) == 0 and nodes.count(TicketFailed) == nodes.count(TicketGaveUp) == 1
    )
    assert nodes.reader.is_idle() and nodes.writer.is_idle()


def test_an_aborted_tickets_pages_are_free_only_when_every_rank_has_proved_it(nodes: RankNodes) -> None:
    nodes.pass_on = lambda _to, message: not isinstance(message, Abort)  # the writer does not hear of it
    nodes.source.fill([4, 1], random_kv(32))
    ticket = nodes.open([9, 2], 32)
    nodes.until(lambda: nodes.reader.is_permitted(ticket.nonce))
    nodes.writer.open(ticket)
    nodes.reader.abort(ticket.nonce, "no more")
    assert nodes.reader.quarantined_pages == 2 and nodes.count(Reclaimed) == 0, "the ranks were only asked"
    nodes.until(lambda: nodes.count(Reclaimed))
    nodes.target.backend.arrivals()
    before = [memory.bytes.copy() for memory in nodes.target.memories]
    nodes.writer.push(ticket.nonce, [4, 1], 0, 32)
    nodes.until(lambda: nodes.count(Drained))
    assert nodes.count(TicketGaveUp) == 1 and nodes.reader.is_idle()
    assert all((memory.bytes == old).all() for memory, old in zip(nodes.target.memories, before, strict=True)), (
        "a late write changed a page"
    )


def test_a_proof_holds_until_the_boot_or_the_ticket_is_permitted_again(nodes: RankNodes) -> None:
    end = nodes.target.links[0].ends["tcp"]

    def prove(ask: str, key: object) -> None:
        assert getattr(end, ask)(key) is Fence.CANNOT_FENCE
        nodes.until(lambda: getattr(end, ask)(key) is Fence.FENCED)

    for _ in range(2):
        end.permit(Permit(7, WRITER, 1, ((0, 64),)))
        prove("revoke", 7)
        prove("close", WRITER)
    with pytest.raises(IntegrityError, match="registers it itself"):
        end.register(nodes.target.memories[1].region)


def test_a_rank_that_has_not_answered_is_not_asked_again_for_the_same_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, sent = RankNodes("tcp", (1, 2), waiting=True), []
    link, end = nodes.target.links[0], nodes.target.links[0].ends["tcp"]
    monkeypatch.setattr(link, "send", lambda message, send=link.send: sent.append(type(message)) or send(message))
    for _ in range(5):
        assert end.revoke(7) is end.close(WRITER) is Fence.CANNOT_FENCE
    assert sent == [Revoke, Close]
    end.permit(Permit(7, WRITER, 1, ((0, 64),)))  # what was asked before says nothing of it
    assert end.revoke(7) is end.close(WRITER) is Fence.CANNOT_FENCE
    assert sent[2:] == [Allow, Revoke, Close]
    end.connect(WRITER, b"no advert")
    end.write(WRITER, 1, 0, Stamp(7, 0, 1, 64), (CopyRun(0, 0, 64),))
    end.close(WRITER)
    assert sent[5:] == [WriteRequest, Close], "the write came after the last close"
    nodes.target.go()
    nodes.until(lambda: end.revoke(7) is end.close(WRITER) is Fence.FENCED)
    nodes.close()


def test_a_writer_that_is_gone_is_fenced_on_every_rank_and_its_pages_come_back(nodes: RankNodes) -> None:
    nodes.open([9, 2], 32)
    nodes.reader.peer_gone(WRITER)
    nodes.until(lambda: nodes.count(Reclaimed))
    assert nodes.reader.is_idle()


def test_a_reader_that_is_gone_ends_what_every_rank_writes_to_it(nodes: RankNodes) -> None:
    ticket = nodes.open([9, 2], 32)
    nodes.send(ticket, [4, 1])
    nodes.writer.poll()
    nodes.writer.peer_gone(READER)
    nodes.until(lambda: nodes.count(Drained))
    assert nodes.count(TicketGaveUp) == 1 and nodes.writer.is_idle()
    nodes.send(nodes.open([5, 6], 32), [4, 1])  # it was not
    nodes.until(lambda: nodes.count(Landed))


def test_a_rank_that_reaches_nobody_says_so_of_each_write(nodes: RankNodes) -> None:
    end, nowhere = nodes.source.links[0].ends["tcp"], Peer("x", "x1")
    stamp, runs = Stamp(7, 0, 1, 64), (CopyRun(0, 0, 64),)
    with pytest.raises(PeerUnreachable, match="is not connected"):
        end.write(nowhere, 1, 0, stamp, runs)
    end.connect(nowhere, b"no advert")
    handle = end.write(nowhere, 1, 0, stamp, runs)
    nodes.until(lambda: end.poll(handle) is WriteStatus.FAILED)
    with pytest.raises(PeerUnreachable, match="is not connected"):
        nodes.source.backend.write(nowhere, 0, 0, stamp, runs)
    nodes.source.backend.connect(READER, nodes.target.backend.advert())
    with pytest.raises(PeerUnreachable, match="has no rank 4"):
        nodes.source.backend.write(READER, 0, 4, stamp, runs)


def test_a_done_write_of_a_rank_brings_its_digest_and_its_time(nodes: RankNodes) -> None:
    nodes.target.backend.permit(Permit(7, WRITER, 2, ((0, 4096),), digests=True))
    nodes.source.backend.connect(READER, nodes.target.backend.advert())
    permitted = nodes.target.links[1].mark()
    nodes.until(lambda: permitted.value is not None)
    nodes.source.memories[1].bytes[:4096] = 7
    handle = nodes.source.backend.write(READER, 1, 2, Stamp(7, 0, 1, 4096), (CopyRun(0, 0, 4096),), digests=True)
    arrivals: list[Arrival] = []
    eventually(lambda: arrivals.extend(nodes.target.backend.arrivals()) or arrivals, "the arrival")
    eventually(lambda: nodes.source.backend.poll(handle) is WriteStatus.DONE, "the answer")
    digest, seconds = nodes.source.backend.take_digest(handle), nodes.source.backend.take_duration(handle)
    (arrival,) = arrivals
    assert (
        digest is not None and digest == arrival.digest and arrival.region == 2 and list(arrival.spans) == [(0, 4096)]
    )
    assert seconds is not None and seconds > 0 and nodes.source.backend.take_duration(handle) is None


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff\xff", frame(Arrived("tcp", (7, 0, 1, 64), None, b"no table", 1)), frame(DigestResult(999, 0))],
)
def test_a_rank_whose_channel_ends_or_says_nonsense_is_lost_with_its_node(said: bytes) -> None:
    nodes = RankNodes("tcp", (2, 2), waiting=True)
    nodes.target.far[0].sendall(said)
    nodes.until(lambda: nodes.target.lost)
    assert "rank 1 says nothing about transfers any more" in nodes.target.lost[0]
    assert nodes.source.lost == []
    nodes.source.far[0].shutdown(2)
    nodes.until(lambda: nodes.source.lost)
    assert nodes.source.lost[0].startswith("rank 1 ")
    nodes.target.go()
    nodes.close()
    assert len(nodes.target.lost) == 1, "what ends it on purpose is no loss"


def test_a_rank_whose_endpoint_does_nothing_any_more_is_lost_with_its_node() -> None:
    nodes = RankNodes("tcp", (1, 2), waiting=True, patience_s=0.2)
    nodes.until(lambda: nodes.target.lost)
    assert nodes.target.lost[0].startswith("rank 1 has done nothing about transfers for ")
    nodes.target.go()
    nodes.close()
    assert len(nodes.target.lost) == 1


def test_an_idle_rank_is_not_lost_however_long_nobody_wants_anything_of_it() -> None:
    nodes = RankNodes("tcp", (1, 2), patience_s=0.2)
    heard = nodes.target.links[0].num_heard
    nodes.until(lambda: nodes.target.links[0].num_heard > heard + 10)
    assert nodes.target.lost == []
    nodes.close()


def test_a_busy_rank_holds_up_nobody_and_does_everything_in_its_order_later() -> None:
    nodes = RankNodes("tcp", (1, 2), waiting=True)
    (link,), memory = nodes.target.links, nodes.target.memories[1].bytes
    memory[:] = np.arange(memory.size)
    tables = [SpanTable(np.array([[offset + index, 1] for offset in range(0, 40960, 10)])) for index in range(10)]
    answers = [link.digest(table) for table in tables]  # far more than the channel holds
    permitted = link.mark()
    nodes.target.go()
    nodes.until(lambda: permitted.value is not None)
    assert [answer.value for answer in answers] == [digest(memoryview(memory), table) for table in tables]
    assert nodes.target.lost == []
    nodes.close()


def test_what_waits_for_a_rank_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_client, "MAX_UNSENT_BYTES", 1 << 20)
    nodes = RankNodes("tcp", (1, 2), waiting=True)
    table = SpanTable(np.array([[offset, 1] for offset in range(4096)]))
    for _ in range(40):
        nodes.target.links[0].digest(table)
    assert len(nodes.target.lost) == 1 and "bytes wait for it" in nodes.target.lost[0]
    nodes.target.go()
    nodes.close()


@pytest.mark.parametrize("data", [MAGIC, MAGIC + b"\x91\xc4\x01a", MAGIC + b"\xc0", MAGIC + b"\xdd\xff\xff\xff\xff"])
def test_adverts_that_no_node_says_are_refused(data: bytes) -> None:
    with pytest.raises(PeerUnreachable, match="adverts"):
        unpack_adverts(data)


def test_adverts_come_back_and_one_is_the_mediums_own() -> None:
    assert unpack_adverts(pack_adverts([b"one"])) == (b"one",) and pack_adverts([b"one"]) == b"one"
    assert unpack_adverts(pack_adverts([b"a", b"b", b"c"])) == (b"a", b"b", b"c")
    with pytest.raises(PeerUnreachable, match=f"2 to {MAX_RANKS}"):
        unpack_adverts(pack_adverts([b"x"] * (MAX_RANKS + 1)))

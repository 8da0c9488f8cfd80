"""Many tickets between nodes of several ranks while things go wrong: what lands is right, nothing is written late,
every page comes back."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from rank_nodes import NUM_PAGES, RankNodes, random_kv
from transfer_peer import READER, WRITER

from pdcluster.core.errors import TransferError
from pdcluster.core.messages import Commit, Ticket
from pdcluster.transfer.protocol.reader_state import Incoming
from pdcluster.transfer.protocol.session import Acked, Drained, Landed, Reclaimed, TicketFailed, TicketGaveUp

pytestmark = pytest.mark.timeout(120)

PAGE, TICKETS, OPEN = 16, 40, 4
RARE = ("writer gone", "reader gone")
# The media do not try again for a second.
AFTER_LOSS_S = 1.2


@dataclass
class Transfer:
    """pushed: tokens so far; ends: what both halves said of it."""

    ticket: Ticket
    kv: np.ndarray
    sources: list[int]
    targets: list[int]
    pushed: int = 0
    is_opened: bool = False
    is_committed: bool = False
    fate: str = ""
    ends: set[type] = field(default_factory=set)


class Storm:
    """Opens, pushes, aborts and loses peers as the dice say; messages may be lost, bytes may be spoiled just before
    they are read."""

    def __init__(self, nodes: RankNodes, seed: int) -> None:
        self.nodes, self.dice = nodes, random.Random(seed)
        self.free = {"source": set(range(NUM_PAGES)), "target": set(range(NUM_PAGES))}
        self.open: dict[int, Transfer] = {}
        self.ends: list[type] = []
        self.spoiled = 0
        self.begin_at = 0.0
        self.fates = [*RARE, *["reader aborts", "writer aborts"] * 4, *[""] * (TICKETS - len(RARE) - 8)]
        self.dice.shuffle(self.fates)
        nodes.pass_on = self.passes

    def passes(self, _to: object, message: object) -> bool:
        transfer = self.open.get(message.nonce)  # type: ignore[attr-defined]
        does_pass = self.dice.random() > 0.15
        if isinstance(message, Commit) and transfer is not None and not transfer.is_committed:
            transfer.is_committed = does_pass  # from now on the reader reads, and nothing may write
            if self.dice.random() < 0.3 and TicketFailed not in transfer.ends:
                rank, page = self.dice.randrange(self.nodes.target.shape.ranks), self.dice.choice(transfer.targets)
                self.nodes.target.page(rank, page)[0, 0, 0, 0, 0] ^= 0x80
                self.spoiled += 1
        return does_pass

    def begin(self) -> None:
        num_tokens = self.dice.randint(1, 5 * PAGE)
        count = -(-num_tokens // PAGE)
        if min(map(len, self.free.values())) < count:
            return
        taken = {side: self.dice.sample(sorted(free), count) for side, free in self.free.items()}
        for side, pages in taken.items():
            self.free[side] -= set(pages)
        kv = random_kv(num_tokens, self.dice.randrange(1 << 30))
        self.nodes.source.fill(taken["source"], kv)
        ticket = self.nodes.open(taken["target"], num_tokens, deadline_s=2.5)
        transfer = self.open[ticket.nonce] = Transfer(ticket, kv, taken["source"], taken["target"])
        transfer.fate = self.fates.pop(0)

    def go_on(self, transfer: Transfer) -> None:
        writer, ticket = self.nodes.writer, transfer.ticket
        if not transfer.is_opened:
            if not self.nodes.reader.is_permitted(ticket.nonce):
                return
            transfer.is_opened = True
            try:
                writer.open(ticket)
            except TransferError:  # its Abort was faster
                transfer.ends |= {TicketGaveUp, Drained}
                self.let_go(transfer, "source", transfer.sources)
            return
        end = min(transfer.pushed + PAGE * self.dice.randint(1, 3), ticket.num_tokens)
        if transfer.pushed < ticket.num_tokens:
            writer.push(
                ticket.nonce, transfer.sources[transfer.pushed // PAGE :], transfer.pushed, end - transfer.pushed
            )
            transfer.pushed = end
        if end == ticket.num_tokens:
            writer.finish(ticket.nonce, 3, None)

    def meddle(self, transfer: Transfer) -> None:
        """Each fate at most once."""
        fate, transfer.fate = transfer.fate, ""
        nodes, nonce = self.nodes, transfer.ticket.nonce
        if fate == "reader aborts":
            nodes.reader.abort(nonce, "the dice")
        elif fate == "writer aborts":
            nodes.writer.abort(nonce, "the dice")
        elif fate:
            nodes.reader.peer_gone(WRITER) if fate == "writer gone" else nodes.writer.peer_gone(READER)
            self.begin_at = time.monotonic() + AFTER_LOSS_S

    def take_events(self) -> None:
        events, self.nodes.events = self.nodes.events, []
        for event in events:
            transfer = self.open[event.nonce]  # type: ignore[attr-defined]
            transfer.ends.add(type(event))
            self.ends.append(type(event))
            if isinstance(event, Landed):
                assert self.nodes.target.differs(transfer.targets, transfer.kv) == [], "wrong KV was taken"
            if isinstance(event, Landed | Reclaimed):
                self.let_go(transfer, "target", transfer.targets)
            if isinstance(event, Drained):
                self.let_go(transfer, "source", transfer.sources)

    def let_go(self, transfer: Transfer, side: str, pages: list[int]) -> None:
        """They are somebody else's from now on: empty, which a late write would undo and a late read would find."""
        node = self.nodes.source if side == "source" else self.nodes.target
        node.fill(pages, np.zeros_like(random_kv(len(pages) * PAGE)))
        self.free[side] |= set(pages)
        reader_is_done, writer_is_done = (
            transfer.ends & {Landed, Reclaimed},
            Drained in transfer.ends or not transfer.is_opened,
        )
        if reader_is_done and not transfer.is_opened:
            self.free["source"] |= set(transfer.sources)  # the writer never heard of it
        if reader_is_done and writer_is_done:
            del self.open[transfer.ticket.nonce]

    def run(self) -> None:
        """Until all has ended; a hang is the test's timeout."""
        while self.fates or self.open:
            if self.fates and len(self.open) < OPEN and time.monotonic() >= self.begin_at:
                self.begin()
            for transfer in list(self.open.values()):
                if self.dice.random() < 0.1:
                    self.meddle(transfer)
                self.go_on(transfer)
            self.nodes.step()
            self.take_events()
            self.nodes.reader.check_integrity()
            self.nodes.writer.check_integrity()
        self.nodes.until(lambda: self.nodes.reader.is_idle() and self.nodes.writer.is_idle())


MORE = [pytest.param((2, 2), seed, marks=pytest.mark.full) for seed in range(20)]


@pytest.mark.parametrize(("ranks", "seed"), [((2, 4), 1), ((4, 1), 2), ((1, 2), 3), *MORE])
def test_what_lands_is_right_and_every_page_comes_back(
    ranks: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Incoming, "digest_on_arrival", lambda *_: None)  # bytes are spoiled behind the medium's back
    nodes = RankNodes("tcp", ranks)
    storm = Storm(nodes, seed)
    storm.run()
    assert all(len(free) == NUM_PAGES for free in storm.free.values())
    assert storm.ends.count(Landed) > 5 and storm.ends.count(TicketFailed) > 0 and storm.spoiled > 1, storm.ends
    assert storm.ends.count(Acked) <= storm.ends.count(Landed)
    assert nodes.source.lost == nodes.target.lost == []
    nodes.close()
    assert not any(memory.bytes.any() for memory in nodes.target.memories), "a page was written after it had come back"

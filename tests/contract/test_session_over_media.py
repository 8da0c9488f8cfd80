"""The protocol over real media: pages arrive exactly, aborts end, on shm, tcp and mooncake."""

from __future__ import annotations

import itertools
import os
import random
import resource
import time
from collections.abc import Callable, Iterator

import pytest
from backend_ends import HAS_NIXL, REAL, Ends, start
from transfer_peer import READER, WRITER

from pdcluster.core.errors import PeerUnreachable
from pdcluster.core.messages import Endpoint, Ticket
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import (
    Acked,
    Drained,
    Landed,
    LocalPages,
    Reclaimed,
    Send,
    Settings,
    TicketFailed,
    TicketGaveUp,
)
from pdcluster.transfer.protocol.writer import Writer

PAGE_TOKENS, PAGE_BYTES, NUM_PAGES = 16, 8192, 512
SETTINGS = Settings(chunk_bytes=16 * PAGE_BYTES, window_bytes=64 * PAGE_BYTES)


class Nodes:
    """Both halves over real backends in one process; control messages go straight over. others: media beside the first,
    over the same memory."""

    def __init__(self, name: str, *others: str) -> None:
        self.ends = Ends(name, NUM_PAGES * PAGE_BYTES)
        shape, common = PageShape.plain(PAGE_TOKENS, PAGE_BYTES), {"clock": time.monotonic, "settings": SETTINGS}
        self.others = [(start(each, WRITER), start(each, READER)) for each in others]
        for ours, theirs in self.others:
            ours.register(self.ends.source.region)
            theirs.register(self.ends.target.region)
        writers = {name: self.ends.writer, **{ours.name: ours for ours, _ in self.others}}
        readers = {name: self.ends.reader, **{theirs.name: theirs for _, theirs in self.others}}
        self.writer = Writer(
            WRITER, writers, list(writers), local=LocalPages(0, shape, [memoryview(self.ends.source.bytes)]), **common
        )
        me = Endpoint(READER.node, READER.incarnation, "r")
        self.reader = Reader(
            me, readers, list(readers), local=LocalPages(0, shape, [memoryview(self.ends.target.bytes)]), **common
        )
        self.events: list[object] = []

    def close(self) -> None:
        for pair in self.others:
            for backend in pair:
                backend.shutdown()
        self.ends.close()

    def open(self, pages: list[int], num_tokens: int, cached: int = 0) -> Ticket:
        return self.reader.open("r", 0, Endpoint(WRITER.node, WRITER.incarnation, "w"), pages, num_tokens, cached, 30.0)

    def step(self) -> None:
        for backend in (self.ends.writer, *(ours for ours, _ in self.others)):
            backend.arrivals()
        for end in (self.reader, self.writer):
            for event in end.poll():
                if not isinstance(event, Send):
                    self.events.append(event)
                elif Peer(event.to.node, event.to.incarnation) == READER:
                    self.reader.handle(WRITER, event.message)
                else:
                    self.writer.handle(READER, event.message)

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.step()
            time.sleep(0.0005)

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def page(self, memory: object, page: int) -> bytes:
        return memory.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes()  # type: ignore[attr-defined]


@pytest.fixture(params=REAL)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(request.param)
    yield nodes
    nodes.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """All that are opened from now on have numbers above 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", REAL)
def test_kv_moves_in_a_process_with_many_descriptors(many_descriptors: None, name: str) -> None:
    nodes = Nodes(name)
    ticket = nodes.open(list(range(40)), 40 * PAGE_TOKENS)
    nodes.writer.open(ticket)
    nodes.writer.push(ticket.nonce, list(range(40)), 0, 40 * PAGE_TOKENS)
    nodes.writer.finish(ticket.nonce, 9, None)
    nodes.until(lambda: nodes.count(Drained) == 1)
    assert nodes.count(Landed) == nodes.count(Acked) == 1
    nodes.close()


def test_scattered_pages_of_many_tickets_arrive_exactly(nodes: Nodes) -> None:
    order = random.Random(4)
    targets, plan = order.sample(range(NUM_PAGES), 300), []
    while targets:
        count = order.randint(1, min(60, len(targets)))
        pages, targets = targets[:count], targets[count:]
        tokens = count * PAGE_TOKENS - order.randint(0, PAGE_TOKENS - 1)
        cached = order.randint(0, count // 2) * PAGE_TOKENS
        sources = order.sample(range(NUM_PAGES), count)
        ticket = nodes.open(pages, tokens, cached)
        assert nodes.writer.open(ticket) == nodes.ends.name
        plan.append((ticket, sources, pages))
        middle = count // 2 * PAGE_TOKENS
        if middle:
            nodes.writer.push(ticket.nonce, sources[: count // 2], 0, middle)
        nodes.step()
        nodes.writer.push(ticket.nonce, sources[count // 2 :], middle, tokens - middle)
        nodes.writer.finish(ticket.nonce, 9, None)
    nodes.until(lambda: nodes.count(Drained) == len(plan))
    assert (
        nodes.count(Landed) == nodes.count(Acked) == len(plan)
        and nodes.count(TicketGaveUp) == nodes.count(TicketFailed) == 0
    )
    for ticket, sources, pages in plan:
        first = ticket.cached_tokens // PAGE_TOKENS
        for number, (source, page) in enumerate(zip(sources, pages, strict=True)):
            landed = nodes.page(nodes.ends.target, page)
            assert landed == (nodes.page(nodes.ends.source, source) if number >= first else bytes(PAGE_BYTES))
    assert nodes.writer.is_idle() and nodes.reader.is_idle()


@pytest.mark.parametrize("after_steps", [0, 1, 2, 5])
def test_an_abort_at_any_moment_gives_every_page_back(nodes: Nodes, after_steps: int) -> None:
    for _ in itertools.repeat(None, 3):
        ticket = nodes.open(list(range(200)), 200 * PAGE_TOKENS)
        nodes.writer.open(ticket)
        nodes.writer.push(ticket.nonce, list(range(200, 400)), 0, 200 * PAGE_TOKENS)
        for _ in range(after_steps):
            nodes.step()
        nodes.reader.abort(ticket.nonce, "client left")
        nodes.until(lambda: nodes.writer.is_idle() and nodes.reader.is_idle())
        nodes.step()
    assert nodes.count(TicketFailed) == nodes.count(Reclaimed) == nodes.count(TicketGaveUp) == nodes.count(Drained) == 3
    assert nodes.reader.quarantined_pages == 0


def test_a_new_pair_is_measured_on_its_first_tickets_which_land_whole_though_every_medium_wrote_to_them() -> None:
    """All media that both ends have, under the same tickets, then the fastest of them."""
    media = ("shm", "tcp", "mooncake", *(["nixl"] if HAS_NIXL else []))
    nodes = Nodes(*media)
    tickets = [nodes.open(list(range(first, first + 128)), 128 * PAGE_TOKENS) for first in (0, 128, 256)]
    for number, ticket in enumerate(tickets):
        nodes.writer.open(ticket)
        nodes.writer.push(ticket.nonce, list(range(number * 128, number * 128 + 128)), 0, 128 * PAGE_TOKENS)
        nodes.writer.finish(ticket.nonce, 9, None)
    used: set[str] = set()

    def is_over() -> bool:
        used.update(chunk.path for outgoing in nodes.writer._open.values() for chunk in outgoing.chunks)
        return nodes.count(Drained) == 3

    nodes.until(is_over)
    assert nodes.count(Landed) == 3 and used - {""} == set(media)
    size = 3 * 128 * PAGE_BYTES
    assert (nodes.ends.target.bytes[:size] == nodes.ends.source.bytes[:size]).all()
    reports = nodes.writer.paths.report()
    assert all(report.bytes_s > 0 for report in reports) and sum(report.is_chosen for report in reports) == 1
    assert nodes.writer.is_idle() and nodes.reader.is_idle()
    nodes.close()


def test_a_ticket_whose_writer_was_fenced_is_not_written_by_the_connection_of_a_later_ticket() -> None:
    """Shared memory fences a boot that never came by refusing the adverts it may still hold. It is alive, holds such a
    ticket, and comes with a newer one: the memory that it maps now is that of the old ticket's pages, too."""
    nodes = Nodes("shm")
    old = nodes.open([0, 1], 2 * PAGE_TOKENS)
    nodes.reader.peer_gone(WRITER)
    nodes.until(lambda: nodes.count(Reclaimed) == 1)
    nodes.writer.open(old)
    nodes.until(lambda: all(mover.inbox.failed_at is not None for mover in nodes.ends.writer._movers.values()))
    new = nodes.open([2, 3], 2 * PAGE_TOKENS)

    def is_let_in() -> bool:
        try:
            return nodes.writer.open(new) == "shm"
        except PeerUnreachable:
            return False

    nodes.until(is_let_in)
    nodes.writer.push(new.nonce, [2, 3], 0, 2 * PAGE_TOKENS)
    nodes.writer.finish(new.nonce, 9, None)
    nodes.until(lambda: nodes.count(Landed) == 1)
    nodes.writer.push(old.nonce, [0, 1], 0, 2 * PAGE_TOKENS)
    nodes.until(lambda: nodes.count(TicketGaveUp) == 1 and nodes.writer.is_idle())
    assert [any(nodes.page(nodes.ends.target, page)) for page in range(4)] == [False, False, True, True]
    nodes.close()

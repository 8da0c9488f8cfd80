"""The protocol over real media: pages arrive exactly, aborts end, on shm, tcp and mooncake."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import pytest
from test_backends import REAL, Ends
from transfer_peer import READER, WRITER

from pdcluster.messages import Endpoint, Ticket
from pdcluster.transfer.base import Peer
from pdcluster.transfer.geometry import PageShape
from pdcluster.transfer.reader import Reader
from pdcluster.transfer.session import Acked, Drained, Failed, GaveUp, Landed, Reclaimed, Send, Settings
from pdcluster.transfer.writer import Writer

PAGE_TOKENS, PAGE_BYTES, NUM_PAGES = 16, 8192, 512
SETTINGS = Settings(chunk_bytes=16 * PAGE_BYTES, window_bytes=64 * PAGE_BYTES)


class Nodes:
    """Both halves over real backends in one process; control messages go straight over."""

    def __init__(self, name: str) -> None:
        self.ends = Ends(name, NUM_PAGES * PAGE_BYTES)
        shape = {"region": 0, "shape": PageShape.plain(PAGE_TOKENS, PAGE_BYTES), "clock": time.monotonic, "settings": SETTINGS}
        self.writer = Writer(WRITER, {name: self.ends.writer}, [name], memories=[memoryview(self.ends.source.bytes)], **shape)
        me = Endpoint(READER.node, READER.incarnation, "r")
        self.reader = Reader(me, {name: self.ends.reader}, [name], memories=[memoryview(self.ends.target.bytes)], **shape)
        self.events: list[object] = []

    def open(self, pages: list[int], num_tokens: int, cached: int = 0) -> Ticket:
        return self.reader.open("r", 0, Endpoint(WRITER.node, WRITER.incarnation, "w"), pages, num_tokens, cached, 30.0)

    def step(self) -> None:
        self.ends.writer.arrivals()
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
    nodes.ends.close()


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
    assert nodes.count(Landed) == nodes.count(Acked) == len(plan) and nodes.count(GaveUp) == nodes.count(Failed) == 0
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
    assert nodes.count(Failed) == nodes.count(Reclaimed) == nodes.count(GaveUp) == nodes.count(Drained) == 3
    assert nodes.reader.quarantined_pages == 0

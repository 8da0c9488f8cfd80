"""Two nodes in one process: a Writer and a Reader over fake media, an injected clock, and control messages that arrive
when the test says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xxhash
from fake_backend import FakeBackend, FakeNetwork, Fault

from pdcluster.core.messages import Endpoint, NodeMessage, Ticket, TokenLogprobs
from pdcluster.transfer.backends.base import Arrival, Handle, Peer, Region, Stamp
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.layout.spans import CopyRuns, Spans
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

PAGE_TOKENS = 4
PAGE_BYTES = 64
NUM_PAGES = 64
WRITER = Peer("p0", "boot-p")
READER = Peer("d0", "boot-d")
QUICK = Settings(chunk_bytes=2 * PAGE_BYTES, window_bytes=8 * PAGE_BYTES, verify_bytes=4 * PAGE_BYTES)
LOGPROBS = TokenLogprobs(-0.5, (7,), (-0.5,))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Node:
    """Memory of one node, its ends of the networks."""

    def __init__(self, peer: Peer, networks: dict[str, FakeNetwork], seed: int) -> None:
        self.peer = peer
        self.memory = np.random.default_rng(seed).integers(0, 255, NUM_PAGES * PAGE_BYTES, dtype=np.uint8)
        self.backends = {name: FakeBackend(network, peer, name) for name, network in networks.items()}
        for backend in self.backends.values():
            backend.register(Region(0, self.memory.ctypes.data, self.memory.nbytes))

    def page(self, page: int) -> bytes:
        return self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes()

    def fill(self, page: int, value: int) -> None:
        self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = value


class Pair:
    """`inbox` holds control messages under way, (receiver, message); `deliver` hands over the oldest. checks_permits:
    of all media, or by name."""

    def __init__(
        self,
        plan: Callable[[Stamp], Fault] | None = None,
        *,
        media: Sequence[str] = ("fake",),
        plans: dict[str, Callable[[Stamp], Fault]] | None = None,
        checks_permits: bool | Mapping[str, bool] = True,
        settings: Settings = QUICK,
        num_layers: int = 1,
        on_land: Callable[[FakeBackend, Stamp, list[tuple[int, int]]], None] | None = None,
        writer_class: type[Writer] = Writer,
        reader_class: type[Reader] = Reader,
    ) -> None:
        self.clock = Clock()
        plans = plans if plans is not None else {}
        checks = dict.fromkeys(media, checks_permits) if isinstance(checks_permits, bool) else checks_permits
        self.networks = {
            name: FakeNetwork(self.clock, plan=plans.get(name, plan), checks_permits=checks[name], on_land=on_land)
            for name in media
        }
        self.source, self.target = Node(WRITER, self.networks, 1), Node(READER, self.networks, 2)
        shape = PageShape.plain(PAGE_TOKENS, PAGE_BYTES, num_layers)
        common = {"clock": self.clock, "settings": settings}
        self.writer = writer_class(
            WRITER,
            self.source.backends,
            media,
            local=LocalPages(0, shape, [memoryview(self.source.memory)]),
            block_tokens=PAGE_TOKENS,
            **common,
        )
        me = Endpoint(READER.node, READER.incarnation, "d0:1")
        self.reader = reader_class(
            me,
            self.target.backends,
            media,
            local=LocalPages(0, shape, [memoryview(self.target.memory)]),
            rng=random.Random(5),
            **common,
        )
        self.inbox: list[tuple[Peer, NodeMessage]] = []
        self.writer_events: list[object] = []
        self.reader_events: list[object] = []

    @property
    def network(self) -> FakeNetwork:
        return next(iter(self.networks.values()))

    def open(self, pages: Sequence[int], num_tokens: int, cached: int = 0, deadline_s: float = 30.0) -> Ticket:
        writer = Endpoint(WRITER.node, WRITER.incarnation, "p0:1")
        return self.reader.open("r1", 0, writer, pages, num_tokens, cached, deadline_s)

    def send_all(self, ticket: Ticket, pages: Sequence[int]) -> None:
        """Writer side of a ticket, everything at once."""
        self.writer.open(ticket)
        self.writer.push(ticket.nonce, pages, 0, ticket.num_tokens)
        self.writer.finish(ticket.nonce, 42, LOGPROBS)

    def poll(self) -> None:
        for end, events, peer in ((self.reader, self.reader_events, READER), (self.writer, self.writer_events, WRITER)):
            if peer in self.network.killed:
                continue  # a dead process does nothing
            for event in end.poll():
                if isinstance(event, Send):
                    self.inbox.append((Peer(event.to.node, event.to.incarnation), event.message))
                else:
                    events.append(event)
        self.reader.check_integrity()
        self.writer.check_integrity()

    def deliver(self, count: int | None = None) -> None:
        batch, self.inbox = self.inbox[:count], self.inbox[len(self.inbox) if count is None else count :]
        for receiver, message in batch:
            self.hand_over(receiver, message)

    def hand_over(self, receiver: Peer, message: NodeMessage) -> None:
        if receiver == READER:
            self.reader.handle(WRITER, message)
        elif receiver == WRITER:
            self.writer.handle(READER, message)

    def step(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.poll()
        self.deliver()

    def run(self, seconds: float, tick: float = 0.05) -> None:
        for _ in range(round(seconds / tick)):
            self.step(tick)

    def kill(self, peer: Peer) -> None:
        """Its process dies."""
        for network in self.networks.values():
            network.kill(peer)

    def close(self) -> None:
        for node in (self.source, self.target):
            for backend in node.backends.values():
                backend.shutdown()

    # what happened

    def of(self, *kinds: type) -> list[object]:
        return [event for event in self.writer_events + self.reader_events if isinstance(event, kinds)]

    @property
    def acked(self) -> list[object]:
        return self.of(Acked)

    @property
    def gave_up(self) -> list[object]:
        return self.of(TicketGaveUp)

    @property
    def drained(self) -> list[object]:
        return self.of(Drained)

    @property
    def landed(self) -> list[object]:
        return self.of(Landed)

    @property
    def failed(self) -> list[object]:
        return self.of(TicketFailed)

    @property
    def reclaimed(self) -> list[object]:
        return self.of(Reclaimed)


def take_digests(pair: Pair, change: Callable[[Arrival], Arrival] = lambda arrival: arrival) -> None:
    """Let the fake media digest what landed when they say so, as shm and tcp do; `change` spoils what they say."""
    for name in pair.networks:
        _take_digests(pair, pair.source.backends[name], pair.target.backends[name], change)


def _take_digests(pair: Pair, source: FakeBackend, target: FakeBackend, change: Callable[[Arrival], Arrival]) -> None:
    spans: dict[Stamp, tuple[tuple[int, int], ...]] = {}
    write, add = source.write, target._arrivals.add

    def noting(peer: Peer, near: int, far: int, stamp: Stamp, runs: CopyRuns, digests: bool = False) -> Handle:
        spans[stamp] = tuple((run.target, run.nbytes) for run in runs)
        return write(peer, near, far, stamp, runs, digests)

    def digesting(stamp: Stamp, digest: int | None = None, where: Spans = (), region: int = 0) -> None:
        where = spans[stamp]
        payload = b"".join(pair.target.memory[offset : offset + nbytes].tobytes() for offset, nbytes in where)
        arrival = change(Arrival(stamp, xxhash.xxh3_64(payload).intdigest(), where, region))
        add(arrival.stamp, arrival.digest, arrival.spans, arrival.region)

    source.write, target._arrivals.add = noting, digesting  # type: ignore[method-assign]

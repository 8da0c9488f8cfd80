"""A writer's and a reader's node of several ranks in one process: rank 0 has the session, every other rank its endpoint
on a thread of its own, with its own pool and its own backends, behind a real channel. Media are real."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from backend_ends import start
from transfer_memory import Memory
from transfer_peer import READER, WRITER

from pdcluster.core.messages import Endpoint, Ticket
from pdcluster.node.native.tensor_parallel.channel import RankChannel
from pdcluster.node.native.tensor_parallel.endpoint import RankEndpoint
from pdcluster.node.native.tensor_parallel.endpoint_client import LinkedMemories, RankLink
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.backends.ranked import RankedBackend
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import LocalPages, Send, Settings
from pdcluster.transfer.protocol.writer import Writer

NUM_PAGES, HEADS, LAYERS, PLANES, CELL = 24, 4, 3, 2, 32
SETTINGS = Settings(chunk_bytes=16 << 10, window_bytes=1 << 20, repeat_s=0.05, proof_s=0.01, arrival_s=5.0)


class RankNode:
    """waiting: endpoints of ranks above 0 do nothing until `go`."""

    def __init__(
        self, me: Peer, medium: str, ranks: int, page_tokens: int, *, waiting: bool = False, patience_s: float = 10.0
    ) -> None:
        self.me = me
        self.patience_s = patience_s
        self.shape = PageShape(page_tokens, LAYERS, PLANES, HEADS, CELL, ranks)
        self.memories = [Memory(NUM_PAGES * self.shape.page_bytes, rank) for rank in range(ranks)]
        self.lost: list[str] = []
        self.own = [start(medium, me) for _ in range(ranks)]
        for backend, memory in zip(self.own, self.memories, strict=True):
            backend.register(memory.region)
        self.far: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.links = [self._start_rank(rank) for rank in range(1, ranks)]
        if not waiting:
            self.go()
        ends: list[Backend] = [self.own[0], *(link.ends[medium] for link in self.links)]
        self.backend = RankedBackend(ends, 0)
        self.local = LocalPages(0, self.shape, [memoryview(self.memories[0].bytes)])

    def _start_rank(self, rank: int) -> RankLink:
        near, far = socket.socketpair()
        backend = self.own[rank]
        endpoint = RankEndpoint(
            RankChannel(far, send_s=5.0), {backend.name: backend}, memoryview(self.memories[rank].bytes)
        )
        self.far.append(far)
        self.threads.append(threading.Thread(target=endpoint.run, daemon=True))
        return RankLink(near, rank, {backend.name: backend.advert()}, self.lost.append, patience_s=self.patience_s)

    def go(self) -> None:
        for thread in self.threads:
            thread.start()

    def page(self, rank: int, page: int) -> np.ndarray:
        """[layer][plane][head][token][byte of the cell]"""
        shape = self.shape
        memory = self.memories[rank].bytes.reshape(NUM_PAGES, LAYERS, PLANES, shape.rank_heads, shape.page_tokens, CELL)
        return memory[page]

    def fill(self, pages: list[int], kv: np.ndarray) -> None:
        """kv: [token][layer][plane][head][byte of the cell], into every rank's share of these pages."""
        for rank, number, tokens in self._parts(pages, len(kv)):
            first, end = self.shape.heads_of(rank)
            part = kv[tokens, :, :, first:end]
            self.page(rank, pages[number])[..., : len(part), :] = part.transpose(1, 2, 3, 0, 4)

    def differs(self, pages: list[int], kv: np.ndarray) -> list[tuple[int, int]]:
        """(rank, number of the page) of what is not as `fill` would have it."""
        wrong = []
        for rank, number, tokens in self._parts(pages, len(kv)):
            first, end = self.shape.heads_of(rank)
            part = kv[tokens, :, :, first:end].transpose(1, 2, 3, 0, 4)
            if not (self.page(rank, pages[number])[..., : part.shape[3], :] == part).all():
                wrong.append((rank, number))
        return wrong

    def _parts(self, pages: list[int], num_tokens: int):
        size = self.shape.page_tokens
        for rank in range(self.shape.ranks):
            for number in range(len(pages)):
                tokens = slice(number * size, min((number + 1) * size, num_tokens))
                if tokens.start < num_tokens:
                    yield rank, number, tokens

    def close(self) -> None:
        self.backend.shutdown()
        for link in self.links:
            link.close()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(5.0)
        for backend in self.own[1:]:
            backend.shutdown()
        for sock in self.far:
            sock.close()
        for memory in self.memories:
            memory.drop()


class RankNodes:
    """Both nodes and the messages between them."""

    def __init__(
        self,
        medium: str,
        ranks: tuple[int, int],
        page_tokens: tuple[int, int] = (16, 16),
        *,
        waiting: bool = False,
        patience_s: float = 10.0,
    ) -> None:
        self.source = RankNode(WRITER, medium, ranks[0], page_tokens[0])
        self.target = RankNode(READER, medium, ranks[1], page_tokens[1], waiting=waiting, patience_s=patience_s)
        now = {"clock": time.monotonic, "settings": SETTINGS}
        self.writer = Writer(WRITER, {medium: self.source.backend}, [medium], local=self.source.local, **now)
        memories = LinkedMemories(self.target.local.memories[0], self.target.links)
        me = Endpoint(READER.node, READER.incarnation, "r")
        self.reader = Reader(
            me, {medium: self.target.backend}, [medium], ranks=memories, local=self.target.local, **now
        )
        self.events: list[object] = []
        self.pass_on: Callable[[Peer, object], bool] = lambda _to, _message: True

    def open(self, pages: list[int], num_tokens: int, cached: int = 0, deadline_s: float = 30.0) -> Ticket:
        return self.reader.open(
            "r", 0, Endpoint(WRITER.node, WRITER.incarnation, "w"), pages, num_tokens, cached, deadline_s
        )

    def send(self, ticket: Ticket, pages: list[int]) -> None:
        """All of it at once, as soon as the reader's ranks take it."""
        self.until(partial(self.reader.is_permitted, ticket.nonce))
        self.writer.open(ticket)
        self.writer.push(ticket.nonce, pages, 0, ticket.num_tokens)
        self.writer.finish(ticket.nonce, 5, None)

    def step(self) -> None:
        self.source.backend.arrivals()
        for end in (self.reader, self.writer):
            for event in end.poll():
                if isinstance(event, Send):
                    self._pass(Peer(event.to.node, event.to.incarnation), event.message)
                else:
                    self.events.append(event)

    def _pass(self, to: Peer, message: object) -> None:
        if self.pass_on(to, message):
            end, sender = (self.reader, WRITER) if to == READER else (self.writer, READER)
            end.handle(sender, message)  # type: ignore[union-attr,arg-type]

    def until(self, condition: Callable[[], object], limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, (self.events, self.source.lost, self.target.lost)
            self.step()
            time.sleep(0.0005)

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def close(self) -> None:
        self.source.close()
        self.target.close()


def random_kv(num_tokens: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_tokens, LAYERS, PLANES, HEADS, CELL), dtype=np.uint8)

"""The two processes of `bench.transfer`: `Near` pushes KV as a prefill node does, `Far` (a child process) takes it as a
decode node does.

Control messages go over a socket pair as length-prefixed msgpack, in the place of the nodes' ZMQ links. It measures
nothing itself.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.harness.rank_ends import RankProcess
from bench.parts import transfer_seam
from bench.parts.transfer_seam import Expect, Permitted, Seen
from pdcluster.core.messages import Abort, AbortAck, Commit, CommitAck, Endpoint, NodeMessage, Reserved, Ticket
from pdcluster.node.native.tensor_parallel.endpoint_client import LinkedMemories
from pdcluster.transfer.backends.base import Backend, Peer, Region
from pdcluster.transfer.backends.ranked import RankedBackend
from pdcluster.transfer.backends.shm import ShmBackend
from pdcluster.transfer.backends.staged.backend import StagedBackend
from pdcluster.transfer.backends.staged.staging import StagedSettings
from pdcluster.transfer.backends.tcp import DIGEST_BYTES, TcpBackend
from pdcluster.transfer.copying.copy import GilWaits, Payload, table_of
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import Acked, Drained, LocalPages, Send, Settings, TicketGaveUp, peer_of
from pdcluster.transfer.protocol.writer import Writer

if TYPE_CHECKING:
    from bench.parts.engine_steps import TimedEngine
    from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine

NEAR, FAR = Peer("bench-p", "near"), Peer("bench-d", "far")
PAGE_TOKENS = 32
LENGTH = struct.Struct("<I")
HOST = "127.0.0.1"
STAGING_BYTES = 32 << 20
MOONCAKE = "mooncake"
MOONCAKE_SETTINGS = StagedSettings(host=HOST)
# Of the bound of mooncake: block, bytes in it (0: the move is over), where in the reader's memory they go, whether they
# are digested.
LANDED = struct.Struct("<IIQ?")


class Ask(NodeMessage, frozen=True, array_like=True):
    """Please issue a ticket for so many tokens."""

    num_tokens: int


class Check(NodeMessage, frozen=True, array_like=True):
    """Please compare what the last ticket brought with `content`; the answer is an Address, with the number of wrong
    bytes."""


class Sink(NodeMessage, frozen=True, array_like=True):
    """Please listen on a socket and swallow so many bytes again and again until it closes, into the next place of a
    memory as large as the pool each time, and answer each; kind digested: with their digest. Or, for mooncake, be the
    reader of `bench.parts.mooncake_bound` with that memory."""

    kind: str
    nbytes: int
    repeats: int


class Address(NodeMessage, frozen=True, array_like=True):
    text: str
    number: int


class Decode(NodeMessage, frozen=True, array_like=True):
    """Please run an engine's steps in the reader's process, or stop and tell about them."""

    is_going: bool


class Decoded(NodeMessage, frozen=True, array_like=True):
    """When each step ended, by `time.perf_counter`; and by how many seconds more than a millisecond each sleep of a
    thread lasted meanwhile."""

    ends: list[float]
    stalls: list[float]


Control = (
    Commit | CommitAck | Abort | AbortAck | Ask | Check | Sink | Address | Reserved | Expect | Permitted | Seen
    | Decode | Decoded
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """How both ends are set up: the pages of each, in pools for so many tokens. processes: one for each rank, as nodes
    have them; otherwise each end is one process with the pools of all its ranks."""

    backend: str
    near: PageShape
    far: PageShape
    num_tokens: int
    digests: bool
    processes: bool = False
    is_sealed: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(digests=self.digests)

    @property
    def nbytes(self) -> int:
        """KV of all tokens."""
        return (
            self.num_tokens
            // self.near.page_tokens
            * self.near.planes
            * self.near.heads
            * self.near.head_bytes
            * self.near.num_layers
        )


def plain(backend: str, page_bytes: int, num_pages: int, *, digests: bool, is_sealed: bool = False) -> Shape:
    """Pages of so many bytes at both ends."""
    pages = PageShape.plain(PAGE_TOKENS, page_bytes)
    return Shape(backend, pages, pages, num_pages * PAGE_TOKENS, digests, is_sealed=is_sealed)


def scattered(shape: PageShape, pool_tokens: int, num_tokens: int, seed: int) -> list[int]:
    """Pages for so many tokens, in a scattered order but in runs of two, as a used pool gives them."""
    count, total = num_tokens // shape.page_tokens, pool_tokens // shape.page_tokens
    pairs = np.random.default_rng(seed).permutation(total // 2)[: -(-count // 2)]
    return [int(page) for pair in pairs for page in (2 * pair, 2 * pair + 1)][:count]


def content(shape: PageShape, num_tokens: int) -> NDArray[np.uint8]:
    """KV that both ends can tell: [layer][plane][head][token][cell], every byte at random."""
    size = (shape.num_layers, shape.planes, shape.heads, num_tokens, shape.cell_bytes)
    return np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)


def held(shape: PageShape, rank: int, pool: NDArray[np.uint8], pages: list[int]) -> NDArray[np.uint8]:
    """A rank's pages as they lie in its pool: [page][layer][plane][head][token][cell]."""
    size = (-1, shape.num_layers, shape.planes, shape.rank_heads, shape.page_tokens, shape.cell_bytes)
    return pool.reshape(size)[pages]


def dealt(shape: PageShape, rank: int, kv: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What a rank's pages hold of the content, in the same order."""
    layers, planes, _, tokens, cell = kv.shape
    own = kv[:, :, slice(*shape.heads_of(rank))].reshape(
        layers, planes, -1, tokens // shape.page_tokens, shape.page_tokens, cell
    )
    return own.transpose(3, 0, 1, 2, 4, 5)


class Pipe:
    """Control messages over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = msgspec.msgpack.Decoder(Control)

    def send(self, message: NodeMessage) -> None:
        data = msgspec.msgpack.encode(message)
        self.sock.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> Control | None:
        """The next message, waiting for it; None at the end."""
        head = self.sock.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(head) < LENGTH.size:
            return None
        message: Control = self._decoder.decode(self.sock.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL))
        return message

    def is_ready(self) -> bool:
        return bool(select.select([self.sock], [], [], 0)[0])


class Pool:
    """Shared memory that is touched already; `bytes` is a numpy view of it."""

    def __init__(self, nbytes: int, region: int = 0) -> None:
        self.fd = os.memfd_create("pdcluster-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)
        self.bytes[::4096] = 1
        self.region = Region(region, self.bytes.ctypes.data, nbytes, self.fd)


@dataclass(frozen=True, slots=True)
class End:
    """One end's media and memory. ranks: processes of those above 0, if they have any; memories: of the pools that are
    this process's to digest."""

    pools: list[Pool]
    backend: Backend
    memories: list[memoryview]
    ranks: list[RankProcess]

    def close(self) -> None:
        self.backend.shutdown()
        for rank in self.ranks:
            rank.close()
        for pool in self.pools:
            os.close(pool.fd)


def start_end(shape: Shape, pages: PageShape, me: Peer) -> End:
    """pages: of this end. One pool per rank."""
    nbytes = shape.num_tokens // pages.page_tokens * pages.page_bytes
    pools = [Pool(nbytes, rank) for rank in range(pages.ranks)]
    own = pools[:1] if shape.processes else pools
    backend: Backend = create_backends(
        shape.backend, me, host=HOST, staging_bytes=STAGING_BYTES, is_sealed=shape.is_sealed
    )[shape.backend]
    for pool in own:
        backend.register(pool.region)
    ranks = [RankProcess(shape.backend, HOST, STAGING_BYTES, me, pool) for pool in pools[len(own) :]]
    if shape.processes:
        backend = RankedBackend((backend, *(rank.link.ends[shape.backend] for rank in ranks)), 0)
    return End(pools, backend, [pool.bytes.data for pool in own], ranks)


def wait_for(sock: socket.socket, backend: Backend, deadline: float | None) -> None:
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    select.select([sock.fileno(), backend.wakeup_fd], [], [], timeout)


# ---------------------------------------------------------------- far: a process of its own


class Far:
    """The reader's loop: tickets when asked for, then what its Reader says."""

    def __init__(self, shape: Shape, pipe: Pipe) -> None:
        self._shape, self._pipe = shape, pipe
        self._end = start_end(shape, shape.far, FAR)
        self._pools, self._backend = self._end.pools, self._end.backend
        self._reader = Reader(
            Endpoint(FAR.node, FAR.incarnation, "bench"),
            {shape.backend: self._backend},
            (shape.backend,),
            local=LocalPages(0, shape.far, self._end.memories),
            clock=time.monotonic,
            settings=shape.settings,
            ranks=LinkedMemories(self._end.memories[0], [rank.link for rank in self._end.ranks])
            if self._end.ranks
            else None,
        )
        self._count = 0
        self._pages: list[int] = []

    def run(self) -> None:
        while True:
            if self._pipe.is_ready():  # the inbox first, as a node's loop has it
                message = self._pipe.receive()
                if message is None:
                    break
                self._answer(message)
            for event in self._reader.poll():
                if isinstance(event, Send):
                    self._pipe.send(event.message)
            wait_for(self._pipe.sock, self._backend, self._reader.next_deadline())
        self._end.close()

    def _answer(self, message: Control) -> None:
        if isinstance(message, Ask):
            self._count += 1
            self._pages = scattered(self._shape.far, self._shape.num_tokens, message.num_tokens, 2 * self._count)
            writer = Endpoint(NEAR.node, NEAR.incarnation, "bench")
            ticket = self._reader.open(f"r{self._count}", 0, writer, self._pages, message.num_tokens, 0, 60.0)
            while not self._reader.is_permitted(ticket.nonce):
                wait_for(self._pipe.sock, self._backend, self._reader.next_deadline())
                self._reader.poll()
            self._pipe.send(Reserved(ticket))
        elif isinstance(message, Commit | AbortAck):
            self._reader.handle(NEAR, message)
        elif isinstance(message, Expect):
            self._count += 1
            self._pages = scattered(self._shape.far, self._shape.num_tokens, message.num_tokens, 2 * self._count)
            permitted = transfer_seam.permit(
                self._backend, self._shape.far, self._pages, NEAR, digests=self._shape.digests
            )
            self._pipe.send(permitted)
            self._pipe.send(
                transfer_seam.await_arrivals(self._backend, permitted, len(self._pages) * self._shape.far.page_bytes)
            )
        elif isinstance(message, Sink):
            swallow(self._pipe, message, self._spare)
        elif isinstance(message, Check):
            self._pipe.send(Address("wrong bytes", self._wrong_bytes()))
        elif isinstance(message, Decode):
            if message.is_going:
                self._decoding.begin()
            else:
                self._pipe.send(Decoded(*self._decoding.end()))

    @functools.cached_property
    def _decoding(self) -> TimedEngine:
        from bench.parts.engine_steps import TimedEngine

        return TimedEngine()

    @functools.cached_property
    def _spare(self) -> Pool:
        """Memory as large as all pools, for ceilings."""
        return Pool(self._shape.nbytes)

    def _wrong_bytes(self) -> int:
        far = self._shape.far
        kv = content(far, len(self._pages) * far.page_tokens)
        found = (held(far, rank, pool.bytes, self._pages) for rank, pool in enumerate(self._pools))
        return sum(int(np.count_nonzero(pages != dealt(far, rank, kv))) for rank, pages in enumerate(found))


def swallow(pipe: Pipe, message: Sink, memory: Pool) -> None:
    """The receiving side of a ceiling."""
    if message.kind == MOONCAKE:
        serve_mooncake(pipe, memory)
        return
    buffer = memory.bytes
    server = socket.create_server((HOST, 0))
    threading.Thread(target=swallow_from, args=(server, message, buffer), name="bench-ceiling", daemon=True).start()
    pipe.send(Address(HOST, server.getsockname()[1]))


def swallow_from(server: socket.socket, message: Sink, buffer: NDArray[np.uint8]) -> None:
    """A thread that waits in the kernel while transfers are measured, as the loop does while this is."""
    with server, server.accept()[0] as sock:
        for start in itertools.cycle(range(0, buffer.size - message.nbytes + 1, message.nbytes)):
            view = buffer.data[start : start + message.nbytes]
            answer = (
                received_digest(sock, view, buffer[start:].ctypes.data)
                if message.kind == "digested"
                else received(sock, view)
            )
            if not answer:
                return
            sock.send(answer)


def serve_mooncake(pipe: Pipe, memory: Pool) -> None:
    """A thread that waits in the kernel while transfers are measured."""
    from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine

    engine, ring = MooncakeEngine(MOONCAKE_SETTINGS), Pool(MOONCAKE_SETTINGS.blocks * MOONCAKE_SETTINGS.block_bytes)
    for each in (ring, memory):
        engine.register(each.bytes.ctypes.data, each.bytes.size)
    server = socket.create_server((HOST, 0))
    threading.Thread(
        target=copy_what_lands, args=(server, engine, ring, memory), name="bench-ceiling", daemon=True
    ).start()
    pipe.send(Address(HOST, server.getsockname()[1]))
    pipe.send(Address(engine.session, ring.bytes.ctypes.data))
    pipe.send(Address(engine.session, memory.bytes.ctypes.data))


def copy_what_lands(server: socket.socket, engine: MooncakeEngine, ring: Pool, memory: Pool) -> None:
    """The reader's side, until the writer closes."""
    digested, payload = True, Payload(table_of(()), digests=True, of_copy=True)
    with server, server.accept()[0] as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(said := sock.recv(LANDED.size, socket.MSG_WAITALL)) == LANDED.size:
            block, nbytes, start, digests = LANDED.unpack(said)
            if nbytes:
                if digests != digested:
                    digested, payload = digests, Payload(table_of(()), digests=digests, of_copy=True)
                landed = ring.bytes.ctypes.data + block * MOONCAKE_SETTINGS.block_bytes
                payload.extend(table_of([(memory.bytes.ctypes.data + start, landed, nbytes)]))
                payload.advance(nbytes)
                sock.send(b"k")
            else:
                sock.send(payload.digest().to_bytes(8, "little"))
                payload = Payload(table_of(()), digests=True, of_copy=True)
    engine.unregister(memory.bytes.ctypes.data, memory.bytes.size)
    engine.close()
    os.close(ring.fd)


def received(sock: socket.socket, view: memoryview) -> bytes:
    """Nothing when the connection is over."""
    while view:
        if not (count := sock.recv_into(view)):
            return b""
        view = view[count:]
    return b"k"


def received_digest(sock: socket.socket, view: memoryview, address: int) -> bytes:
    """Receive and digest each piece, as `tcp` does."""
    payload = digest_only(address, len(view))
    while view:
        piece, view = view[:DIGEST_BYTES], view[DIGEST_BYTES:]
        if not received(sock, piece):
            return b""
        payload.advance(len(piece))
    return payload.digest().to_bytes(8, "little")


def digest_only(address: int, nbytes: int) -> Payload:
    return Payload(table_of([(0, address, nbytes)]), digests=True, cached=True)


# ---------------------------------------------------------------- near


class Near:
    """The writer's loop, and the child process behind it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        here, there = socket.socketpair()
        arguments = [str(there.fileno()), msgspec.json.encode(shape).decode()]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.parts.transfer_ends", *arguments], pass_fds=[there.fileno()]
        )
        there.close()
        self.pipe = Pipe(here)
        self._end = start_end(shape, shape.near, NEAR)
        self.pools, self._backend = self._end.pools, self._end.backend
        noise = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        for pool in self.pools:
            np.copyto(pool.bytes, np.resize(noise, pool.bytes.size))
        self._writer = Writer(
            NEAR,
            {shape.backend: self._backend},
            (shape.backend,),
            local=LocalPages(0, shape.near, self._end.memories),
            clock=time.monotonic,
            settings=shape.settings,
        )
        self._count = 0
        # Of the last `move`, seconds until its writes were with the medium's threads, until its Commit went out, until
        # its CommitAck came.
        self.stages = (0.0, 0.0, 0.0)

    @functools.cached_property
    def spare(self) -> Pool:
        """Memory like the first pool's, for ceilings."""
        return Pool(self.pools[0].bytes.size)

    @property
    def child_pid(self) -> int:
        return self._child.pid

    @property
    def gil_waits(self) -> GilWaits:
        assert isinstance(self._backend, ShmBackend | TcpBackend | StagedBackend)
        return self._backend.gil_waits

    def move(self, num_tokens: int) -> float:
        """Seconds from the ticket's arrival here to its CommitAck."""
        return self._move(num_tokens, self._next_pages(num_tokens))

    def move_alone(self, num_tokens: int) -> float:
        """The same without the protocol, see `transfer_seam`. Of plain pages."""
        return self._move_alone(num_tokens, self._next_pages(num_tokens))

    def _move_alone(self, num_tokens: int, sources: list[int]) -> float:
        self.pipe.send(Expect(num_tokens))
        permitted = self.pipe.receive()
        assert isinstance(permitted, Permitted)
        chunks = transfer_seam.chunks_of(self.shape.near, self.shape.settings, sources, permitted.pages)
        begin, done = transfer_seam.write_all(self._backend, FAR, permitted, chunks, self.shape.settings)
        seen = self.pipe.receive()
        assert isinstance(seen, Seen)
        return max(done, seen.at) - begin

    def wrong_bytes(self, *, alone: bool = False) -> int:
        """Move KV that the other end can tell, over the whole pool, and count there what came out wrong. alone: without
        the protocol."""
        near, num_tokens = self.shape.near, self.shape.num_tokens
        pages, kv = self._next_pages(num_tokens), content(near, num_tokens)
        for rank, pool in enumerate(self.pools):
            size = (-1, near.num_layers, near.planes, near.rank_heads, near.page_tokens, near.cell_bytes)
            pool.bytes.reshape(size)[pages] = dealt(near, rank, kv)
        if alone:
            self._move_alone(num_tokens, pages)
        else:
            self._move(num_tokens, pages)
        return self.count_wrong()

    def count_wrong(self) -> int:
        """Bytes at the other end that are not those of `content`, where the last ticket's tokens lie."""
        self.pipe.send(Check())
        answer = self.pipe.receive()
        assert isinstance(answer, Address)
        return answer.number

    def _next_pages(self, num_tokens: int) -> list[int]:
        self._count += 1
        return scattered(self.shape.near, self.shape.num_tokens, num_tokens, 2 * self._count + 1)

    def _move(self, num_tokens: int, pages: list[int]) -> float:
        self.pipe.send(Ask(num_tokens))
        answer = self.pipe.receive()
        if not isinstance(answer, Reserved):
            raise RuntimeError(f"the reader process answered {answer!r} instead of a ticket")
        begin = time.perf_counter()
        started, committed = self._push(answer.ticket, pages)
        end = time.perf_counter()
        self.stages = (started - begin, committed - started, end - committed)
        return end - begin

    def _push(self, ticket: Ticket, pages: list[int]) -> tuple[float, float]:
        """Returns when its writes were with the medium's threads, and when its Commit went out."""
        started = committed = 0.0
        self._writer.open(ticket)
        self._writer.push(ticket.nonce, pages, 0, ticket.num_tokens)
        self._writer.finish(ticket.nonce, 1, None)
        ended = False
        while not ended:
            if self.pipe.is_ready():  # the inbox first, as a node's loop has it
                message = self.pipe.receive()
                if not isinstance(message, CommitAck | Abort):
                    raise RuntimeError(f"the reader process said {message!r} in the middle of a transfer")
                self._writer.handle(peer_of(ticket.reader), message)
            self._backend.arrivals()  # clears the doorbell
            for event in self._writer.poll():
                if isinstance(event, Send):
                    committed = time.perf_counter()
                    self.pipe.send(event.message)
                elif isinstance(event, TicketGaveUp):
                    raise RuntimeError(f"the transfer failed: {event.reason}")
                ended = ended or isinstance(event, Drained)
                assert not isinstance(event, Acked) or event.nonce == ticket.nonce
            started = started or time.perf_counter()
            if not ended:
                wait_for(self.pipe.sock, self._backend, self._writer.next_deadline())
        return started, committed

    def close(self) -> None:
        self.pipe.sock.close()
        self._end.close()
        if "spare" in self.__dict__:
            os.close(self.spare.fd)
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def main() -> None:
    fd, shape = sys.argv[1:]
    Far(msgspec.json.decode(shape, type=Shape), Pipe(socket.socket(fileno=int(fd)))).run()


if __name__ == "__main__":
    main()

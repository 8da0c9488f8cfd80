"""What a transfer over Mooncake can come to, whoever writes the protocol: its engine, one copy at the reader, the
digests. For `bench.transfer`.

The medium cannot fence, so what it wrote is copied once more by the reader, and both ends digest. This does that and
nothing else: no tickets, permits, frames or pages; a few bytes say which block landed, one byte that it was copied.
Blocks are as large and as many as the product's. Of the engine alone blocks go straight to their places, eight at a
time, as nobody has to copy them.

Beside it, how much of each end's core the engine alone takes: of a core that is full, whatever else is done there is
missing from the rate. RDMA would leave that core to the digest, as the adapter reads the memory; the copy at the reader
would stay.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.harness.report import Row, row
from bench.parts.transfer_ends import LANDED, MOONCAKE, MOONCAKE_SETTINGS, Address, Near, Pool, Sink
from pdcluster.transfer.backends.base import WriteStatus
from pdcluster.transfer.backends.staged.staging import ENTRY_BYTES
from pdcluster.transfer.backends.tcp_links import send_unpaced
from pdcluster.transfer.copying.copy import Payload, table_of

if TYPE_CHECKING:
    from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine

BLOCK_BYTES, BLOCKS, FLYING = MOONCAKE_SETTINGS.block_bytes, MOONCAKE_SETTINGS.blocks, MOONCAKE_SETTINGS.flying
FLYING_ALONE = 8
RUN_BYTES = 128 << 10
LOOK_S = 0.0001


@dataclass(frozen=True, slots=True)
class Way:
    """How the bytes go. copies: by the reader, from its ring; digests: at both ends; gathered: made of runs of 128 KiB
    first, as pages of 64 KiB in pairs need it."""

    metric: str
    what: str
    copies: bool = False
    digests: bool = False
    gathered: bool = False


ALONE = Way("", "engine alone")
STRAIGHT = Way("bound.mooncake", "engine, a copy at the reader, digests", copies=True, digests=True)
GATHERED = Way("gathered.mooncake", "engine, a copy at each end, digests", copies=True, digests=True, gathered=True)
WAYS = (
    STRAIGHT,
    GATHERED,
    Way("copied.mooncake", "engine, a copy at the reader", copies=True),
    Way("staging.mooncake", "engine, a copy at the writer", gathered=True),
)


def bound_of(page_bytes: int) -> Way:
    """What the product does with pages of such a size."""
    return STRAIGHT if page_bytes >= ENTRY_BYTES else GATHERED


@dataclass(slots=True)
class Move:
    """One run of the writer's side. source: where the bytes lie; staging: where they are gathered, if they are; target,
    ring: the reader's."""

    sock: socket.socket
    engine: MooncakeEngine
    session: str
    way: Way
    source: int
    staging: int
    target: int
    ring: int
    left: deque[tuple[int, int]]
    free: list[int]
    flying: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    copying: deque[int] = field(default_factory=deque)

    def run(self, start: int) -> None:
        """start: where in the reader's memory the bytes go."""
        payload = Payload(table_of(()), digests=self.way.digests, cached=True)
        most = FLYING if self.way.copies else FLYING_ALONE
        while self.left or self.flying or self.copying:
            while self.left and self.free and len(self.flying) < most:
                self._submit(payload, *self.left.popleft())
            while self.flying and self._is_done(self.flying[0][0]):
                self._landed(start, *self.flying.popleft()[1:])
            self._take_answers()
        if self.way.digests:
            self._compare(payload)

    def _submit(self, payload: Payload, offset: int, nbytes: int) -> None:
        block, source = self.free.pop(0), self.source + offset
        if self.way.gathered:
            begin, source = source, self.staging + block * BLOCK_BYTES
            payload.extend(
                table_of((source + at, begin + at, min(RUN_BYTES, nbytes - at)) for at in range(0, nbytes, RUN_BYTES))
            )
        else:
            payload.extend(table_of([(0, source, nbytes)]))
        if self.way.digests or self.way.gathered:
            payload.advance(nbytes)
        target = self.ring + block * BLOCK_BYTES if self.way.copies else self.target + offset
        batch = self.engine.submit(self.session, source, target, nbytes)
        if batch is None:
            raise RuntimeError("Mooncake refused a write of the bound")
        self.flying.append((batch, block, offset, nbytes))

    def _is_done(self, batch: int) -> bool:
        status = self.engine.check(batch)
        if status not in (WriteStatus.DONE, WriteStatus.PENDING):
            raise RuntimeError("Mooncake failed a write of the bound")
        return status is WriteStatus.DONE

    def _landed(self, start: int, block: int, offset: int, nbytes: int) -> None:
        if self.way.copies:
            self.sock.sendall(LANDED.pack(block, nbytes, start + offset, self.way.digests))
            self.copying.append(block)
        else:
            self.free.append(block)

    def _take_answers(self) -> None:
        """Those that came; wait for one only when the engine has nothing."""
        if self.copying and select.select([self.sock], [], [], 0 if self.flying else None)[0]:
            answers = self.sock.recv(len(self.copying))
            if not answers:
                raise RuntimeError("the reader of the bound ended")
            for _ in answers:
                self.free.append(self.copying.popleft())
        elif self.flying:
            time.sleep(LOOK_S)

    def _compare(self, payload: Payload) -> None:
        self.sock.sendall(LANDED.pack(0, 0, 0, True))
        if self.sock.recv(8, socket.MSG_WAITALL) != payload.digest().to_bytes(8, "little"):
            raise RuntimeError("the two ends of the bound digested different bytes")


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process used, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)


class Bench:
    """An engine at each end, for as many moves as one likes. shares: of each move of the engine alone, the parts of a
    core that the writer's and the reader's process had."""

    def __init__(self, near: Near) -> None:
        from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine

        near.pipe.send(Sink(MOONCAKE, 0, 0))
        link, ring, memory = (_address(near) for _ in range(3))
        self._near, self._ring, self._memory = near, ring, memory
        self._sock = socket.create_connection((link.text, link.number))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_unpaced(self._sock)
        self._engine = MooncakeEngine(MOONCAKE_SETTINGS)
        self._staging = Pool(BLOCKS * BLOCK_BYTES)
        self.shares: list[tuple[float, float]] = []

    def seconds(self, nbytes: int, way: Way, places: Iterable[int]) -> Generator[float]:
        """Of one move after the other, each when it is asked for. places: in both ends' memory, of its bytes."""
        for start in places:
            pids = os.getpid(), self._near.child_pid
            before, begin = [cpu_s(pid) for pid in pids], time.perf_counter()
            self._move(nbytes, start, way)
            took = time.perf_counter() - begin
            if way is ALONE:
                near_s, far_s = (cpu_s(pid) - used for pid, used in zip(pids, before, strict=True))
                self.shares.append((near_s / took, far_s / took))
            yield took

    def _move(self, nbytes: int, start: int, way: Way) -> None:
        left = deque((offset, min(BLOCK_BYTES, nbytes - offset)) for offset in range(0, nbytes, BLOCK_BYTES))
        source, blocks = (
            self._near.pools[0].bytes.ctypes.data + start,
            FLYING_ALONE if not (way.copies or way.gathered) else BLOCKS,
        )
        move = Move(
            self._sock,
            self._engine,
            self._ring.text,
            way,
            source,
            self._staging.bytes.ctypes.data,
            self._memory.number + start,
            self._ring.number,
            left,
            list(range(blocks)),
        )
        move.run(start)

    def core_rows(self, label: str) -> list[Row]:
        ends = zip(("writer", "reader"), zip(*self.shares, strict=True), strict=True)
        return [row("core.mooncake", f"{label}, engine alone, the {end}'s", shares, "cores") for end, shares in ends]

    def close(self) -> None:
        self._sock.close()
        self._engine.close()
        os.close(self._staging.fd)


def _address(near: Near) -> Address:
    answer = near.pipe.receive()
    assert isinstance(answer, Address)
    return answer

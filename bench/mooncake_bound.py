"""What a transfer over Mooncake can come to, whoever writes the protocol: its engine, one copy at the reader, the digests. For `bench.transfer`.

The medium cannot fence, so what it wrote is copied once more by the reader, and both ends digest. This does that and nothing else: no tickets,
permits, frames or pages; 16 bytes say which block landed, one byte that it was copied. Blocks are as large and as many as the product's. straight:
sent from where they lie. gathered: made of runs of 128 KiB first, as pages of 64 KiB in pairs need it. Beside it, how much of each end's core the
engine alone takes: of a core that is full, whatever else is done there is missing from the rate.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import struct
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.report import Row, row
from bench.transfer_ends import HOST, Address, Near, Pipe, Pool, Sink
from pdcluster.transfer.base import WriteStatus
from pdcluster.transfer.moving import Payload, table_of
from pdcluster.transfer.staging import StagedSettings

if TYPE_CHECKING:
    from pdcluster.transfer.mooncake import MooncakeEngine

KIND = "mooncake and a copy"
SETTINGS = StagedSettings(host=HOST)
BLOCK_BYTES, BLOCKS, FLYING = SETTINGS.block_bytes, SETTINGS.blocks, SETTINGS.flying
RUN_BYTES = 128 << 10
LANDED = struct.Struct("<IIQ")
"""block, bytes in it (0: the move is over), where in the reader's memory they go."""
END = LANDED.pack(0, 0, 1)
LOOK_S = 0.0001


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process used, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)


def copy_what_lands(pipe: Pipe, memory: Pool) -> None:
    """The reader's side, until it is told to stop."""
    from pdcluster.transfer.mooncake import MooncakeEngine

    engine, ring = MooncakeEngine(SETTINGS), Pool(BLOCKS * BLOCK_BYTES)
    engine.register(ring.bytes.ctypes.data, ring.bytes.size)
    pipe.send(Address(engine.session, ring.bytes.ctypes.data))
    payload = Payload(table_of(()), digests=True, of_copy=True)
    while (said := pipe.sock.recv(LANDED.size, socket.MSG_WAITALL)) != END:
        block, nbytes, start = LANDED.unpack(said)
        if nbytes:
            payload.extend(table_of([(memory.bytes.ctypes.data + start, ring.bytes.ctypes.data + block * BLOCK_BYTES, nbytes)]))
            payload.advance(nbytes)
            pipe.sock.send(b"k")
        else:
            pipe.sock.send(payload.digest().to_bytes(8, "little"))
            payload = Payload(table_of(()), digests=True, of_copy=True)
    engine.close()


@dataclass(frozen=True, slots=True)
class Way:
    """How the bytes go. copies: digested, and copied by the reader; gathered: see module."""

    name: str
    copies: bool
    gathered: bool = False


ALONE = Way("alone", copies=False)
WAYS = (Way("straight", copies=True), Way("gathered", copies=True, gathered=True))


@dataclass(slots=True)
class Move:
    """One run of the writer's side. source: where the bytes lie; staging: where they are gathered, if they are."""

    pipe: Pipe
    engine: MooncakeEngine
    far: Address
    way: Way
    source: int
    staging: int
    left: deque[tuple[int, int]]
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    flying: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    copying: deque[int] = field(default_factory=deque)
    payload: Payload = field(default_factory=lambda: Payload(table_of(()), digests=True, cached=True))

    def run(self, target: int) -> None:
        while self.left or self.flying or self.copying:
            while self.left and self.free and len(self.flying) < FLYING:
                self._submit(*self.left.popleft())
            while self.flying and self._is_done(self.flying[0][0]):
                self._landed(target, *self.flying.popleft()[1:])
            self._take_answers()
        if self.way.copies:
            self._compare_digests()

    def _submit(self, offset: int, nbytes: int) -> None:
        block, source = self.free.pop(0), self.source + offset
        if self.way.gathered:
            source = self.staging + block * BLOCK_BYTES
            runs = range(0, nbytes, RUN_BYTES)
            self.payload.extend(table_of((source + at, self.source + offset + at, min(RUN_BYTES, nbytes - at)) for at in runs))
        else:
            self.payload.extend(table_of([(0, source, nbytes)]))
        if self.way.copies:
            self.payload.advance(nbytes)
        batch = self.engine.submit(self.far.text, source, self.far.number + block * BLOCK_BYTES, nbytes)
        if batch is None:
            raise RuntimeError("Mooncake refused a write of the bound")
        self.flying.append((batch, block, offset, nbytes))

    def _is_done(self, batch: int) -> bool:
        status = self.engine.check(batch)
        if status not in (WriteStatus.DONE, WriteStatus.PENDING):
            raise RuntimeError("Mooncake failed a write of the bound")
        return status is WriteStatus.DONE

    def _landed(self, target: int, block: int, offset: int, nbytes: int) -> None:
        if self.way.copies:
            self.pipe.sock.sendall(LANDED.pack(block, nbytes, target + offset))
            self.copying.append(block)
        else:
            self.free.append(block)

    def _take_answers(self) -> None:
        """Those that came; wait for one only when the engine has nothing."""
        if self.copying and select.select([self.pipe.sock], [], [], 0 if self.flying else None)[0]:
            answers = self.pipe.sock.recv(len(self.copying))
            if not answers:
                raise RuntimeError("the reader of the bound ended")
            for _ in answers:
                self.free.append(self.copying.popleft())
        elif self.flying:
            time.sleep(LOOK_S)

    def _compare_digests(self) -> None:
        self.pipe.sock.sendall(LANDED.pack(0, 0, 0))
        if self.pipe.sock.recv(8, socket.MSG_WAITALL) != self.payload.digest().to_bytes(8, "little"):
            raise RuntimeError("the two ends of the bound digested different bytes")


@dataclass(frozen=True, slots=True)
class Ran:
    """Seconds of some moves, and how much of a core the writer's and the reader's process had meanwhile."""

    seconds: list[float]
    near_share: float
    far_share: float


class Bench:
    """Both engines, for as many moves as one likes."""

    def __init__(self, near: Near) -> None:
        from pdcluster.transfer.mooncake import MooncakeEngine

        near.pipe.send(Sink(KIND, 0, 0))
        far = near.pipe.receive()
        assert isinstance(far, Address)
        self._near, self._far, self._engine = near, far, MooncakeEngine(SETTINGS)

    def run(self, nbytes: int, repeats: int, way: Way) -> Ran:
        self._move(nbytes, 0, way)  # connections and page tables
        pids = os.getpid(), self._near.child_pid
        before, begin = [cpu_s(pid) for pid in pids], time.perf_counter()
        seconds = [self._move(nbytes, index + 1, way) for index in range(repeats)]
        wall = time.perf_counter() - begin
        near_share, far_share = ((cpu_s(pid) - used) / wall for pid, used in zip(pids, before, strict=True))
        return Ran(seconds, near_share, far_share)

    def _move(self, nbytes: int, index: int, way: Way) -> float:
        pool, staging = self._near.pools[0].bytes, self._near.spare.bytes
        start = index * nbytes % (pool.size - nbytes + 1)
        left = deque((offset, min(BLOCK_BYTES, nbytes - offset)) for offset in range(0, nbytes, BLOCK_BYTES))
        begin = time.perf_counter()
        Move(self._near.pipe, self._engine, self._far, way, pool.ctypes.data + start, staging.ctypes.data, left).run(start)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._near.pipe.sock.sendall(END)
        self._engine.close()


def rows(near: Near, label: str, nbytes: int, repeats: int) -> list[Row]:
    """In turns, after one of each that does not count."""
    bench = Bench(near)
    try:
        ran = [(bench.run(nbytes, 1, ALONE), [bench.run(nbytes, 1, way) for way in WAYS]) for _ in range(repeats)]
    finally:
        bench.close()
    alone = [each for each, _ in ran]
    top = nbytes / statistics.median(each.seconds[0] for each in alone) / 1e9
    found = [
        row("core.mooncake", f"{label}, engine alone, the {end}'s", [getattr(each, f"{name}_share") for each in alone], "cores")
        for end, name in (("writer", "near"), ("reader", "far"))
    ]
    for index, way in enumerate(WAYS):
        rates = [nbytes / ways[index].seconds[0] / 1e9 for _, ways in ran]
        bound = row("bound.mooncake", f"{label}, engine, digests, a copy at the reader, {way.name}", rates, "GB/s", against="engine alone")
        ratio = statistics.median(one.seconds[0] / ways[index].seconds[0] for one, ways in ran)
        found.append(replace(bound, against_value=top, ratio=ratio))
    return found

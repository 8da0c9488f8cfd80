"""What a staged backend (`staged`) asks of a transfer library, and the memory that such a library may write: never the KV pool, only these blocks."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Protocol

from pdcluster.transfer.backends.base import WriteStatus


@dataclass(frozen=True, slots=True)
class Fabric:
    """RDMA hardware that the user named, passed through to the library. devices: such as mlx5_0 or mlx5_0:1; none: no RDMA. rails: over how many
    of them one write may be spread. Not run on hardware."""

    devices: tuple[str, ...] = ()
    gid_index: int | None = None
    rails: int | None = None


@dataclass(frozen=True, slots=True)
class StagedSettings:
    """block_bytes, blocks: shape of each ring. flying: of its blocks, most that the library has under way for a peer. unknown_s: engine writes
    without an answer for so long count as unknown. awake_s: how often a reader is told that a write to it is under way, if its engine needs that."""

    host: str = "127.0.0.1"
    block_bytes: int = 4 << 20
    blocks: int = 5
    flying: int = 3
    connect_s: float = 2.0
    progress_s: float = 5.0
    retry_s: float = 1.0
    unknown_s: float = 10.0
    awake_s: float = 0.005
    fabric: Fabric = field(default_factory=Fabric)


class Engine(Protocol):
    """One instance of the library, shared by all connections of a backend; every method may be called from any thread. Errors are OSErrors."""

    needs_calls: bool
    """Writes to this process go on only while it calls the library, so that the other end must say when (`expect`)."""
    reads_anywhere: bool
    """It sends from memory that nobody registered, as sockets can, so that a write need not be gathered in staging, and it is to be asked for a write
    until it says that it ended. Memory is not registered for that: whoever is registered may be written, too."""

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the library. It stays mapped for the life of the process."""

    def unregister(self, address: int, nbytes: int) -> None:
        """No new writes from or to it. A write that is under way may still touch it."""

    def grant(self, address: int, nbytes: int) -> bytes:
        """What another process's `meet` needs in order to write to this registered memory."""

    def meet(self, grant: bytes) -> str:
        """Prepare writing to where the grant comes from; returns its name for `submit` and `part`."""

    def part(self, far: str) -> None:
        """The opposite of one `meet`."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        """Start a write; its id, or None when it was refused and nothing was sent."""

    def check(self, batch: int) -> WriteStatus:
        """PENDING, DONE, LOST (it ended and reads its source no more, but may still land) or UNKNOWN. An id is not used again after DONE and LOST;
        after UNKNOWN only if the engine `reads_anywhere`."""

    def expect(self) -> None:
        """A peer says that a write of its to this process is under way."""

    def close(self) -> None:
        """End its threads and sockets. Nobody may use it any more."""


class Blocks:
    """Registered staging memory of one connection. Retired blocks stay mapped, because the library may touch them after it gave up; their memory
    is given back to the system."""

    _retired: list[mmap.mmap] = []  # noqa: RUF012  mapped for the life of the process

    def __init__(self, engine: Engine, blocks: int, block_bytes: int) -> None:
        self._engine = engine
        self.block_bytes = block_bytes
        self.nbytes = blocks * block_bytes
        self._memory = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        engine.register(self.address, self.nbytes)

    def at(self, block: int) -> int:
        return self.address + block * self.block_bytes

    def retire(self) -> None:
        Blocks._retired.append(self._memory)  # first: it stays mapped whatever the library says now
        self._engine.unregister(self.address, self.nbytes)
        self._memory.madvise(mmap.MADV_DONTNEED)

"""What a staged backend asks of a transfer library, and the memory that such a library may write: only these blocks,
never the KV pool.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import DECODE_ERRORS, WriteStatus
from pdcluster.transfer.backends.tcp_links import Link
from pdcluster.transfer.copying.copy import Table
from pdcluster.transfer.layout.runs import RunTable


@dataclass(frozen=True, slots=True)
class Fabric:
    """RDMA hardware that the user named, passed to the library. Not run on hardware.
    devices: such as mlx5_0 or mlx5_0:1; none means no RDMA.
    rails: over how many of them one write may be spread.
    """

    devices: tuple[str, ...] = ()
    gid_index: int | None = None
    rails: int | None = None


@dataclass(frozen=True, slots=True)
class StagedSettings:
    """block_bytes, blocks: shape of each ring.
    flying: most blocks that the library has in flight for a peer.
    unknown_s: library writes without an answer for so long count as unknown.
    awake_s: how often a reader learns of a write in flight, if its library needs that.
    """

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
    # That tcp listens on.
    port: int | None = None
    # What goes over our own sockets is encrypted. What the library sends is not.
    is_sealed: bool = False


class TransferLibrary(Protocol):
    """One instance of the library, shared by all connections of a backend. Any thread may call every method. Errors are
    OSErrors.
    """

    # Writes to this process progress only while it calls the library, so the other end must announce them (`expect`).
    needs_calls: bool
    # It sends from unregistered memory, as sockets can. So a write need not be gathered, and the library is polled for
    # it until it has ended. Such memory is not registered, because others may write what is registered.
    reads_anywhere: bool

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the library. It stays mapped for the life of the process."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Allow no new writes from or to it. A write in flight may still touch it."""

    def grant(self, address: int, nbytes: int) -> bytes:
        """What another process's `meet` needs to write to this registered memory."""

    def meet(self, grant: bytes) -> str:
        """Prepare writing to where the grant comes from. Returns its name for `submit` and `part`."""

    def part(self, far: str) -> None:
        """Undo one `meet`."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        """Start a write. Returns its id, or None when it was refused and nothing was sent."""

    def check(self, batch: int) -> WriteStatus:
        """PENDING, DONE, LOST (it no longer reads its source but may still land) or UNKNOWN. An id is not used again
        after DONE and LOST; after UNKNOWN only if the engine `reads_anywhere`.
        """

    def expect(self) -> None:
        """Note that a peer's write to this process is in flight."""

    def close(self) -> None:
        """End its threads and sockets. Nobody may use it afterwards."""


class Blocks:
    """Registered staging memory of one connection. Retired blocks stay mapped, because the library may still touch
    them; their memory returns to the system.
    """

    _retired: list[mmap.mmap] = []  # noqa: RUF012  mapped for the life of the process

    def __init__(self, engine: TransferLibrary, blocks: int, block_bytes: int) -> None:
        self._engine = engine
        self.block_bytes = block_bytes
        self.nbytes = blocks * block_bytes
        self._memory = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        engine.register(self.address, self.nbytes)

    def at(self, block: int) -> int:
        return self.address + block * self.block_bytes

    def retire(self) -> None:
        Blocks._retired.append(self._memory)  # first: it stays mapped whatever the library answers
        self._engine.unregister(self.address, self.nbytes)
        self._memory.madvise(mmap.MADV_DONTNEED)


# What a staged backend sends over its own link: the reader's ring, notices of pieces in it, and their answers. Formats
# only.

# magic, block, num_runs, nonce, chunk, trial, region, bytes of this piece, bytes of the whole write; then num_runs ×
# (offset, bytes) and the seal of all.
NOTICE = struct.Struct("<4sIIQIIIQQ")
RUN_BYTES = 16
# magic, block, whether the piece was copied to its pages.
ANSWER = struct.Struct("<4sIB")
# AWAKE: a notice that only announces a write in flight.
NOTICE_MAGIC, AWAKE_MAGIC, ANSWER_MAGIC = b"KVm1", b"KVw1", b"KVb1"
LENGTH = struct.Struct("<I")
MAX_GRANT = 1 << 16
# Of a ring.
MAX_BLOCKS = 512
MAX_RING_BYTES = 1 << 30
MAX_RUNS = 65536
MAX_WRITE_BYTES = 1 << 30


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The reader's ring for one connection. The library wants an address; it checks it against the registered ring, and
    nothing else is registered. engine: what its library needs to meet ours.
    """

    engine: bytes
    address: int
    block_bytes: int
    blocks: int


def read_grant(link: Link) -> Grant:
    head = link.receive(LENGTH.size)
    (length,) = LENGTH.unpack(head)
    if length > MAX_GRANT:
        raise ProtocolError(f"a grant of {length} bytes")
    body = link.receive(length)
    link.receive_seal(head, body)
    try:
        grant = msgspec.msgpack.decode(body, type=Grant)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the grant is not readable: {error}") from error
    if not (
        0 < grant.blocks <= MAX_BLOCKS
        and 4096 <= grant.block_bytes <= 64 << 20
        and grant.blocks * grant.block_bytes <= MAX_RING_BYTES
    ):
        raise ProtocolError(f"a ring of {grant.blocks} blocks of {grant.block_bytes} bytes")
    return grant


# A staged write cut into pieces, each for one block of the reader's ring. Pure. All pieces of a write are cut at once:
# in the middle of a transfer Python has left the caches, and each array operation costs tens of microseconds.
#
# A piece of a few long runs is sent from where it lies (straight). One of many short runs is gathered first, because
# every entry costs the library time.

# Smallest average size of an entry of a piece with several. Each entry costs Mooncake over TCP about 0.1 ms, and
# gathering 64 MiB costs 4 to 9 ms. So short runs are worth gathering up to 1 MiB.
ENTRY_BYTES = 1 << 20

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """rows: of each run, the offset in the block (gathered) or 0, the address and the bytes.
    targets: its spans at the reader, as a notice names them.
    is_straight: each row is an entry of its own for the library.
    """

    nbytes: int
    num_targets: int
    targets: bytes
    rows: Words
    is_straight: bool

    def packing(self, block: int) -> Table:
        """The table that copies it into the block at this address."""
        return (self.rows + np.array([block, 0, 0], dtype=np.int64)).view(np.uint64)

    def reading(self) -> Table:
        """The table that reads it where it lies."""
        return self.rows.view(np.uint64)

    def entries(self) -> list[tuple[int, int, int]]:
        """Of a straight piece: address, offset in the block, bytes."""
        at, found = 0, []
        for _, address, nbytes in self.rows.tolist():
            found.append((address, at, nbytes))
            at += nbytes
        return found


def cut(runs: RunTable, address: int, block_bytes: int, *, may_be_straight: bool) -> deque[StagedPiece]:
    """The pieces of these runs, in order. Their sources lie in the memory at this address. All but the last fill a
    block.
    """
    rows, firsts = runs.cut(block_bytes)
    ends = np.append(firsts[1:], len(rows))
    lengths, sources = rows[:, 2], rows[:, 0] + address
    begins = np.ones(len(rows), dtype=np.bool_)
    np.not_equal(sources[1:], sources[:-1] + lengths[:-1], out=begins[1:])
    begins[firsts] = True
    targets, table = (
        rows[:, 1:].astype("<i8").tobytes(),
        np.column_stack([_in_blocks(lengths, block_bytes), sources, lengths]),
    )
    sizes, entries = (
        np.add.reduceat(lengths, firsts).tolist(),
        np.add.reduceat(begins.astype(np.int64), firsts).tolist(),
    )
    pieces: deque[StagedPiece] = deque()
    for first, end, nbytes, count in zip(firsts.tolist(), ends.tolist(), sizes, entries, strict=True):
        is_straight = may_be_straight and count <= max(1, nbytes // ENTRY_BYTES)
        own = _joined(table[first:end], begins[first:end]) if is_straight else table[first:end]
        pieces.append(StagedPiece(nbytes, end - first, targets[first * 16 : end * 16], own, is_straight))
    return pieces


def _in_blocks(lengths: Words, block_bytes: int) -> Words:
    """Where in its block each row begins."""
    return (np.cumsum(lengths) - lengths) % block_bytes


def _joined(rows: Words, begins: NDArray[np.bool_]) -> Words:
    """Neighbours in memory as one row, only to be read."""
    firsts = begins.nonzero()[0]
    joined = np.zeros((len(firsts), 3), dtype=np.int64)
    joined[:, 1], joined[:, 2] = rows[firsts, 1], np.add.reduceat(rows[:, 2], firsts)
    return joined

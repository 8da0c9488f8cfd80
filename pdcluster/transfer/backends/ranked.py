"""One medium of a whole node: each rank has its own endpoint, and every verb goes to the ranks it concerns.

Rank r holds region first_region + r. A node's advert is that of its one endpoint, or a list of its ranks' adverts. All
ranks of a writer say hello as their node's boot, so a permit is the node's. A writer names the ranks of a reader by
names that only it uses. The session decides which rank writes what to which.
"""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence

import msgspec

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import (
    DECODE_ERRORS,
    Arrival,
    Backend,
    Fence,
    Handle,
    Peer,
    Permit,
    Region,
    Stamp,
    WriteStatus,
)
from pdcluster.transfer.layout.spans import CopyRuns

MAGIC = b"pdcl\0ranks\n"
MAX_RANKS = 64
_decoder = msgspec.msgpack.Decoder(tuple[bytes, ...])


def pack_adverts(adverts: Sequence[bytes]) -> bytes:
    """The adverts of all ranks, in order."""
    return adverts[0] if len(adverts) == 1 else MAGIC + msgspec.msgpack.encode(tuple(adverts))


def unpack_adverts(data: bytes) -> tuple[bytes, ...]:
    """Raises PeerUnreachable for malformed bytes."""
    if not data.startswith(MAGIC):
        return (data,)
    try:
        adverts = _decoder.decode(data[len(MAGIC) :])
    except DECODE_ERRORS as error:
        raise PeerUnreachable(f"the peer's list of adverts is not readable: {error}") from error
    if not 1 < len(adverts) <= MAX_RANKS:
        raise PeerUnreachable(f"the peer has adverts of {len(adverts)} ranks; there may be 2 to {MAX_RANKS}")
    return adverts


class RankedBackend:
    """base.Backend over one endpoint of each rank, in order. ends[0] is in this process."""

    def __init__(self, ends: Sequence[Backend], first_region: int) -> None:
        self.name = ends[0].name
        self._ends = tuple(ends)
        self._first_region = first_region
        self._epoll: select.epoll | None = None
        # Of rank 0.
        self.counters: Mapping[str, int] = ends[0].counters
        self.wakeup_fd = ends[0].wakeup_fd
        if len(ends) > 1:
            self._epoll = select.epoll()
            self.wakeup_fd = self._epoll.fileno()
            for end in ends:
                self._epoll.register(end.wakeup_fd, select.EPOLLIN)
        # Of nodes that we write to, by rank.
        self._adverts: dict[Peer, tuple[bytes, ...]] = {}
        # By node: which of our ranks writes to which of its.
        self._used: dict[Peer, set[tuple[int, Peer]]] = {}

    def register(self, region: Region) -> None:
        """Register the pool of a rank of this process. Other processes register theirs."""
        self._ends[region.id - self._first_region].register(region)

    def advert(self) -> bytes:
        return pack_adverts([end.advert() for end in self._ends])

    def connect(self, peer: Peer, advert: bytes) -> None:
        """Connect rank 0 to rank 0, which always has data for it and tells whether the medium reaches that node. Other
        pairs connect when they write, with the adverts given last: those of the write's own ticket.
        """
        self._adverts[peer] = unpack_adverts(advert)
        self._connect(peer, 0, 0)

    def permit(self, permit: Permit) -> None:
        self._ends[permit.region - self._first_region].permit(permit)

    def revoke(self, nonce: int) -> Fence:
        return _of_all([end.revoke(nonce) for end in self._ends])

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        rank, target = source_region - self._first_region, target_region - self._first_region
        adverts = self._adverts.get(peer, ())
        if not 0 <= target < len(adverts):
            raise PeerUnreachable(
                f"{peer.node} is not connected, or has no rank {target}; it has adverts of {len(adverts)}"
            )
        if rank or target:
            self._connect(peer, rank, target)
        handle = self._ends[rank].write(
            _name_of(peer, target, len(adverts)), source_region, target_region, stamp, runs, digests
        )
        return Handle(handle * len(self._ends) + rank)

    def poll(self, handle: Handle) -> WriteStatus:
        end, number = self._end_of(handle)
        return end.poll(number)

    def take_digest(self, handle: Handle) -> int | None:
        end, number = self._end_of(handle)
        return end.take_digest(number)

    def take_duration(self, handle: Handle) -> float | None:
        end, number = self._end_of(handle)
        return end.take_duration(number)

    def arrivals(self) -> list[Arrival]:
        return [arrival for end in self._ends for arrival in end.arrivals()]

    def close(self, peer: Peer) -> Fence:
        self._adverts.pop(peer, None)
        for rank, name in self._used.pop(peer, set()):
            if name != peer:
                self._ends[rank].close(name)
        return _of_all([end.close(peer) for end in self._ends])

    def shutdown(self) -> None:
        for end in self._ends:
            end.shutdown()
        if self._epoll is not None:
            self._epoll.close()

    def _connect(self, peer: Peer, rank: int, target: int) -> None:
        adverts = self._adverts[peer]
        name = _name_of(peer, target, len(adverts))
        self._used.setdefault(peer, set()).add((rank, name))
        self._ends[rank].connect(name, adverts[target])

    def _end_of(self, handle: Handle) -> tuple[Backend, Handle]:
        return self._ends[handle % len(self._ends)], Handle(handle // len(self._ends))


def _name_of(peer: Peer, rank: int, ranks: int) -> Peer:
    """Our local name of a rank of a node that we write to. It is never sent."""
    return peer if ranks == 1 else Peer(peer.node, f"{peer.incarnation}#{rank}")


def _of_all(fences: Sequence[Fence]) -> Fence:
    return Fence.FENCED if all(fence is Fence.FENCED for fence in fences) else Fence.CANNOT_FENCE

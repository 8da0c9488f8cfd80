"""The byte-level seam under a KV transfer: what a backend must do, and the plain values it uses.

A backend moves byte ranges between registered regions of two processes and reports when they landed. It knows no
requests, pages, attempts, retries or digests; `transfer.protocol.session` has the protocol. Nothing here blocks: the
backend's own threads or library do the work. `wakeup_fd` becomes readable when `poll` or `arrivals` has news.

Every backend meets these requirements (tests/contract runs them over all backends):

1. A write lands only in ranges that the reader permitted for its nonce, or the reader's own copy step discards it. On
   media where the writer reaches memory directly (shm, RDMA), the receiver cannot check. There `close` must answer
   CANNOT_FENCE until proof exists.
2. `arrivals` names a stamp only after all its payload is readable in the destination region.
3. FAILED: the write neither reads the source nor can land any more. REFUSED is FAILED by the reader's own word: it
   permits no such write, so the ticket, not the path, is at fault. LOST: it no longer reads the source but may have
   landed or may still land. UNKNOWN: it may still read the source and may still land. UNKNOWN is not final: the handle
   stays and becomes DONE, FAILED, REFUSED or LOST when there is proof, which `close` may bring about.
4. `close` and `revoke` answer FENCED only with the medium's own proof that no byte of that peer, or of that nonce, can
   land from now on.
5. Sizes and ranges from a peer are checked before any allocation or write. A bad one is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, NewType, Protocol

import msgspec

from pdcluster.transfer.layout.spans import CopyRuns, Spans

Handle = NewType("Handle", int)
# What msgspec raises for a peer's malformed bytes. Text that is not UTF-8 is a ValueError.
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class WriteStatus(Enum):
    PENDING = auto()
    DONE = auto()
    FAILED = auto()
    REFUSED = auto()
    LOST = auto()
    UNKNOWN = auto()


class Fence(Enum):
    FENCED = auto()
    CANNOT_FENCE = auto()


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that takes part in transfers. fd: a file descriptor that others can map (memfd); None when
    there is none. is_source: it is only written from, and nobody else gets access to it.
    """

    id: int
    address: int
    nbytes: int
    fd: int | None = None
    is_source: bool = False


class Peer(NamedTuple):
    """One boot of one node. A tuple, because many tables use it as a key."""

    node: str
    incarnation: str


class Stamp(msgspec.Struct, frozen=True):
    """Travels with every write, and the reader verifies it: whose permit, which chunk and try, how many bytes."""

    nonce: int
    chunk: int
    trial: int
    nbytes: int


class Arrival(msgspec.Struct, frozen=True):
    """A stamp that landed.
    digest, spans: xxh3-64 of the payload in memory, over the spans (offset, nbytes) in wire order, taken when all of it
    had landed. None where the medium does not digest, or where a write may land again after its stamp.
    """

    stamp: Stamp
    digest: int | None = None
    spans: Spans = ()
    region: int = 0


class Permit(msgspec.Struct, frozen=True):
    """What the holder of `nonce` may write into `region`: byte ranges (offset, nbytes), sorted and disjoint. digests:
    take them on arrival.
    """

    nonce: int
    writer: Peer
    region: int
    ranges: Spans
    digests: bool = False


class Backend(Protocol):
    name: str
    # Readable (an eventfd) when poll or arrivals has news. `arrivals` clears it, so callers use `arrivals` first, then
    # `poll`.
    wakeup_fd: int
    # Dropped or refused writes, by reason.
    counters: Mapping[str, int]

    def register(self, region: Region) -> None:
        """Make a region of this process usable as source and target."""

    def advert(self) -> bytes:
        """What a writer's `connect` needs to reach this process. It holds no raw memory address that a peer could use
        unchecked.
        """

    def connect(self, peer: Peer, advert: bytes) -> None:
        """Prepare writing to `peer`. Idempotent: called before every write, with the advert of its ticket.

        Connecting continues in the background. Writes queued behind it become FAILED when it fails. Raises
        PeerUnreachable at once for an advert that cannot work or is older than the connection, or when the last try
        failed a moment ago.
        """

    def permit(self, permit: Permit) -> None:
        """Reader: allow the writes of a ticket."""

    def revoke(self, nonce: int) -> Fence:
        """Reader: forget a permit. May be called again.

        On media that check at the receiver, later writes under it are dropped and the answer is FENCED: no byte under
        this nonce lands after the call. The call waits microseconds for a receiving thread to pass its check.
        """

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        """Start copying `runs`. digests: digest the payload on the way if the medium's mover can. Raises
        PeerUnreachable when the peer is not connected.
        """

    def poll(self, handle: Handle) -> WriteStatus:
        """State of a write. A final answer (DONE, FAILED, REFUSED, LOST) is given once; then the handle is
        forgotten.
        """

    def take_digest(self, handle: Handle) -> int | None:
        """xxh3-64 of the payload of a write that `poll` just answered as DONE; once. None when the mover did not digest
        it.
        """

    def take_duration(self, handle: Handle) -> float | None:
        """Seconds from `write` to the answer of a write that `poll` just answered as DONE; once."""

    def arrivals(self) -> list[Arrival]:
        """Reader: what landed since the last call."""

    def close(self, peer: Peer) -> Fence:
        """End all connections with a peer, as its reader and as its writer. Our unfinished writes to it end as FAILED,
        LOST or UNKNOWN. Call it again later to ask for the proof again.
        """

    def shutdown(self) -> None:
        """Release threads, sockets and mappings. Idempotent."""

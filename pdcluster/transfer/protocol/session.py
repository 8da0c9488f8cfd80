"""The KV transfer protocol above the backends: settings, events and rules. Its two halves are `writer.Writer` and
`reader.Reader`.

A decode node (reader) issues a ticket: a permit for one boot of a prefill node (writer) to write some pages. The writer
pushes chunks through a backend, then sends Commit with every chunk's digest. The reader verifies its own memory and
answers CommitAck. Either side may give up. The reader then sends Abort and the writer answers AbortAck. The code cites
these rules by number:

R1 The writer sends Commit only when no write under the ticket is unfinished. One write of unknown outcome ends the
ticket.
R2 The reader takes pages only under three conditions. The chunks cover exactly the requested tokens. Every chunk's
stamp arrived with the right length. The digests are those of the bytes in its pages once no write can change them:
taken after the permit was revoked, or on arrival of the chunk's last try when nothing else arrived
(`Incoming.digest_on_arrival` gives the reason).
R3 The reader reuses a dead ticket's pages only when nothing can land by any backend: by AbortAck, or by the backend's
own fence. Time is never proof. Until then the pages are in quarantine.
R4 The writer reuses source pages only when no write of the ticket can read them.
R5 The writer sends AbortAck only when no write under the ticket is unfinished. AbortAck names the media whose writes
were LOST. Those may still land, and the reader needs the fence of each of these media; for all others AbortAck is the
proof. A writer never forgets such a ticket, since its reader may ask for ever. Past a bound it answers for every
unknown ticket as it must for those it forgot.
R6 Abort for an unknown ticket leaves a tombstone: that ticket cannot be opened until its deadline voids it anyway.
R7 Commit and its answer carry a round. An answer to an older round decides nothing, and a Commit of an older round gets
its old answer again. Otherwise a late duplicate could reopen live pages.
R8 Commit and Abort are repeated until they are answered or the ticket's deadline passes. Both ends answer a repetition
the same way.
R9 Messages from any boot but the one in the ticket are dropped and counted.
R10 A chunk goes only by a connection that its own ticket's advert may use. A medium may fence a boot by refusing it
(shm). A later ticket that lets the boot in again must not carry the older one's chunks.
R11 A ticket names the reader's weights. A writer with other weights refuses it: KV of two is never mixed.

Both halves are pure: no threads, no sockets, an injected clock. Backends do all I/O, and messages leave as events of
`poll`. Call `poll` when a backend's wakeup_fd is readable, after every `handle`, and at `next_deadline`. Call
Reader.poll before Writer.poll (see `base.Backend.wakeup_fd`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdcluster.core.messages import Abort, AbortAck, Commit, CommitAck, Endpoint, TokenLogprobs
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.layout.geometry import PageShape

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LocalPages:
    """The KV pages of this node, as transfers see them."""

    # Id of rank 0's registered region. The regions of other ranks follow.
    region: int
    shape: PageShape
    # The memory of the ranks in this process, in rank order.
    memories: Sequence[memoryview]
    # Digest of the weights that compute their KV.
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds and pauses of the protocol.

    digests: both ends must agree.
    chunk_bytes, chunk_runs: bounds of one write.
    window_bytes, window_runs: bounds of the writes in flight per peer.
    trials: tries of a chunk on one backend.
    rounds: how often the reader asks for chunks again.
    repeat_s: pause before an unanswered message is sent again.
    commit_s: how long the writer waits for the answer to Commit.
    arrival_s: how long the reader waits for stamps that the Commit promises.
    verify_bytes: bytes digested per poll, so that a long prompt does not block the loop.
    proof_s: pause before a fence is requested again.
    suspect_s: how long a writer may leave an Abort unanswered before it gets no new pages.
    """

    digests: bool = True
    chunk_bytes: int = 16 << 20
    chunk_runs: int = 4096
    window_bytes: int = 64 << 20
    window_runs: int = 16384
    trials: int = 3
    rounds: int = 2
    repeat_s: float = 0.25
    commit_s: float = 10.0
    arrival_s: float = 1.0
    verify_bytes: int = 32 << 20
    proof_s: float = 0.1
    suspect_s: float = 1.0
    max_tombstones: int = 65536
    max_lost_tickets: int = 16384


class TransferStats(msgspec.Struct, frozen=True):
    """Times and sizes of one transfer.
    transfer_s: first write submitted until last write done.
    busy_s: the part of it with a write in flight.
    exposed_s: `finish` until the Commit is answered; 0 at the reader.
    Bytes exclude resends.
    """

    backend: str
    nbytes: int
    chunks: int
    resent: int
    transfer_s: float
    exposed_s: float
    busy_s: float = 0.0


class Send(msgspec.Struct, frozen=True):
    """Send `message` to that boot. An empty address means: on the link its message came by."""

    to: Endpoint
    message: Commit | CommitAck | Abort | AbortAck


class Acked(msgspec.Struct, frozen=True):
    """Writer: the reader verified and took the KV."""

    nonce: int
    stats: TransferStats


class TicketGaveUp(msgspec.Struct, frozen=True):
    """Writer: the ticket is dead; report it to the router. The source pages may still be read until Drained."""

    nonce: int
    reason: str


class Drained(msgspec.Struct, frozen=True):
    """Writer: the source pages may be unpinned. Follows Acked or GaveUp once for each opened ticket."""

    nonce: int


class Landed(msgspec.Struct, frozen=True):
    """Reader: the KV is verified and the pages belong to the row alone. first_token: None when the KV was pulled."""

    nonce: int
    first_token: int | None
    first_logprobs: TokenLogprobs | None
    stats: TransferStats


class TicketFailed(msgspec.Struct, frozen=True):
    """Reader: the ticket is dead. Its pages are in quarantine until Reclaimed."""

    nonce: int
    reason: str


class Reclaimed(msgspec.Struct, frozen=True):
    """Reader: proof came that nothing can land any more, so the pages may be reused. Follows Failed once."""

    nonce: int


WriterEvent = Send | Acked | TicketGaveUp | Drained
ReaderEvent = Send | Landed | TicketFailed | Reclaimed


def peer_of(endpoint: Endpoint) -> Peer:
    return Peer(endpoint.node, endpoint.incarnation)


def reply_to(peer: Peer) -> Endpoint:
    """An endpoint for a peer of which only the boot is known."""
    return Endpoint(peer.node, peer.incarnation, "")


def earliest(*times: float | None) -> float | None:
    """The earliest of the times that are not None."""
    return min((time for time in times if time is not None), default=None)

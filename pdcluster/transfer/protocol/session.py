"""The KV transfer protocol above the backends: its settings, its events and its rules. The two halves are
`writer.Writer` and `reader.Reader`.

A decode node (reader) issues a ticket: a permit for one prefill node's boot (writer) to write some pages. The writer
pushes chunks through a backend, then sends Commit with every chunk's digest; the reader verifies its own memory and
answers CommitAck. Either side may give up; the reader then sends Abort, the writer answers AbortAck. Rules, cited by
number in the code:

 R1  Commit goes out only when no write under the ticket is unfinished. One write whose outcome is not known ends the
     ticket.
 R2  The reader takes pages only when chunks cover exactly the tokens asked for, every chunk's stamp arrived with the
     right length, and the digests are those of the bytes in its pages when no write can change them any more: taken
     after the permit was revoked, or on arrival of the chunk's last try, when nothing else arrived
     (Reader._digest_on_arrival says why that holds).
 R3  The reader reuses a dead ticket's pages only when nothing can land by any backend any more: by AbortAck, or by the
     backend's own fence. Time is never proof: until then the pages are in quarantine.
 R4  The writer reuses source pages only when no write of the ticket can read them any more.
 R5  AbortAck is sent only when no write under the ticket is unfinished. It names the media by which writes were LOST:
     those may still land, and the reader needs the fence of each of these media; for all others AbortAck is the proof.
     A writer never forgets such a ticket, since its reader may ask for ever; past a bound it says of every ticket it
     does not know what it must say of those it forgot.
 R6  Abort for an unknown ticket leaves a tombstone: that ticket can not be opened any more, until its deadline made it
     void anyway.
 R7  Commit and its answer carry a round. An answer to an older round decides nothing, and a Commit of an older round
     gets its old answer again: otherwise a late duplicate could reopen pages that are live.
 R8  Commit and Abort are repeated until they are answered or the ticket's deadline; both ends answer a repetition the
     same way again.
 R9  Messages from any boot but the one in the ticket are dropped and counted.
 R10 A chunk goes only by a connection that its own ticket's advert may use. A medium may fence what a boot holds by
     refusing it (shm); a later ticket that lets the boot in again must not carry the older one's chunks.

Both halves are pure: no threads, no sockets, an injected clock. All I/O is the backends'; messages leave as events of
`poll`, which must be called when a backend's wakeup_fd is readable, after every `handle`, and at `next_deadline`.
Reader.poll before Writer.poll (see base.Backend.wakeup_fd).
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

    # Id of rank 0's registered region; the regions of other ranks follow.
    region: int
    shape: PageShape
    # The bytes of the ranks that are in this process, in the order of ranks.
    memories: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Settings:
    """digests: both ends must agree. chunk_bytes, chunk_runs bound one write; window_bytes, window_runs bound the
    writes in flight per peer.

    trials: tries of a chunk on one backend. rounds: how often the reader asks for chunks again. repeat_s: pause before
    an unanswered message is sent again. commit_s: how long the writer waits for the answer to Commit. arrival_s: how
    long the reader waits for stamps that the Commit promises. verify_bytes: digested per poll, so that a long prompt
    does not hold up the loop. proof_s: pause before a fence is asked for again.
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
    max_tombstones: int = 65536
    max_lost_tickets: int = 16384


class TransferStats(msgspec.Struct, frozen=True):
    """transfer_s: first write submitted → last write done; busy_s: the part of it in which a write was under way;
    exposed_s: `finish` → Commit answered (0 at the reader). Bytes without resends."""

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
    """Writer: the ticket is dead; tell the router. The source pages may still be read until Drained."""

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
    """Reader: the ticket is dead, its pages are in quarantine until Reclaimed."""

    nonce: int
    reason: str


class Reclaimed(msgspec.Struct, frozen=True):
    """Reader: proof came that nothing can land any more; the pages may be reused. Follows Failed once."""

    nonce: int


WriterEvent = Send | Acked | TicketGaveUp | Drained
ReaderEvent = Send | Landed | TicketFailed | Reclaimed


def peer_of(endpoint: Endpoint) -> Peer:
    return Peer(endpoint.node, endpoint.incarnation)


def reply_to(peer: Peer) -> Endpoint:
    """An endpoint for a peer of whom only the boot is known."""
    return Endpoint(peer.node, peer.incarnation, "")


def earliest(*times: float | None) -> float | None:
    """The first of the times that are not None."""
    return min((time for time in times if time is not None), default=None)

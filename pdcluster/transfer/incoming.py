"""What a Reader keeps of a ticket it issued, and of an Abort it repeats. Plain state; rules in `session`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdcluster.lifecycle import Reading
from pdcluster.messages import ChunkEntry, Commit, CommitAck, Endpoint, Ticket
from pdcluster.transfer.base import Arrival, Peer


@dataclass(slots=True)
class Incoming:
    """One ticket. `writable`: the pages the writer may write, in token order; `unchecked`: chunks of the Commit not digested yet; `repeated`:
    chunks of which more than one write arrived."""

    ticket: Ticket
    writer: Peer
    writable: list[int]
    opened: float
    deadline: float
    state: Reading = Reading.OPEN
    arrived: dict[int, Arrival] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    round: int = 0
    commit: Commit | None = None
    commit_time: float = 0.0
    answers: dict[int, CommitAck] = field(default_factory=dict)
    unchecked: deque[ChunkEntry] | None = None
    promised: int = 0
    """Chunks in the Commit."""
    bad: list[int] = field(default_factory=list)
    resent: int = 0
    unfenced: set[str] = field(default_factory=set)
    first_arrival: float | None = None
    last_arrival: float = 0.0


@dataclass(slots=True)
class Notice:
    """An Abort that is repeated until it is answered (R8)."""

    writer: Endpoint
    reason: str
    until: float
    send_at: float

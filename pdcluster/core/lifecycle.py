"""Who may go from which state to which: every state machine of the nodes, as a table.

An event that the table does not hold raises IllegalTransition and changes nothing. Terminal states have no events. The
tables say what is allowed, their users say when.

- Writing: one ticket, seen by the prefill node that writes under it.
- Reading: one ticket, seen by the decode node that issued it.
- Checking: one Commit of an open ticket, at the same node.
- Residence: one attempt's sequence, seen by the scheduler of its node.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, NoReturn, TypeVar


class Writing(Enum):
    # Chunks may be pushed.
    OPEN = auto()
    # Every write is done and Commit is sent, again until it is answered.
    COMMITTED = auto()
    # Given up; writes that were submitted may still run, so source pages stay pinned.
    DRAINING = auto()
    # Terminal: the reader verified and took the pages.
    ACKED = auto()
    # Terminal: no write can land any more, and AbortAck says so.
    ABORTED = auto()


class Reading(Enum):
    # The writer may write.
    OPEN = auto()
    # Terminal: every leg verified, the pages belong to the row alone.
    VERIFIED = auto()
    # Abort sent; the writer may still write, so the pages are quarantined.
    ABORTING = auto()
    # Terminal: AbortAck or a fence proved that the writer can write no more.
    RECLAIMED = auto()


class Checking(Enum):
    # Not compared with its ticket yet.
    RECEIVED = auto()
    # It covers the ticket; some of its chunks' stamps may be on their way.
    ARRIVING = auto()
    # Every backend was ordered to end the permit; ranks may still hand over what arrived before.
    REVOKED = auto()
    # Nothing changes the bytes any more; digests are compared.
    DIGESTING = auto()


class Residence(Enum):
    # In the queue: holds no pages.
    WAITING = auto()
    # In the queue, but not to be admitted yet: KV of its prompt is on its way into the prefix cache. Holds no pages.
    HELD = auto()
    # A row of the running batch: computes its prompt, or decodes.
    RUNNING = auto()
    # A slot: holds pages and a row for KV that a remote prefill node writes.
    RESERVED = auto()
    # A remote prefill with its first token: no row, its pages are kept until they are delivered.
    PARKED = auto()
    # Terminal: ended well or not; holds nothing once no step computes it.
    FINISHED = auto()


class IllegalTransition(Exception):
    """An event that is not allowed in this state: a bug of pdcluster, or a peer out of step."""


State = TypeVar("State", bound=Enum)


class Table(dict[tuple[State, str], State], Generic[State]):
    """The state after an event: `table[state, event]`. Raises IllegalTransition for an event that it does not hold."""

    def __missing__(self, key: tuple[State, str]) -> NoReturn:
        state, event = key
        raise IllegalTransition(f"{type(state).__name__} {state.name} does not allow {event!r}")


WRITING = Table[Writing](
    {
        (Writing.OPEN, "commit"): Writing.COMMITTED,
        (Writing.OPEN, "abort"): Writing.DRAINING,
        (Writing.COMMITTED, "resend"): Writing.OPEN,
        (Writing.COMMITTED, "ack"): Writing.ACKED,
        (Writing.COMMITTED, "abort"): Writing.DRAINING,
        (Writing.DRAINING, "drained"): Writing.ABORTED,
    }
)

READING = Table[Reading](
    {
        (Reading.OPEN, "verify"): Reading.VERIFIED,
        (Reading.OPEN, "abort"): Reading.ABORTING,
        (Reading.ABORTING, "reclaim"): Reading.RECLAIMED,
    }
)

CHECKING = Table[Checking](
    {
        (Checking.RECEIVED, "accept"): Checking.ARRIVING,
        (Checking.ARRIVING, "revoke"): Checking.REVOKED,
        (Checking.REVOKED, "digest"): Checking.DIGESTING,
    }
)

RESIDENCE = Table[Residence](
    {
        (Residence.WAITING, "admit"): Residence.RUNNING,
        (Residence.WAITING, "reserve"): Residence.RESERVED,
        (Residence.WAITING, "hold"): Residence.HELD,
        (Residence.WAITING, "end"): Residence.FINISHED,
        (Residence.HELD, "resume"): Residence.WAITING,
        (Residence.HELD, "end"): Residence.FINISHED,
        (Residence.RESERVED, "commit"): Residence.RUNNING,
        (Residence.RESERVED, "end"): Residence.FINISHED,
        (Residence.RUNNING, "preempt"): Residence.WAITING,
        (Residence.RUNNING, "park"): Residence.PARKED,
        (Residence.RUNNING, "end"): Residence.FINISHED,
        (Residence.PARKED, "end"): Residence.FINISHED,
    }
)

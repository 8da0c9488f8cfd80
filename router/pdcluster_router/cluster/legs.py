"""Where requests run right now: the router's own ledger of legs, and who reads what nodes answer to a request.

One Leg is one attempt of one request on one boot of one node. The ledger gives a node's in-flight count to the view,
tells a reconnecting link what is still open there, and tells every request behind a lost node that it was lost. Owned
by the router's event loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdcluster.core import errors
from pdcluster.core.messages import (
    AnyMessage,
    Delivered,
    Endpoint,
    Failed,
    Finished,
    Refused,
    Reserved,
    Scheduled,
    TokenRow,
)
from pdcluster_router.cluster.in_flight import WorkInFlight
from pdcluster_router.cluster.view import ClusterView, InFlightWork
from pdcluster_router.core.generation import Take


class FastTokenPath(msgspec.Struct, frozen=True, eq=False):
    """A short way to the client for rows that just go on. fail: hears what `take` raised, which ends the request."""

    take: Take
    fail: Callable[[Exception], object]


class RequestLeg(msgspec.Struct, eq=False):
    """emitted: the request's output tokens so far, its own list; way: None while every row has to be read; heard_at:
    when one last went that way, monotonic seconds."""

    request: str
    attempt: int
    endpoint: Endpoint
    emitted: list[int]
    way: FastTokenPath | None = None
    heard_at: float = 0.0

    @property
    def position(self) -> int:
        """The next output position the request expects, for the resend after a lost frame."""
        return len(self.emitted)


@dataclass(frozen=True, slots=True)
class LegLost:
    """The node's link is gone (attempt None), or this boot of it does not know the attempt (any more)."""

    reason: str
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class NodeReconnected:
    """The link to the node was cut and is there again: what was sent meanwhile may be lost."""

    attempt: None = None


# What is said of a request. attempt None: it is about the whole node.
Body = TokenRow | Scheduled | Reserved | Delivered | Finished | Refused | Failed | LegLost | NodeReconnected


# Takes what a node, named by its incarnation, says of a request. It may be called while the reader itself sends
# something.
Read = Callable[[str, Body], None]


NO_LEGS: Mapping[str, RequestLeg] = {}


class Ledger:
    def __init__(self) -> None:
        self._legs: defaultdict[str, dict[str, RequestLeg]] = defaultdict(dict)
        self._readers: dict[str, Read] = {}
        # Who reads what nodes answer to a request; None for one that ended.
        self.reader_of = self._readers.get
        self.pending = WorkInFlight()
        self._changed = self.pending.changed

    def take_changed(self) -> set[str]:
        """Nodes of which in-flight count or pending work may be another since the last call."""
        changed = self._changed.copy()
        self._changed.clear()
        return changed

    def open(self, request: str, read: Read) -> None:
        """What nodes answer to this request goes to `read`, until `close`."""
        self._readers[request] = read

    def close(self, request: str) -> None:
        """Idempotent."""
        self._readers.pop(request, None)

    def enter(self, leg: RequestLeg) -> None:
        self._legs[leg.endpoint.incarnation][leg.request] = leg
        self._changed.add(leg.endpoint.incarnation)

    def leave(self, leg: RequestLeg) -> None:
        """Idempotent; a newer leg of the same request on the same node stays."""
        legs = self._legs.get(leg.endpoint.incarnation)
        if legs is None or legs.get(leg.request) is not leg:
            return
        self.pending.leave(leg.endpoint.incarnation, leg.request)
        self._changed.add(leg.endpoint.incarnation)
        del legs[leg.request]
        if not legs:
            del self._legs[leg.endpoint.incarnation]

    def in_flight(self, incarnation: str) -> int:
        return len(self._legs.get(incarnation, ()))

    def counts(self, incarnation: str) -> tuple[int, InFlightWork]:
        """Of a node: requests in flight, and what its last report does not count."""
        return len(self._legs.get(incarnation, ())), self.pending.of(incarnation)

    def num_requests(self) -> int:
        return len(self._readers)

    def open_attempts(self, incarnation: str) -> tuple[tuple[str, int, int], ...]:
        """What a Hello to this node says is open: (request, attempt, next position)."""
        return tuple((leg.request, leg.attempt, leg.position) for leg in self._legs.get(incarnation, {}).values())

    def deliver(self, request: str, incarnation: str, body: Body) -> bool:
        """False when nobody waits for it (any more): a late frame of a request that ended."""
        read = self.reader_of(request)
        if read is None:
            return False
        read(incarnation, body)
        return True

    def deliver_rows(self, incarnation: str, rows: Sequence[TokenRow], now: float) -> int:
        """Nearly all that nodes say: rows that just go on take their short way, the others are read. How many nobody
        waits for."""
        leg_of, reader_of, num_unread = self._legs.get(incarnation, NO_LEGS).get, self.reader_of, 0
        for row in rows:
            leg = leg_of(row.request)
            if (
                leg is not None
                and (way := leg.way) is not None
                and row.position == len(leg.emitted)
                and row.attempt == leg.attempt
            ):
                try:
                    take = way.take  # which is no method: to call it as one takes longer
                    if take(row.position, row.tokens):
                        leg.emitted.extend(row.tokens)  # to set a field of a struct takes longer
                        leg.heard_at = now
                        continue
                except (
                    Exception
                ) as error:  # the top of what happens to a request: the rows of others come behind its own
                    way.fail(error)
                    continue
            read = reader_of(row.request)
            if read is not None:
                read(incarnation, row)
            else:
                num_unread += 1
        return num_unread

    def rewelcome(self, incarnation: str) -> None:
        for leg in list(self._legs.get(incarnation, {}).values()):
            self.deliver(leg.request, incarnation, NodeReconnected())

    def lose_node(self, incarnation: str, reason: str) -> None:
        self.pending.lose(incarnation)
        for leg in list(self._legs.get(incarnation, {}).values()):
            self.deliver(leg.request, incarnation, LegLost(reason))


class ClusterLinks(Protocol):
    """What an attempt needs of the cluster."""

    ledger: Ledger

    def view(self) -> ClusterView: ...

    def send(self, to: Endpoint, message: AnyMessage) -> None:
        """Queue a frame; raises NodeLost when the link is down."""
        ...


def refusal(message: Refused) -> errors.PdclusterError:
    if not message.retryable:
        return errors.BadRequest(message.reason, message.param or None)
    return errors.Overloaded(message.reason, message.retry_after_s)


def error_of(message: Failed) -> errors.PdclusterError:
    """The node's error as ours: retryable ones keep their cause as text, others become an internal error or the
    caller's."""
    if message.retryable and message.code == errors.Overloaded.code:
        return errors.Overloaded(message.message, 0.0)
    if message.retryable:
        return errors.TransferError(message.message)
    if message.code == errors.BadRequest.code:
        return errors.BadRequest(message.message, message.param or None)
    if message.code == errors.DeadlineExceeded.code:
        return errors.DeadlineExceeded(message.message)
    return errors.PdclusterError(message.message)

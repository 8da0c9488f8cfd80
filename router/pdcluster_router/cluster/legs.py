"""The router's ledger of legs: where requests run, and who reads the answers of nodes.

A leg is one attempt of one request on one boot of one node. The ledger counts requests in flight for the view. It lists
the open attempts for a link that reconnects. It reports a lost node to each of its requests. Owned by the router's
event loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdcluster.core import errors
from pdcluster.core.messages import (
    MODEL_PARAM,
    AnyMessage,
    Computed,
    Delivered,
    Embedded,
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
from pdcluster_router.core.generation import TakeTokens


class FastTokenPath(msgspec.Struct, frozen=True, eq=False):
    """Takes rows that only continue a stream, without the request reading them."""

    take: TakeTokens
    # Called with the exception that `take` raised. It ends the request.
    fail: Callable[[Exception], object]


class RequestLeg(msgspec.Struct, eq=False):
    """One attempt of a request on one boot of a node."""

    request: str
    attempt: int
    endpoint: Endpoint
    # The request's own list of output tokens.
    emitted: list[int]
    # The fast token path; None while the request must read every row.
    way: FastTokenPath | None = None
    # When a row last took the fast path, in monotonic seconds.
    heard_at: float = 0.0

    @property
    def position(self) -> int:
        """The next output position that the request expects. A node resends from there after a lost frame."""
        return len(self.emitted)


@dataclass(frozen=True, slots=True)
class LegLost:
    """The link to the node is gone (attempt None), or this boot does not have the attempt (any more)."""

    reason: str
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class NodeReconnected:
    """The link to the node was cut and is back. What was sent meanwhile may be lost."""

    attempt: None = None


# An event of a request. attempt None: it is about the whole node.
Body = (
    TokenRow | Scheduled | Computed | Reserved | Delivered | Finished | Embedded | Refused | Failed | LegLost
    | NodeReconnected
)  # fmt: skip


# Reads an event of a request; the string is the node's incarnation. It may be called while the reader itself sends.
Read = Callable[[str, Body], None]


NO_LEGS: Mapping[str, RequestLeg] = {}


class Ledger:
    def __init__(self) -> None:
        self._legs: defaultdict[str, dict[str, RequestLeg]] = defaultdict(dict)
        # Readers of the answers to open requests, who enter and remove themselves.
        self.readers: dict[str, Read] = {}
        # The reader of a request's answers; None once the request ended.
        self.reader_of = self.readers.get
        self.pending = WorkInFlight()
        self._changed = self.pending.changed

    def take_changed(self) -> set[str]:
        """Take the set of nodes whose in-flight count or pending work may have changed."""
        changed = self._changed.copy()
        self._changed.clear()
        return changed

    def enter(self, leg: RequestLeg) -> None:
        self._legs[leg.endpoint.incarnation][leg.request] = leg
        self._changed.add(leg.endpoint.incarnation)

    def leave(self, leg: RequestLeg) -> None:
        """Remove a leg. Idempotent; a newer leg of the request on the node stays."""
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
        """Requests in flight on a node, and the work that its last report does not count."""
        return len(self._legs.get(incarnation, ())), self.pending.of(incarnation)

    def num_requests(self) -> int:
        return len(self.readers)

    def open_attempts(self, incarnation: str) -> tuple[tuple[str, int, int], ...]:
        """The open attempts that a Hello to this node names: (request, attempt, next position)."""
        return tuple((leg.request, leg.attempt, leg.position) for leg in self._legs.get(incarnation, {}).values())

    def deliver(self, request: str, incarnation: str, body: Body) -> bool:
        """Pass an event to the request's reader. False when there is none: a late frame of a request that ended."""
        read = self.reader_of(request)
        if read is None:
            return False
        read(incarnation, body)
        return True

    def deliver_rows(self, incarnation: str, rows: Sequence[TokenRow], now: float) -> int:
        """Pass rows to their requests. Rows that only continue a stream take its fast token path.

        Returns the number of rows without a reader.
        """
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
                    take = way.take  # a field, not a method: calling it as a method takes longer
                    if take(row.position, row.tokens):
                        leg.emitted.extend(row.tokens)  # setting a struct's field takes longer
                        leg.heard_at = now
                        continue
                except Exception as error:  # one request's error must not stop the rows of others
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
        """Queue a frame. Raises NodeLost when the link is down."""
        ...


def refusal(message: Refused) -> errors.PdclusterError:
    if not message.retryable:
        return _not_for_nodes(message.reason, message.param)
    return errors.Overloaded(message.reason, message.retry_after_s)


def _not_for_nodes(reason: str, param: str) -> errors.PdclusterError:
    """No node can run it. Where the model is at fault, it was prepared for one that changed since."""
    if param == MODEL_PARAM:
        return errors.ModelChanged(f"{reason}; send the request again")
    return errors.BadRequest(reason, param or None)


def error_of(message: Failed) -> errors.PdclusterError:
    """The router's error for a node's failure.

    A retryable failure keeps its cause as text. Others become an internal error, or an error of the caller.
    """
    if message.retryable and message.code == errors.Overloaded.code:
        return errors.Overloaded(message.message, 0.0)
    if message.retryable and message.code == errors.NodeDrains.code:
        return errors.NodeDrains(message.message)
    if message.retryable and message.code == errors.NodeStuck.code:
        return errors.NodeStuck(message.message)
    if message.retryable:
        return errors.TransferError(message.message)
    if message.code == errors.BadRequest.code:
        return _not_for_nodes(message.message, message.param)
    if message.code == errors.DeadlineExceeded.code:
        return errors.DeadlineExceeded(message.message)
    return errors.PdclusterError(message.message)

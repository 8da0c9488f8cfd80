"""Where requests run right now: the router's own ledger of legs, and the inbox through which nodes answer a request.

One Leg is one attempt of one request on one boot of one node. The ledger gives a node's in-flight count to the view, tells a reconnecting
link what is still open there, and tells every request behind a lost node that it was lost. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from pdcluster.messages import Endpoint, Message, TokenRow


@dataclass(slots=True)
class Leg:
    """position: the next output position the request expects, for the resend after a lost frame."""

    request: str
    attempt: int
    endpoint: Endpoint
    position: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The node's link is gone (attempt None), or this boot of it does not know the attempt (any more)."""

    reason: str
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Rewelcomed:
    """The link to the node was cut and is there again: what was sent meanwhile may be lost."""


Body = Message | TokenRow | Lost | Rewelcomed


@dataclass(frozen=True, slots=True)
class FromNode:
    incarnation: str
    body: Body


Inbox = asyncio.Queue[FromNode]


class Ledger:
    def __init__(self) -> None:
        self._legs: defaultdict[str, dict[str, Leg]] = defaultdict(dict)
        self._inboxes: dict[str, Inbox] = {}

    def open_inbox(self, request: str) -> Inbox:
        """The queue of one request; bounded in effect by its max_tokens, because nodes send each token once."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes[request] = inbox
        return inbox

    def close_inbox(self, request: str) -> None:
        self._inboxes.pop(request, None)

    def enter(self, leg: Leg) -> None:
        self._legs[leg.endpoint.incarnation][leg.request] = leg

    def leave(self, leg: Leg) -> None:
        """Idempotent; a newer leg of the same request on the same node stays."""
        legs = self._legs[leg.endpoint.incarnation]
        if legs.get(leg.request) is leg:
            del legs[leg.request]
        if not legs:
            del self._legs[leg.endpoint.incarnation]

    def in_flight(self, incarnation: str) -> int:
        return len(self._legs.get(incarnation, ()))

    def num_requests(self) -> int:
        return len(self._inboxes)

    def open_attempts(self, incarnation: str) -> tuple[tuple[str, int, int], ...]:
        """What a Hello to this node says is open: (request, attempt, next position)."""
        return tuple((leg.request, leg.attempt, leg.position) for leg in self._legs.get(incarnation, {}).values())

    def deliver(self, request: str, incarnation: str, body: Body) -> bool:
        """False when nobody waits for it (any more): a late frame of a request that ended."""
        inbox = self._inboxes.get(request)
        if inbox is None:
            return False
        inbox.put_nowait(FromNode(incarnation, body))
        return True

    def rewelcome(self, incarnation: str) -> None:
        for leg in list(self._legs.get(incarnation, {}).values()):
            self.deliver(leg.request, incarnation, Rewelcomed())

    def lose_node(self, incarnation: str, reason: str) -> None:
        for leg in list(self._legs.get(incarnation, {}).values()):
            self.deliver(leg.request, incarnation, Lost(reason))

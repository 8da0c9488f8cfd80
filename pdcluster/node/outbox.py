"""What a node has to say to its routers, and about pulls to other nodes, gathered over one turn of the loop: all new tokens of a router in one frame.

Owned by the node loop's thread. It does not know what the messages mean, only that a row's tokens come before what follows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdcluster.messages import AnyMessage, Endpoint, TokenRow, Tokens
from pdcluster.transfer.base import Peer


class Sender(Protocol):
    def send(self, to: Peer | Endpoint, message: AnyMessage) -> bool:
        """False when the frame could not be queued; the link then signals a gap and both ends compare notes."""
        ...


@dataclass(slots=True)
class Pending:
    rows: list[TokenRow] = field(default_factory=list)
    messages: list[AnyMessage] = field(default_factory=list)


class Outbox:
    def __init__(self) -> None:
        self._pending: dict[Peer | Endpoint, Pending] = {}

    def row(self, router: Peer, row: TokenRow) -> None:
        """Add output tokens to the router's frame of this turn."""
        self._pending.setdefault(router, Pending()).rows.append(row)

    def message(self, to: Peer | Endpoint, message: AnyMessage) -> None:
        """Send `message` after this turn's tokens. A node that has not called us is named by its endpoint."""
        self._pending.setdefault(to, Pending()).messages.append(message)

    def flush(self, sender: Sender) -> None:
        """Send everything. What a dead link drops is not kept: the router asks for it again by its Hello."""
        pending, self._pending = self._pending, {}
        for router, turn in pending.items():
            if turn.rows:
                sender.send(router, Tokens(rows=tuple(turn.rows)))
            for message in turn.messages:
                sender.send(router, message)

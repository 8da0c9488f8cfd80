"""Messages of one turn of the loop to routers, and about pulls to other nodes. All new tokens of a router are one
frame.

Owned by the node loop's thread. It only knows that a row's tokens come before what follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pdcluster.core.messages import AnyMessage, Endpoint, TokenLogprobs, TokenRow, Tokens
from pdcluster.transfer.backends.base import Peer

# Bytes of rows in one frame, by the estimates below; less than any peer's frame limit (wire.codec).
MAX_ROWS_BYTES = 48 << 20
# Upper bounds: a row's ids and numbers, a token, a logprob, one alternative.
ROW_BYTES, TOKEN_BYTES, ENTRY_BYTES, TOP_BYTES = 300, 5, 21, 14


class Sender(Protocol):
    def send(self, to: Peer | Endpoint, message: AnyMessage) -> bool:
        """False when the frame could not be queued. The link then signals a gap, and both ends exchange their state."""
        ...


@dataclass(slots=True)
class PendingOutput:
    rows: list[TokenRow] = field(default_factory=list)
    messages: list[AnyMessage] = field(default_factory=list)


class Outbox:
    def __init__(self) -> None:
        self._pending: dict[Peer | Endpoint, PendingOutput] = {}
        self._held: list[tuple[Callable[[], bool], Peer | Endpoint, AnyMessage]] = []

    def row(self, router: Peer, row: TokenRow) -> None:
        """Add output tokens to the router's frame of this turn."""
        self._pending.setdefault(router, PendingOutput()).rows.append(row)

    def message(self, to: Peer | Endpoint, message: AnyMessage, *, once: Callable[[], bool] | None = None) -> None:
        """Send `message` after this turn's tokens.

        A node that has not called us is named by its endpoint. once: send it only when this is true, which it must
        become.
        """
        if once is not None and not once():
            self._held.append((once, to, message))
            return
        self._pending.setdefault(to, PendingOutput()).messages.append(message)

    def flush(self, sender: Sender) -> None:
        """Send everything. What a dead link drops is not kept: the router asks for it by its Hello."""
        held, self._held = self._held, []
        for once, to, message in held:
            self.message(to, message, once=once)
        pending, self._pending = self._pending, {}
        for router, turn in pending.items():
            for rows in frames(turn.rows):
                sender.send(router, Tokens(rows=rows))
            for message in turn.messages:
                sender.send(router, message)


def frames(rows: Iterable[TokenRow]) -> Iterator[tuple[TokenRow, ...]]:
    """The rows in order, in as few frames as the limit allows. Only logprobs make a row large."""
    frame: list[TokenRow] = []
    left = MAX_ROWS_BYTES
    for row in rows:
        nbytes = bytes_of(row)
        if frame and nbytes > left:
            yield tuple(frame)
            frame, left = [], MAX_ROWS_BYTES
        frame.append(row)
        left -= nbytes
    if frame:
        yield tuple(frame)


def bytes_of(row: TokenRow) -> int:
    """Upper bound of its bytes on the wire."""
    return (
        ROW_BYTES
        + TOKEN_BYTES * len(row.tokens)
        + _bytes_of_entries(row.logprobs)
        + _bytes_of_entries(row.prompt_logprobs)
    )


def _bytes_of_entries(entries: tuple[TokenLogprobs, ...]) -> int:
    return sum(ENTRY_BYTES + TOP_BYTES * len(entry.top_ids) for entry in entries) if entries else 0


def most_bytes(num_prompt: int, prompt_alternatives: int | None, num_output: int, alternatives: int | None) -> int:
    """Bytes of the largest row that a request may need: all it produced, for a router that lost it. None: no
    logprobs.
    """
    prompt = 0 if prompt_alternatives is None else num_prompt * (ENTRY_BYTES + TOP_BYTES * prompt_alternatives)
    output = 0 if alternatives is None else num_output * (ENTRY_BYTES + TOP_BYTES * alternatives)
    return ROW_BYTES + TOKEN_BYTES * num_output + prompt + output

"""What a Writer keeps of a ticket and its chunks, and what must be right about a ticket before it is opened. Plain state; rules in `session`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdcluster.errors import TransferError
from pdcluster.lifecycle import Writing
from pdcluster.messages import ChunkEntry, Ticket, TokenLogprobs, unpack_tokens
from pdcluster.transfer.base import Peer, Run
from pdcluster.transfer.chunks import PageShape, page_slice
from pdcluster.transfer.session import peer_of


@dataclass(slots=True)
class Chunk:
    index: int
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    runs: tuple[Run, ...]
    nbytes: int
    trial: int = 0
    tries_here: int = 0
    """Tries on the ticket's present backend."""
    digest: int = 0
    done: bool = False

    def entry(self) -> ChunkEntry:
        """What the Commit says of it."""
        return ChunkEntry(self.index, self.first_token, self.num_tokens, self.first_layer, self.num_layers, self.nbytes, self.digest, self.trial)


@dataclass(slots=True)
class Flight:
    nonce: int
    chunk: int
    backend: str
    nbytes: int
    runs: int


@dataclass(slots=True)
class Outgoing:
    """One ticket. `backends`: what both ends have, best first; the first is in use."""

    ticket: Ticket
    peer: Peer
    pages: list[int]
    backends: list[str]
    deadline: float
    next_token: int
    """Tokens before it were pushed with all their layers."""
    layered_end: int = 0
    next_layer: int = 0
    """Of tokens [next_token, layered_end), layers before next_layer were pushed."""
    state: Writing = Writing.OPEN
    chunks: list[Chunk] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    lost: bool = False
    unknown: bool = False
    reason: str = ""
    finished: tuple[int, TokenLogprobs | None] | None = None
    round: int = 0
    resent: int = 0
    commit_at: float | None = None
    """When Commit is sent (again)."""
    give_up_at: float | None = None
    busy_from: float = 0.0
    busy_s: float = 0.0
    first_write: float | None = None
    last_write: float = 0.0
    finish_time: float = 0.0


def checked_pages(ticket: Ticket, me: Peer, shape: PageShape) -> list[int]:
    """The ticket's page ids, or TransferError when anything about it is wrong."""
    nonce, tokens = ticket.nonce, shape.page_tokens
    if peer_of(ticket.writer) != me:
        raise TransferError(f"ticket {nonce:x} is for boot {ticket.writer.incarnation} of {ticket.writer.node}, this is {me.incarnation}")
    if (ticket.page_tokens, ticket.page_bytes) != (tokens, shape.page_bytes):
        raise TransferError(
            f"ticket {nonce:x} has pages of {ticket.page_tokens} tokens and {ticket.page_bytes} bytes, here they have {tokens} and "
            f"{shape.page_bytes}; both nodes need the same page size and dtype"
        )
    if not (ticket.num_tokens > 0 and 0 <= ticket.cached_tokens <= ticket.num_tokens and ticket.cached_tokens % tokens == 0):
        raise TransferError(f"ticket {nonce:x} asks for tokens {ticket.cached_tokens}…{ticket.num_tokens}; the first must start a page")
    if not 0 < ticket.deadline_s < float("inf"):
        raise TransferError(f"ticket {nonce:x} has {ticket.deadline_s} s left")
    if len(ticket.pages) % 4 or len(ticket.pages) // 4 < -(-ticket.num_tokens // tokens):
        raise TransferError(f"ticket {nonce:x} has {len(ticket.pages) / 4:g} pages, too few for {ticket.num_tokens} tokens")
    pages = unpack_tokens(ticket.pages)
    writable = pages[page_slice(ticket.cached_tokens, ticket.num_tokens - ticket.cached_tokens, tokens)]
    if len(set(writable)) != len(writable) or min(writable, default=0) < 0:
        raise TransferError(f"ticket {nonce:x} names a page twice or a negative page")
    return pages

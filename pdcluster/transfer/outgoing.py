"""What a Writer keeps of a ticket and its chunks, and what must be right about a ticket before it is opened. Plain state; rules in `session`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcluster.errors import TransferError
from pdcluster.lifecycle import Writing
from pdcluster.messages import ChunkEntry, Leg, Ticket, TokenLogprobs
from pdcluster.transfer.base import Peer
from pdcluster.transfer.chunks import page_slice
from pdcluster.transfer.geometry import Course, PageShape, Part, join_runs_in_parts, offsets, piece_of, pieces_per_block
from pdcluster.transfer.runs import RunTable
from pdcluster.transfer.session import Settings, peer_of


@dataclass(slots=True)
class Chunk:
    index: int
    course: Course
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    runs: RunTable
    nbytes: int
    trial: int = 0
    path: str = ""
    """The backend that wrote it last; began: when; tries: how often each did. See ladder."""
    began: float = 0.0
    tries: dict[str, int] = field(default_factory=dict)
    spent: set[str] = field(default_factory=set)
    """Backends that are not tried again for it."""
    retries: str = ""
    """Why it must be written again, until it is."""
    digest: int = 0
    done: bool = False

    def entry(self) -> ChunkEntry:
        """What the Commit says of it."""
        return ChunkEntry(self.index, self.first_token, self.num_tokens, self.first_layer, self.num_layers, self.nbytes, self.digest, self.trial)


class Push(NamedTuple):
    """Layers [first_layer, end_layer) of tokens [start, end) are ready. pages: ours, from the request's page number first_page on."""

    pages: NDArray[np.int64]
    first_page: int
    start: int
    end: int
    first_layer: int
    end_layer: int


@dataclass(slots=True)
class Flight:
    nonce: int
    chunk: int
    backend: str
    nbytes: int
    runs: int
    is_unknown: bool = False


@dataclass(slots=True)
class Outgoing:
    """One ticket. `backends`: what both ends have, best first; a chunk may go by any of them. `theirs`: the reader's pages; `block_tokens`: see
    geometry."""

    ticket: Ticket
    peer: Peer
    pages: NDArray[np.int64]
    backends: list[str]
    deadline: float
    theirs: PageShape
    block_tokens: int
    courses: tuple[Course, ...]
    next_token: int
    """Tokens before it were pushed with all their layers."""
    layered_end: int = 0
    next_layer: int = 0
    """Of tokens [next_token, layered_end), layers before next_layer were pushed."""
    state: Writing = Writing.OPEN
    chunks: list[Chunk] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    lost: set[str] = field(default_factory=set)
    """Backends by which a write was LOST."""
    reason: str = ""
    finished: tuple[int | None, TokenLogprobs | None] | None = None
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

    @property
    def adverts(self) -> dict[str, bytes]:
        """By backend, as the reader gave them with this ticket."""
        return dict(self.ticket.reader.adverts)

    def main_path(self) -> str:
        """The backend that carried most of it."""
        if len(self.backends) == 1:
            return self.backends[0]
        carried: Counter[str] = Counter()
        for chunk in self.chunks:
            carried[chunk.path] += chunk.nbytes
        return max(carried, key=lambda name: carried[name], default=self.backends[0])

    def legs(self) -> tuple[Leg, ...]:
        """What the Commit says: every leg with its chunks."""
        chunks: dict[Course, list[ChunkEntry]] = {course: [] for course in self.courses}
        for chunk in self.chunks:
            chunks[chunk.course].append(chunk.entry())
        return tuple(
            Leg(course.writer_rank, course.reader_rank, course.first_head, course.end_head - course.first_head, tuple(entries))
            for course, entries in chunks.items()
        )


def cut(ours: PageShape, outgoing: Outgoing, course: Course, push: Push, settings: Settings) -> Iterator[tuple[Part, RunTable]]:
    """One leg of a push, in parts of bounded bytes and runs."""
    block, theirs = outgoing.block_tokens, outgoing.theirs
    first, end = push.start // block, -(-push.end // block)
    whole = Part(block, first, end, push.first_layer, push.end_layer, course.first_head, course.end_head)
    piece = min(piece_of(ours, course.writer_rank, whole), piece_of(theirs, course.reader_rank, whole))
    starts, nbytes = offsets(ours, course.writer_rank, push.pages, push.first_page, whole, piece)
    targets, _ = offsets(theirs, course.reader_rank, outgoing.pages, 0, whole, piece)
    pieces_each = pieces_per_block(ours, whole, piece)
    ends = _ends(end - first, pieces_each * nbytes, pieces_each, settings)
    runs = join_runs_in_parts(starts, targets, nbytes, [each * pieces_each for each in ends])
    if len(ends) == 1:
        yield whole, runs[0]
        return
    for start, stop, each in zip((0, *ends), ends, runs, strict=False):
        yield whole._replace(first_block=first + start, end_block=first + stop), each


def _ends(blocks: int, block_bytes: int, block_runs: int, settings: Settings) -> list[int]:
    """Where the chunks of a push end, in blocks: even ones, and as few as the bounds allow, since each costs time of its own. The media let a reader
    digest what came of a chunk while the rest comes."""
    most = max(1, min(settings.chunk_bytes // block_bytes, settings.chunk_runs // block_runs))
    parts = -(-blocks // most)
    return [blocks * part // parts for part in range(1, parts + 1)]


@lru_cache(maxsize=64)
def _reshaped(shape: PageShape, page_tokens: int, ranks: int) -> PageShape:
    return replace(shape, page_tokens=page_tokens, ranks=ranks)


def checked_shape(ticket: Ticket, shape: PageShape, block_tokens: int) -> PageShape:
    """The reader's pages, or TransferError when its KV is not of our kind. Page sizes and ranks may differ; but pages that have only a few tokens
    in common with ours would cost a run per layer and head of each, in the node's one loop, so they are whole blocks."""
    if ticket.ranks < 1 or (shape.heads % ticket.ranks and ticket.ranks % shape.heads):
        raise TransferError(f"ticket {ticket.nonce:x} is of {ticket.ranks} ranks, over which {shape.heads} kv heads cannot be dealt out evenly")
    theirs = _reshaped(shape, ticket.page_tokens, ticket.ranks)
    if ticket.page_tokens % block_tokens:
        raise TransferError(f"ticket {ticket.nonce:x} has pages of {ticket.page_tokens} tokens, no multiple of this cluster's {block_tokens}")
    if ticket.page_tokens < 1 or ticket.page_bytes != theirs.page_bytes:
        raise TransferError(
            f"ticket {ticket.nonce:x} has pages of {ticket.page_tokens} tokens and {ticket.page_bytes} bytes, with this node's model and dtype they "
            f"would have {theirs.page_bytes}; both nodes need the same"
        )
    return theirs


def checked_pages(ticket: Ticket, me: Peer) -> NDArray[np.int64]:
    """The ticket's page ids, or TransferError when anything about it is wrong."""
    nonce, tokens = ticket.nonce, ticket.page_tokens
    if peer_of(ticket.writer) != me:
        raise TransferError(f"ticket {nonce:x} is for boot {ticket.writer.incarnation} of {ticket.writer.node}, this is {me.incarnation}")
    if not (ticket.num_tokens > 0 and 0 <= ticket.cached_tokens <= ticket.num_tokens and ticket.cached_tokens % tokens == 0):
        raise TransferError(f"ticket {nonce:x} asks for tokens {ticket.cached_tokens}…{ticket.num_tokens}; the first must start a page")
    if not 0 < ticket.deadline_s < float("inf"):
        raise TransferError(f"ticket {nonce:x} has {ticket.deadline_s} s left")
    if len(ticket.pages) % 4 or len(ticket.pages) // 4 < -(-ticket.num_tokens // tokens):
        raise TransferError(f"ticket {nonce:x} has {len(ticket.pages) / 4:g} pages, too few for {ticket.num_tokens} tokens")
    pages = np.frombuffer(ticket.pages, dtype=np.int32).astype(np.int64)
    writable = pages[page_slice(ticket.cached_tokens, ticket.num_tokens - ticket.cached_tokens, tokens)].tolist()
    if min(writable, default=0) < 0 or len(set(writable)) < len(writable):
        raise TransferError(f"ticket {nonce:x} names a page twice or a negative page")
    return pages

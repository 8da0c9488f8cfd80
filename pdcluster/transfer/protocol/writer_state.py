"""What a Writer keeps of a ticket and its chunks, and what a ticket must fulfil before it is opened. Pure state; rules
in `session`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import TransferError
from pdcluster.core.lifecycle import Writing
from pdcluster.core.messages import ChunkEntry, Leg, Ticket, TokenLogprobs
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.copying.page_pairs import PageRun, TicketPages, are_distinct, paired, unpack_pages
from pdcluster.transfer.layout.geometry import (
    Contiguity,
    Course,
    PageShape,
    Part,
    common_block,
    join_runs_in_parts,
    offsets,
    piece_of,
    pieces_per_block,
    plan_courses,
)
from pdcluster.transfer.layout.runs import RunTable
from pdcluster.transfer.protocol.session import Settings


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
    # The backend that wrote the chunk last; began: when; tries: by backend. See `ladder`.
    path: str = ""
    began: float = 0.0
    tries: dict[str, int] = field(default_factory=dict)
    # Backends that are not tried again for the chunk.
    spent: set[str] = field(default_factory=set)
    # Why the chunk must be written again; empty when it need not.
    retries: str = ""
    digest: int = 0
    done: bool = False

    def entry(self) -> ChunkEntry:
        """The chunk's entry in the Commit."""
        return ChunkEntry(
            self.index,
            self.first_token,
            self.num_tokens,
            self.first_layer,
            self.num_layers,
            self.nbytes,
            self.digest,
            self.trial,
        )


class Push(NamedTuple):
    """Layers [first_layer, end_layer) of tokens [start, end) are ready. pages: ours, from the request's page number
    first_page.
    """

    pages: NDArray[np.int64]
    first_page: int
    start: int
    end: int
    first_layer: int
    end_layer: int


@dataclass(slots=True)
class ChunkInFlight:
    nonce: int
    chunk: int
    backend: str
    nbytes: int
    runs: int
    is_unknown: bool = False


class PageFit(NamedTuple):
    """What readers with pages of one kind have in common.
    theirs: their pages.
    block_tokens: see `geometry`.
    pieces: for each course, the largest piece that is contiguous at both ends.
    """

    theirs: PageShape
    page_bytes: int
    block_tokens: int
    courses: tuple[Course, ...]
    pieces: tuple[Contiguity, ...]


@dataclass(slots=True)
class Outgoing:
    """One ticket. adverts: of the common media, best first, as the reader gave them with this ticket; a chunk may use
    any of them.
    """

    ticket: Ticket
    peer: Peer
    pages: TicketPages
    adverts: dict[str, bytes]
    backends: list[str]
    deadline: float
    fit: PageFit
    # All earlier tokens were pushed with all their layers.
    next_token: int
    layered_end: int = 0
    # Of tokens [next_token, layered_end), the earlier layers were pushed.
    next_layer: int = 0
    state: Writing = Writing.OPEN
    chunks: list[Chunk] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    # Backends whose write was LOST.
    lost: set[str] = field(default_factory=set)
    reason: str = ""
    finished: tuple[int | None, TokenLogprobs | None] | None = None
    round: int = 0
    resent: int = 0
    # When Commit is sent next.
    commit_at: float | None = None
    give_up_at: float | None = None
    busy_from: float = 0.0
    busy_s: float = 0.0
    first_write: float | None = None
    last_write: float = 0.0
    finish_time: float = 0.0

    def main_path(self) -> str:
        """The backend that carried most of the ticket."""
        if len(self.backends) == 1:
            return self.backends[0]
        carried: Counter[str] = Counter()
        for chunk in self.chunks:
            carried[chunk.path] += chunk.nbytes
        return max(carried, key=lambda name: carried[name], default=self.backends[0])

    def legs(self) -> tuple[Leg, ...]:
        """Every leg with its chunks, as the Commit names them."""
        courses = self.fit.courses
        chunks: dict[Course, list[ChunkEntry]] = {course: [] for course in courses}
        for chunk in self.chunks:
            chunks[chunk.course].append(chunk.entry())
        return tuple([
            Leg(each.writer_rank, each.reader_rank, each.first_head, each.end_head - each.first_head,
            tuple(chunks[each])) for each in courses
        ])  # fmt: skip


def cut(ours: PageShape, outgoing: Outgoing, leg: int, push: Push, settings: Settings) -> list[tuple[Part, RunTable]]:
    """Cut one leg of a push into parts of bounded bytes and runs. leg: number of the course."""
    fit = outgoing.fit
    course, piece, block = fit.courses[leg], fit.pieces[leg], fit.block_tokens
    first, end = push.start // block, -(-push.end // block)
    whole = Part(block, first, end, push.first_layer, push.end_layer, course.first_head, course.end_head)
    if piece is Contiguity.LAYERS:
        layer_bytes = fit.page_bytes // ours.num_layers
        nbytes = (push.end_layer - push.first_layer) * layer_bytes
        ends = _ends(end - first, nbytes, 1, settings)
        runs = paired(
            PageRun(push.pages, first - push.first_page, outgoing.pages, first),
            fit.page_bytes,
            push.first_layer * layer_bytes,
            nbytes,
            ends,
        )
    else:
        ends, runs = _cut_inside(ours, outgoing, course, push, whole, piece, settings)
    if len(ends) == 1:
        return [(whole, runs[0])]
    parts = [whole._replace(first_block=first + start, end_block=first + stop) for start, stop in pairwise((0, *ends))]
    return list(zip(parts, runs, strict=True))


def _cut_inside(
    ours: PageShape, outgoing: Outgoing, course: Course, push: Push, whole: Part, piece: Contiguity, settings: Settings
) -> tuple[list[int], list[RunTable]]:
    """Cut pieces that are not whole layers of pages. Yields where the chunks end, in blocks, and the runs of each."""
    starts, nbytes = offsets(ours, course.writer_rank, push.pages, push.first_page, whole, piece)
    targets, _ = offsets(outgoing.fit.theirs, course.reader_rank, outgoing.pages.astype(np.int64), 0, whole, piece)
    pieces_each = pieces_per_block(ours, whole, piece)
    ends = _ends(whole.end_block - whole.first_block, pieces_each * nbytes, pieces_each, settings)
    return ends, join_runs_in_parts(starts, targets, nbytes, [each * pieces_each for each in ends])


def _ends(blocks: int, block_bytes: int, block_runs: int, settings: Settings) -> list[int]:
    """Where the chunks of a push end, in blocks. Chunks are even and as few as the bounds allow, since each has fixed
    costs. While one travels, the media let the reader digest the one before.
    """
    most = max(1, min(settings.chunk_bytes // block_bytes, settings.chunk_runs // block_runs))
    parts = -(-blocks // most)
    return [blocks * part // parts for part in range(1, parts + 1)]


@lru_cache(maxsize=64)
def _reshaped(shape: PageShape, page_tokens: int, ranks: int) -> PageShape:
    return replace(shape, page_tokens=page_tokens, ranks=ranks)


def checked_shape(ticket: Ticket, shape: PageShape, block_tokens: int) -> PageShape:
    """The reader's pages, or TransferError when its KV is of another kind. Page sizes and ranks may differ. Pages must
    be multiples of `block_tokens`: otherwise each layer and head of a few tokens would cost a run in the node's loop.
    """
    if ticket.ranks < 1 or (shape.heads % ticket.ranks and ticket.ranks % shape.heads):
        raise TransferError(
            f"ticket {ticket.nonce:x} is of {ticket.ranks} ranks, over which {shape.heads} kv heads cannot be dealt "
            "out evenly"
        )
    theirs = _reshaped(shape, ticket.page_tokens, ticket.ranks)
    if ticket.page_tokens % block_tokens:
        raise TransferError(
            f"ticket {ticket.nonce:x} has pages of {ticket.page_tokens} tokens, no multiple of this cluster's "
            f"{block_tokens}"
        )
    if ticket.page_tokens < 1 or ticket.page_bytes != theirs.page_bytes:
        raise TransferError(
            f"ticket {ticket.nonce:x} has pages of {ticket.page_tokens} tokens and {ticket.page_bytes} bytes, with "
            "this node's model and dtype they "
            f"would have {theirs.page_bytes}; both nodes need the same"
        )
    return theirs


def fit_of(ticket: Ticket, shape: PageShape, block_tokens: int) -> PageFit:
    """block_tokens: readers' pages must be multiples of it. Raises TransferError as `checked_shape` does."""
    theirs = checked_shape(ticket, shape, block_tokens)
    block, courses = common_block(shape, theirs.page_tokens), plan_courses(theirs.heads, shape.ranks, theirs.ranks)
    return PageFit(
        theirs, theirs.page_bytes, block, courses, tuple(_piece(shape, theirs, block, course) for course in courses)
    )


def _piece(ours: PageShape, theirs: PageShape, block_tokens: int, course: Course) -> Contiguity:
    some = Part(block_tokens, 0, 1, 0, 1, course.first_head, course.end_head)  # tokens and layers do not matter here
    return min(piece_of(ours, course.writer_rank, some), piece_of(theirs, course.reader_rank, some))


def checked_pages(ticket: Ticket, me: Peer) -> TicketPages:
    """The ticket's page ids. Raises TransferError for any error in it."""
    nonce, tokens = ticket.nonce, ticket.page_tokens
    if (ticket.writer.node, ticket.writer.incarnation) != me:
        raise TransferError(
            f"ticket {nonce:x} is for boot {ticket.writer.incarnation} of {ticket.writer.node}, this is "
            f"{me.incarnation}"
        )
    if not (
        ticket.num_tokens > 0 and 0 <= ticket.cached_tokens <= ticket.num_tokens and ticket.cached_tokens % tokens == 0
    ):
        raise TransferError(
            f"ticket {nonce:x} asks for tokens {ticket.cached_tokens}…{ticket.num_tokens}; the first must start a page"
        )
    if not 0 < ticket.deadline_s < float("inf"):
        raise TransferError(f"ticket {nonce:x} has {ticket.deadline_s} s left")
    if len(ticket.pages) % 4 or len(ticket.pages) // 4 < -(-ticket.num_tokens // tokens):
        raise TransferError(
            f"ticket {nonce:x} has {len(ticket.pages) / 4:g} pages, too few for {ticket.num_tokens} tokens"
        )
    pages = unpack_pages(ticket.pages)
    if not are_distinct(pages, ticket.cached_tokens // tokens, -(-ticket.num_tokens // tokens)):
        raise TransferError(f"ticket {nonce:x} names a page twice or a negative page")
    return pages

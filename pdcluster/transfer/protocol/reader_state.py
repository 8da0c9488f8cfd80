"""What a Reader keeps of a ticket and of a repeated Abort, and whether a Commit covers all of a ticket's KV. Pure;
rules in `session`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import IntegrityError
from pdcluster.core.lifecycle import Reading
from pdcluster.core.messages import ChunkEntry, Commit, CommitAck, Endpoint, Leg, Ticket
from pdcluster.transfer.backends.base import Arrival, Peer
from pdcluster.transfer.layout.geometry import (
    Offsets,
    PageShape,
    Part,
    are_pieces,
    join_spans,
    offsets,
    part_bytes,
    piece_of,
)
from pdcluster.transfer.layout.runs import SpanTable, chained, span_table
from pdcluster.transfer.layout.spans import page_slice
from pdcluster.transfer.protocol.rank_memory import Answers, PendingAnswer
from pdcluster.transfer.protocol.session import TransferStats


@dataclass(frozen=True, slots=True)
class Landing:
    """A chunk of a Commit, and its position on a rank."""

    entry: ChunkEntry
    rank: int
    part: Part


@dataclass(slots=True)
class Incoming:
    """One ticket.
    writable: the pages the writer may write, in token order.
    whole: see `in_token_order`.
    missing: chunks of an accepted Commit whose stamp has not arrived.
    unchecked: chunks without a digest yet.
    repeated: chunks of which more than one write arrived.
    """

    ticket: Ticket
    writer: Peer
    writable: Offsets
    whole: SpanTable
    opened: float
    deadline: float
    state: Reading = Reading.OPEN
    arrived: dict[int, Arrival] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    round: int = 0
    commit: Commit | None = None
    commit_time: float = 0.0
    answers: dict[int, CommitAck] = field(default_factory=dict)
    missing: list[ChunkEntry] | None = None
    # Of all chunks of the Commit, once it was found to cover the ticket.
    landings: list[Landing] = field(default_factory=list)
    unchecked: deque[Landing] | None = None
    # Requested digests of chunks that were taken out of `unchecked`.
    asked: list[tuple[ChunkEntry, PendingAnswer]] = field(default_factory=list)
    permitted: Answers = ()
    # Complete once every rank has done its backends' last orders; None while the permit stands.
    revoked: Answers | None = None
    # Chunks in the Commit.
    promised: int = 0
    # Whether every chunk landed where the Commit says. Only checked when there are digests.
    is_in_place: bool = False
    bad: list[int] = field(default_factory=list)
    resent: int = 0
    unfenced: set[str] = field(default_factory=set)
    first_arrival: float | None = None
    last_arrival: float = 0.0
    # Includes chunks that were requested again.
    arrived_bytes: int = 0
    # The legs of the expected Commit, when exactly the whole ticket arrived; see `legs_seen`.
    seen: tuple[Leg, ...] = ()


@dataclass(slots=True)
class AbortNotice:
    """An Abort that is repeated until it is answered (R8). since: when it was due first."""

    writer: Endpoint
    reason: str
    until: float
    send_at: float
    since: float


@dataclass(slots=True)
class GoneBoot:
    """A writer's boot that was declared dead, and its Aborts that wait for an answer. Each call dials it, so the pauses
    between calls double.
    """

    call_at: float
    pause_s: float

    def called(self, now: float, longest_s: float) -> None:
        self.call_at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, longest_s)


def writable_pages(
    shape: PageShape, is_owned: NDArray[np.bool_], pages: Sequence[int], num_tokens: int, cached_tokens: int
) -> Offsets:
    """The pages that a writer may write. Every mistake here is our own node's."""
    tokens = shape.page_tokens
    if (
        not 0 <= cached_tokens <= num_tokens
        or num_tokens < 1
        or cached_tokens % tokens
        or len(pages) < -(-num_tokens // tokens)
    ):
        raise IntegrityError(
            f"cannot issue a ticket for tokens {cached_tokens}…{num_tokens} in {len(pages)} pages of {tokens} tokens"
        )
    wanted = np.array(pages[page_slice(cached_tokens, num_tokens - cached_tokens, tokens)], dtype=np.int64)
    ascending = np.sort(wanted)
    if len(wanted) and not 0 <= ascending[0] <= ascending[-1] < len(is_owned):
        raise IntegrityError(f"a page of {ascending[0]}…{ascending[-1]} does not exist, there are {len(is_owned)}")
    if is_owned[wanted].any():
        raise IntegrityError(f"page {wanted[is_owned[wanted]][0]} belongs to a ticket already")
    if (ascending[1:] == ascending[:-1]).any():
        raise IntegrityError(f"a page appears twice in {wanted.tolist()}")
    return wanted


def stats_of(incoming: Incoming, commit: Commit) -> TransferStats:
    """Statistics of a verified ticket."""
    started = incoming.last_arrival if incoming.first_arrival is None else incoming.first_arrival
    nbytes, seconds = sum(entry.nbytes for leg in commit.legs for entry in leg.chunks), incoming.last_arrival - started
    return TransferStats(
        backend="",
        nbytes=nbytes,
        chunks=len(incoming.arrived),
        resent=incoming.resent,
        transfer_s=seconds,
        exposed_s=0.0,
    )


def pieces(shape: PageShape, incoming: Incoming, rank: int, part: Part) -> tuple[Offsets, int]:
    """Offsets of a part's pieces in a rank's memory, in wire order, and the bytes of each piece."""
    return offsets(
        shape,
        rank,
        incoming.writable,
        incoming.ticket.cached_tokens // shape.page_tokens,
        part,
        piece_of(shape, rank, part),
    )


def spans_of(shape: PageShape, incoming: Incoming, landing: Landing) -> SpanTable:
    return join_spans(*pieces(shape, incoming, landing.rank, landing.part))


def in_token_order(shape: PageShape, writable: Offsets) -> SpanTable:
    """Offsets of a ticket's whole pages in a rank's memory, with neighbours joined. Computed when the ticket is issued,
    so that the last arrival only needs a comparison.
    """
    return join_spans(writable * shape.page_bytes, shape.page_bytes)


def legs_seen(shape: PageShape, incoming: Incoming, region: int, *, digests: bool) -> tuple[Leg, ...]:
    """The legs that a matching Commit would name. Empty unless the arrived chunks are exactly the whole ticket, each
    came once and, with digests, each lies where the ticket's tokens are. Computed while the Commit travels: an equal
    Commit then fulfils R2 but for the revoked permit.
    """
    ticket, tokens = incoming.ticket, shape.page_tokens
    at, end = ticket.cached_tokens // tokens, -(-ticket.num_tokens // tokens)
    if shape.ranks > 1 or incoming.arrived_bytes != (end - at) * shape.page_bytes or incoming.repeated:
        return ()
    row = [incoming.arrived[index] for index in sorted(incoming.arrived)]
    if digests and not (all(each.region == region for each in row) and _lie_in_order(row, incoming.whole)):
        return ()
    entries = []
    for each in row:
        stamp, digest = each.stamp, each.digest if digests else 0
        count, rest = divmod(stamp.nbytes, shape.page_bytes)
        if rest or not count or digest is None:
            return ()
        num_tokens = min((at + count) * tokens, ticket.num_tokens) - at * tokens
        entries.append(
            ChunkEntry(stamp.chunk, at * tokens, num_tokens, 0, shape.num_layers, stamp.nbytes, digest, stamp.trial)
        )
        at += count
    return () if at != end else (Leg(0, 0, 0, shape.heads, tuple(entries)),)


def _lie_in_order(row: Sequence[Arrival], whole: SpanTable) -> bool:
    """Whether these chunks, in order, hold the bytes of `whole`, each as many as its stamp says. For a single chunk the
    caller checks the stamp.
    """
    if len(row) == 1:
        spans = span_table(row[0].spans)
        return spans == whole or spans.joined() == whole
    tables = [span_table(each.spans) for each in row]
    return [table.nbytes for table in tables] == [each.stamp.nbytes for each in row] and chained(
        tables
    ).joined() == whole


def is_as_seen(shape: PageShape, incoming: Incoming, commit: Commit) -> bool:
    """Whether the Commit equals what was seen. False while nothing was seen, because a Commit may also have no legs."""
    return len(incoming.seen) > 0 and commit.block_tokens == shape.page_tokens and commit.legs == incoming.seen


def are_in_place(shape: PageShape, incoming: Incoming, landings: Sequence[Landing], region: int) -> bool:
    """Whether these chunks landed exactly where the Commit says. region: of rank 0. Neighbours in a row are checked
    together.
    """
    for rank, part, row in _rows(landings):
        arrivals = [incoming.arrived[each.entry.index] for each in row]
        tables = [span_table(arrival.spans) for arrival in arrivals]
        if any(arrival.region != region + rank for arrival in arrivals) or [table.nbytes for table in tables] != [
            each.entry.nbytes for each in row
        ]:
            return False
        if not are_pieces(chained(tables), *pieces(shape, incoming, rank, part)):
            return False
    return True


def _rows(landings: Iterable[Landing]) -> Iterator[tuple[int, Part, list[Landing]]]:
    """Group chunks of equal layers and heads whose blocks follow each other."""
    row: list[Landing] = []
    for landing in landings:
        if row and not _follows(row[-1], landing):
            yield _joined(row)
            row = []
        row.append(landing)
    if row:
        yield _joined(row)


def _follows(one: Landing, other: Landing) -> bool:
    first, second = one.part, other.part
    same = (first.first_layer, first.end_layer, first.first_head, first.end_head) == (
        second.first_layer,
        second.end_layer,
        second.first_head,
        second.end_head,
    )
    return same and one.rank == other.rank and first.end_block == second.first_block


def _joined(row: list[Landing]) -> tuple[int, Part, list[Landing]]:
    return row[0].rank, row[0].part._replace(end_block=row[-1].part.end_block), row


def part_of(commit: Commit, leg: Leg, entry: ChunkEntry) -> Part:
    """What a chunk holds. Valid only for a Commit that `covers_all` accepted or is checking."""
    block = commit.block_tokens
    return Part(
        block,
        entry.first_token // block,
        -(-(entry.first_token + entry.num_tokens) // block),
        entry.first_layer,
        entry.first_layer + entry.num_layers,
        leg.first_head,
        leg.first_head + leg.num_heads,
    )


def is_in_order(shape: PageShape, ticket: Ticket, commit: Commit) -> bool:
    """Whether the Commit holds the ticket in whole pages of one rank, chunk after chunk. Most do, and this check needs
    no arrays.
    """
    if shape.ranks > 1 or len(commit.legs) != 1 or commit.block_tokens != shape.page_tokens:
        return False
    leg, at = commit.legs[0], ticket.cached_tokens
    if (leg.reader_rank, leg.first_head, leg.num_heads) != (0, 0, shape.heads):
        return False
    for entry in leg.chunks:
        end = entry.first_token + entry.num_tokens
        num_pages = -(-entry.num_tokens // shape.page_tokens)
        is_whole = (entry.first_layer, entry.num_layers, entry.nbytes) == (
            0,
            shape.num_layers,
            num_pages * shape.page_bytes,
        )
        if (
            entry.first_token != at
            or entry.num_tokens < 1
            or not is_whole
            or (end % shape.page_tokens and end != ticket.num_tokens)
        ):
            return False
        at = end
    return at == ticket.num_tokens and len({entry.index for entry in leg.chunks}) == len(leg.chunks)


def covers_all(shape: PageShape, ticket: Ticket, commit: Commit) -> bool:
    """R2: each head of each layer of each block arrives once on every rank, in whole blocks, and the byte counts
    fit.
    """
    return is_in_order(shape, ticket, commit) or covers_each_cell(shape, ticket, commit)


def covers_each_cell(shape: PageShape, ticket: Ticket, commit: Commit) -> bool:
    """As `covers_all`, for chunks in any order, of any blocks, layers, heads and ranks."""
    block = commit.block_tokens
    if block < 1 or shape.page_tokens % block:
        return False
    first = ticket.cached_tokens // block
    cells = (-(-ticket.num_tokens // block) - first, shape.num_layers, shape.rank_heads)
    seen = [np.zeros(cells, dtype=np.bool_) for _ in range(shape.ranks)]
    for leg in commit.legs:
        if not 0 <= leg.reader_rank < shape.ranks or not all(
            _take(shape, ticket, commit, leg, entry, seen[leg.reader_rank]) for entry in leg.chunks
        ):
            return False
    indexes = [entry.index for leg in commit.legs for entry in leg.chunks]
    return all(bool(each.all()) for each in seen) and len(set(indexes)) == len(indexes)


def _take(
    shape: PageShape, ticket: Ticket, commit: Commit, leg: Leg, entry: ChunkEntry, seen: NDArray[np.bool_]
) -> bool:
    """Mark what a chunk holds. False when it lies outside the ticket, was marked before, or has another size."""
    part, block, end = part_of(commit, leg, entry), commit.block_tokens, entry.first_token + entry.num_tokens
    first_head, end_head = shape.heads_of(leg.reader_rank)
    in_blocks = entry.first_token % block == 0 and (
        end == ticket.num_tokens or (end % block == 0 and end < ticket.num_tokens)
    )
    in_layers = 0 <= part.first_layer < part.end_layer <= shape.num_layers
    in_heads = first_head <= part.first_head < part.end_head <= end_head
    if (
        not in_blocks
        or not in_layers
        or not in_heads
        or entry.num_tokens < 1
        or entry.first_token < ticket.cached_tokens
    ):
        return False
    first = ticket.cached_tokens // block
    cells = seen[
        part.first_block - first : part.end_block - first,
        part.first_layer : part.end_layer,
        part.first_head - first_head : part.end_head - first_head,
    ]
    if cells.any() or entry.nbytes != part_bytes(shape, part):
        return False
    cells[:] = True
    return True

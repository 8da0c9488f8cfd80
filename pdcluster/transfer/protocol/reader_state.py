"""What a Reader keeps of a ticket and of the Commit that it checks. Pure; rules in `session`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import IntegrityError
from pdcluster.core.lifecycle import CHECKING, Checking, Reading
from pdcluster.core.messages import ChunkEntry, Commit, CommitAck, Leg, Ticket
from pdcluster.transfer.backends.base import Arrival, Peer
from pdcluster.transfer.layout.geometry import (
    Offsets,
    PageShape,
    Part,
    are_pieces,
    join_spans,
    offsets,
    piece_of,
)
from pdcluster.transfer.layout.runs import SpanTable, chained, span_table
from pdcluster.transfer.layout.spans import page_slice
from pdcluster.transfer.protocol.commit_coverage import part_of
from pdcluster.transfer.protocol.rank_memory import Answers, PendingAnswer, are_here
from pdcluster.transfer.protocol.session import TransferStats


@dataclass(frozen=True, slots=True)
class Landing:
    """A chunk of a Commit, and its position on a rank."""

    entry: ChunkEntry
    rank: int
    part: Part


@dataclass(slots=True)
class CommitCheck:
    """One Commit of a ticket, from its arrival to its answer.
    landings: of all its chunks, once it was accepted.
    missing: those whose stamp has not arrived.
    unchecked: those without a digest yet; asked: the requested digests of others.
    """

    commit: Commit
    since: float
    state: Checking = Checking.RECEIVED
    landings: list[Landing] = field(default_factory=list)
    missing: list[Landing] = field(default_factory=list)
    # Complete once every rank has done its backends' last orders.
    revoked: Answers = ()
    unchecked: deque[Landing] = field(default_factory=deque)
    asked: list[tuple[ChunkEntry, PendingAnswer]] = field(default_factory=list)
    # Whether every chunk landed where the Commit says. Only checked when there are digests.
    is_in_place: bool = False

    def accept(self) -> None:
        """It covers its ticket, so what its chunks hold can be told."""
        legs, commit = self.commit.legs, self.commit
        self.landings = [
            Landing(entry, leg.reader_rank, part_of(commit, leg, entry)) for leg in legs for entry in leg.chunks
        ]
        self.missing = self.landings
        self.advance("accept")

    def advance(self, event: str) -> None:
        self.state = CHECKING[self.state, event]

    @property
    def is_answered(self) -> bool:
        """Whether every digest is there."""
        is_asked = self.state is Checking.DIGESTING and not self.unchecked
        return is_asked and are_here([answer for _, answer in self.asked])

    @property
    def num_digesting_bytes(self) -> int:
        return sum(entry.nbytes for entry, answer in self.asked if answer.value is None)


@dataclass(slots=True)
class Incoming:
    """One ticket.
    writable: the pages the writer may write, in token order.
    whole: see `in_token_order`.
    repeated: chunks of which more than one write arrived.
    check: of the Commit that waits for its answer.
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
    check: CommitCheck | None = None
    answers: dict[int, CommitAck] = field(default_factory=dict)
    permitted: Answers = ()
    resent: int = 0
    unfenced: set[str] = field(default_factory=set)
    first_arrival: float | None = None
    last_arrival: float = 0.0
    # Includes chunks that were requested again.
    arrived_bytes: int = 0
    # The legs of the expected Commit, when exactly the whole ticket arrived; see `legs_seen`.
    seen: tuple[Leg, ...] = ()

    def has_arrived(self, landing: Landing) -> bool:
        arrival = self.arrived.get(landing.entry.index)
        return arrival is not None and arrival.stamp.nbytes == landing.entry.nbytes

    def digest_on_arrival(self, check: CommitCheck, landing: Landing) -> int | None:
        """The digest that the medium took when the chunk landed, if it still holds (R2): no later write may have
        changed the bytes.

        The Commit names the chunk's last try. Every earlier try had failed before it began, so it can no longer land
        (base, 3). The digest therefore holds for the one arrival of that try, provided every chunk landed exactly where
        the Commit says: then no other chunk has overwritten it.
        """
        arrival = self.arrived[landing.entry.index]
        is_last = arrival.stamp.trial == landing.entry.trial and len(self.arrived) == len(check.landings)
        return arrival.digest if is_last and check.is_in_place and not self.repeated else None


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

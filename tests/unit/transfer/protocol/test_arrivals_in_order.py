"""The short way to see that a Commit covers its ticket and that all of it lies in place: it says yes only where the
long way does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster.core.messages import ChunkEntry, Commit, Endpoint, Leg, Ticket, pack_tokens
from pdcluster.transfer.backends.base import Arrival, Peer, Stamp
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.protocol.commit_coverage import covers_each_cell, is_in_order, part_of
from pdcluster.transfer.protocol.reader_state import (
    Incoming,
    Landing,
    are_in_place,
    in_token_order,
    is_as_seen,
    legs_seen,
)

TOKENS, LAYERS, HEADS = 4, 3, 2
SHAPE = PageShape(TOKENS, LAYERS, 2, HEADS, 8)
PAGES = [7, 8, 3, 20, 21]
FIELDS = ("first_token", "num_tokens", "first_layer", "num_layers", "nbytes", "index")


def ticket_of(cached: int, num_tokens: int) -> Ticket:
    end = Endpoint("d", "1", "")
    return Ticket(
        5,
        "r",
        0,
        end,
        Endpoint("p", "1", ""),
        0,
        pack_tokens(PAGES),
        TOKENS,
        SHAPE.page_bytes,
        num_tokens,
        cached,
        9.0,
        1,
    )


def commit_of(ticket: Ticket, cuts: list[int]) -> Commit:
    """cuts: pages after which a chunk ends."""
    ends = sorted(
        {min(cut * TOKENS, ticket.num_tokens) for cut in cuts if cut * TOKENS > ticket.cached_tokens}
        | {ticket.num_tokens}
    )
    starts = [ticket.cached_tokens, *ends[:-1]]
    pages = [-(-(end - start) // TOKENS) for start, end in zip(starts, ends, strict=True)]
    entries = (
        ChunkEntry(index, start, end - start, 0, LAYERS, count * SHAPE.page_bytes, 1, 1)
        for index, (start, end, count) in enumerate(zip(starts, ends, pages, strict=True))
    )
    return Commit(5, TOKENS, (Leg(0, 0, 0, HEADS, tuple(entries)),), None, None)


def changed(commit: Commit, chunk: int, field: str, by: int) -> Commit:
    entries = list(commit.legs[0].chunks)
    entry = entries[chunk % len(entries)]
    names = ("index", "first_token", "num_tokens", "first_layer", "num_layers", "nbytes", "digest", "trial")
    values = {name: getattr(entry, name) for name in names}
    values[field] += by
    entries[chunk % len(entries)] = ChunkEntry(**values)
    leg = commit.legs[0]
    return Commit(5, commit.block_tokens, (Leg(0, 0, leg.first_head, leg.num_heads, tuple(entries)),), None, None)


@given(st.integers(0, 3), st.integers(13, 20), st.lists(st.integers(1, 4), max_size=3))
def test_whole_pages_in_order_are_seen_without_looking_at_each_cell(
    cached: int, num_tokens: int, cuts: list[int]
) -> None:
    ticket = ticket_of(cached * TOKENS, num_tokens)
    commit = commit_of(ticket, cuts)
    assert is_in_order(SHAPE, ticket, commit) and covers_each_cell(SHAPE, ticket, commit)


@given(
    st.integers(0, 3),
    st.integers(13, 20),
    st.lists(st.integers(1, 4), max_size=3),
    st.integers(0, 3),
    st.sampled_from(FIELDS),
    st.integers(-8, 8),
)
def test_a_commit_with_something_changed_is_never_taken_where_each_cell_says_no(
    cached: int, num_tokens: int, cuts: list[int], chunk: int, field: str, by: int
) -> None:
    ticket = ticket_of(cached * TOKENS, num_tokens)
    commit = changed(commit_of(ticket, cuts), chunk, field, by)
    assert not is_in_order(SHAPE, ticket, commit) or covers_each_cell(SHAPE, ticket, commit)


def test_chunks_with_the_same_number_or_in_another_order_are_left_to_the_long_way() -> None:
    ticket = ticket_of(0, 20)
    commit = commit_of(ticket, [2])
    leg = commit.legs[0]
    for chunks in (tuple(reversed(leg.chunks)), leg.chunks[:1], leg.chunks * 2):
        assert not is_in_order(SHAPE, ticket, Commit(5, TOKENS, (Leg(0, 0, 0, HEADS, chunks),), None, None))
    assert not is_in_order(SHAPE, ticket, changed(commit, 1, "index", -1))


class Arrived:
    """A ticket with all its chunks here; `pages`: where they landed, if not where they belong."""

    def __init__(self, pages: list[int], cuts: list[int]) -> None:
        ticket = ticket_of(0, 20)
        self.commit = commit_of(ticket, cuts)
        writable = np.array(PAGES, dtype=np.int64)
        self.incoming = Incoming(ticket, Peer("p", "1"), writable, in_token_order(SHAPE, writable), 0.0, 9.0)
        for entry in self.commit.legs[0].chunks:
            first = entry.first_token // TOKENS
            spans = tuple(
                (page * SHAPE.page_bytes, SHAPE.page_bytes)
                for page in pages[first : first + -(-entry.num_tokens // TOKENS)]
            )
            self.arrive(Arrival(Stamp(5, entry.index, 1, entry.nbytes), 1, spans))
        leg = self.commit.legs[0]
        self.landings = [Landing(entry, 0, part_of(self.commit, leg, entry)) for entry in leg.chunks]

    def arrive(self, arrival: Arrival) -> None:
        self.incoming.arrived[arrival.stamp.chunk] = arrival
        self.incoming.arrived_bytes += arrival.stamp.nbytes
        self.incoming.seen = legs_seen(SHAPE, self.incoming, 0, digests=True)

    def is_as_seen(self, commit: Commit) -> bool:
        return is_as_seen(SHAPE, self.incoming, commit)

    def are_in_place(self) -> bool:
        return are_in_place(SHAPE, self.incoming, self.landings, 0)


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 4]])
def test_what_landed_in_its_places_is_known_before_its_commit(cuts: list[int]) -> None:
    arrived = Arrived(PAGES, cuts)
    assert arrived.is_as_seen(arrived.commit) and arrived.are_in_place()


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 4]])
def test_what_landed_anywhere_else_is_not_in_place(cuts: list[int]) -> None:
    for pages in ([7, 8, 3, 21, 20], [8, 7, 3, 20, 21], [7, 8, 3, 20, 22]):
        arrived = Arrived(pages, cuts)
        assert not arrived.is_as_seen(arrived.commit) and not arrived.are_in_place()


@given(
    st.integers(0, 3),
    st.integers(13, 20),
    st.lists(st.integers(1, 4), max_size=3),
    st.integers(0, 3),
    st.sampled_from(FIELDS),
    st.integers(-8, 8),
)
def test_what_is_seen_is_the_commit_that_covers_it_and_no_other(
    cached: int, num_tokens: int, cuts: list[int], chunk: int, field: str, by: int
) -> None:
    ticket = ticket_of(cached * TOKENS, num_tokens)
    commit, writable = commit_of(ticket, cuts), np.array(PAGES[cached : -(-num_tokens // TOKENS)], dtype=np.int64)
    incoming = Incoming(ticket, Peer("p", "1"), writable, in_token_order(SHAPE, writable), 0.0, 9.0)
    for entry in commit.legs[0].chunks:
        assert not legs_seen(SHAPE, incoming, 0, digests=False)
        incoming.arrived[entry.index] = Arrival(Stamp(5, entry.index, 1, entry.nbytes))
        incoming.arrived_bytes += entry.nbytes
    incoming.seen = legs_seen(SHAPE, incoming, 0, digests=False)
    without = Commit(
        5, TOKENS, (Leg(0, 0, 0, HEADS, tuple(replace(entry, digest=0) for entry in commit.legs[0].chunks)),), None
    )
    assert is_as_seen(SHAPE, incoming, without)
    assert not by or not is_as_seen(SHAPE, incoming, changed(without, chunk, field, by))


def spoiled(arrived: Arrived, **fields: object) -> tuple[Leg, ...]:
    """What is seen when the second chunk's arrival is another."""
    again = replace(arrived.incoming.arrived[1], **fields)
    arrived.incoming.arrived[1] = again
    return legs_seen(SHAPE, arrived.incoming, 0, digests=True)


def test_what_has_no_digest_or_another_region_or_places_is_not_seen() -> None:
    assert spoiled(Arrived(PAGES, [2]))
    assert not spoiled(Arrived(PAGES, [2]), digest=None)
    assert not spoiled(Arrived(PAGES, [2]), region=1)
    assert not spoiled(Arrived(PAGES, [2]), spans=())


def test_chunks_whose_places_are_cut_otherwise_than_their_stamps_say_are_not_seen() -> None:
    arrived = Arrived(PAGES, [2])
    first, second = arrived.incoming.arrived[0], arrived.incoming.arrived[1]
    arrived.incoming.arrived[0] = replace(first, spans=(*first.spans, second.spans[0]))
    assert not spoiled(arrived, spans=second.spans[1:])


def test_another_digest_than_that_of_the_arrival_is_not_what_was_seen() -> None:
    arrived = Arrived(PAGES, [2])
    assert not arrived.is_as_seen(changed(arrived.commit, 1, "digest", 1)) and not arrived.is_as_seen(
        changed(arrived.commit, 1, "trial", 1)
    )


def test_a_chunk_that_came_once_more_voids_what_was_known() -> None:
    arrived = Arrived(PAGES, [2])
    arrived.incoming.repeated.add(1)
    arrived.incoming.seen = legs_seen(SHAPE, arrived.incoming, 0, digests=True)
    assert not arrived.is_as_seen(arrived.commit)


def test_a_chunk_that_came_to_another_place_voids_what_was_known() -> None:
    arrived = Arrived(PAGES, [2])
    again = arrived.incoming.arrived[1]
    arrived.arrive(
        replace(
            again,
            stamp=replace(again.stamp, trial=2),
            spans=tuple((offset + 64, nbytes) for offset, nbytes in again.spans),
        )
    )
    assert not arrived.is_as_seen(arrived.commit) and not arrived.are_in_place()


def test_a_commit_that_cuts_the_same_bytes_otherwise_is_not_what_was_known() -> None:
    arrived, other = Arrived(PAGES, [2]), Arrived(PAGES, [3])
    other.incoming.arrived = arrived.incoming.arrived
    assert not arrived.is_as_seen(other.commit) and not other.are_in_place()


def test_a_commit_of_other_blocks_is_not_what_was_seen() -> None:
    """Their bytes follow each other in another order."""
    arrived = Arrived(PAGES, [2])
    assert not arrived.is_as_seen(replace(arrived.commit, block_tokens=TOKENS // 2))

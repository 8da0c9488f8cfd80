"""Whether a Commit covers all of a ticket's KV, and what each of its chunks holds. Pure; rules in `session`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.messages import ChunkEntry, Commit, Leg, Ticket
from pdcluster.transfer.layout.geometry import PageShape, Part, part_bytes


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

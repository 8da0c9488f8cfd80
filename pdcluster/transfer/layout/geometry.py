"""Where KV lies in a node's pages, and which runs carry it to pages of another size or rank count. Pure.

A page is [layer][plane][head][token][cell]. Planes are K and V, or one shared latent. Positions are tokens. A *block*
is the largest number of tokens that divides the pages of both ends. The wire order is (block, layer, plane, head,
token, cell), which both ends can walk in their own memory. With equal pages and all heads, that is a page as it lies in
memory. The smallest piece is one head's tokens of a block; there is never a run per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcluster.kv.layout import ITEM_BYTES, KVLayout, head_range
from pdcluster.transfer.layout.runs import RunTable, SpanTable

Offsets = NDArray[np.int64]


class Contiguity(IntEnum):
    """What is contiguous at one end: one head's tokens, several heads of a plane, or whole layers."""

    HEAD = 0
    HEADS = 1
    LAYERS = 2


@dataclass(frozen=True, slots=True)
class PageShape:
    """The shape of a node's pages; every rank has equally many.
    heads: kv heads of the model; a rank's page holds a part of them.
    cell_bytes: one token of one head of one plane.
    """

    page_tokens: int
    num_layers: int
    planes: int
    heads: int
    cell_bytes: int
    ranks: int = 1

    @classmethod
    def of(cls, layout: KVLayout, ranks: int) -> PageShape:
        """layout: with the heads of all ranks."""
        return cls(
            layout.page_tokens,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.head_dim * ITEM_BYTES[layout.dtype],
            ranks,
        )

    @classmethod
    def plain(cls, page_tokens: int, page_bytes: int, num_layers: int = 1) -> PageShape:
        """Pages of one rank of which only the layers are known."""
        return cls(page_tokens, num_layers, 1, 1, page_bytes // num_layers // page_tokens)

    @property
    def rank_heads(self) -> int:
        """Heads in a page of one rank."""
        return max(1, self.heads // self.ranks)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's tokens in a page, in one plane."""
        return self.page_tokens * self.cell_bytes

    @property
    def plane_bytes(self) -> int:
        return self.rank_heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        return self.planes * self.plane_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one rank."""
        return self.num_layers * self.layer_bytes

    def heads_of(self, rank: int) -> tuple[int, int]:
        return head_range(self.heads, rank, self.ranks)


@dataclass(frozen=True, slots=True)
class Course:
    """One leg: heads [first_head, end_head) from a writer's rank to a reader's rank."""

    writer_rank: int
    reader_rank: int
    first_head: int
    end_head: int


class Part(NamedTuple):
    """A part of a ticket's KV: blocks [first_block, end_block), layers [first_layer, end_layer), heads [first_head,
    end_head).
    """

    block_tokens: int
    first_block: int
    end_block: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


@lru_cache(maxsize=64)
def plan_courses(heads: int, writer_ranks: int, reader_ranks: int) -> tuple[Course, ...]:
    """Assign every head of every reader's rank to exactly one writer's rank. Writers that hold the same heads share the
    readers.
    """
    holders: list[list[int]] = [[] for _ in range(heads)]
    for rank in range(writer_ranks):
        for head in range(*head_range(heads, rank, writer_ranks)):
            holders[head].append(rank)
    courses: list[Course] = []
    for reader in range(reader_ranks):
        for head in range(*head_range(heads, reader, reader_ranks)):
            writer = holders[head][reader % len(holders[head])]
            last = courses[-1] if courses else None
            if last is not None and (last.writer_rank, last.reader_rank, last.end_head) == (writer, reader, head):
                courses[-1] = Course(writer, reader, last.first_head, head + 1)
            else:
                courses.append(Course(writer, reader, head, head + 1))
    return tuple(courses)


def common_block(one: PageShape, other_page_tokens: int) -> int:
    return gcd(one.page_tokens, other_page_tokens)


def part_bytes(shape: PageShape, part: Part) -> int:
    cells = (
        (part.end_block - part.first_block) * (part.end_layer - part.first_layer) * (part.end_head - part.first_head)
    )
    return cells * shape.planes * part.block_tokens * shape.cell_bytes


def piece_of(shape: PageShape, rank: int, part: Part) -> Contiguity:
    """The largest piece that is contiguous both in this end's pages and on the wire."""
    if part.block_tokens != shape.page_tokens:
        return Contiguity.HEAD
    return Contiguity.LAYERS if (part.first_head, part.end_head) == shape.heads_of(rank) else Contiguity.HEADS


def pieces_per_block(shape: PageShape, part: Part, piece: Contiguity) -> int:
    if piece is Contiguity.LAYERS:
        return 1
    planes = (part.end_layer - part.first_layer) * shape.planes
    return planes if piece is Contiguity.HEADS else planes * (part.end_head - part.first_head)


def offsets(
    shape: PageShape, rank: int, pages: Sequence[int] | Offsets, first_page: int, part: Part, piece: Contiguity
) -> tuple[Offsets, int]:
    """Offsets in a rank's region where the pieces of a part begin, in wire order, and the bytes of each piece. pages:
    ids; the first holds tokens from first_page * page_tokens on.
    """
    starts = (
        _block_starts(shape, np.asarray(pages, dtype=np.int64), first_page, part) + part.first_layer * shape.layer_bytes
    )
    if piece is Contiguity.LAYERS:
        return starts, (part.end_layer - part.first_layer) * shape.layer_bytes
    planes = np.arange((part.end_layer - part.first_layer) * shape.planes, dtype=np.int64) * shape.plane_bytes
    heads = part.end_head - part.first_head
    starts = starts[:, None] + planes + (part.first_head - shape.heads_of(rank)[0]) * shape.head_bytes
    block_bytes = part.block_tokens * shape.cell_bytes
    if piece is Contiguity.HEADS:
        return starts.ravel(), heads * block_bytes
    return (starts[:, :, None] + np.arange(heads, dtype=np.int64) * shape.head_bytes).ravel(), block_bytes


def _block_starts(shape: PageShape, pages: Offsets, first_page: int, part: Part) -> Offsets:
    """Offsets of each block's first token, in its page's first layer."""
    if part.block_tokens == shape.page_tokens:
        return pages[part.first_block - first_page : part.end_block - first_page] * shape.page_bytes
    tokens = np.arange(part.first_block, part.end_block, dtype=np.int64) * part.block_tokens
    return (
        pages[tokens // shape.page_tokens - first_page] * shape.page_bytes
        + tokens % shape.page_tokens * shape.cell_bytes
    )


def join_runs(sources: Offsets, targets: Offsets, nbytes: int) -> RunTable:
    """Copies of equal pieces as runs. Neighbours are joined where both ends are contiguous."""
    return join_runs_in_parts(sources, targets, nbytes, [len(sources)])[0]


def join_runs_in_parts(sources: Offsets, targets: Offsets, nbytes: int, ends: Sequence[int]) -> list[RunTable]:
    """As `join_runs` for each part. Parts end before the pieces numbered in `ends`; no run crosses into the next
    part.
    """
    breaks = (sources[1:] - sources[:-1] != nbytes) | (targets[1:] - targets[:-1] != nbytes)
    for end in ends[:-1]:
        breaks[end - 1] = True
    firsts, counts = _stretches(breaks)
    rows = np.empty((len(firsts), 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = sources[firsts], targets[firsts], counts * nbytes
    if len(ends) == 1:
        return [RunTable(rows)]
    cuts = np.array(ends, dtype=np.int64)
    borders = [0, *np.searchsorted(firsts, cuts).tolist()]
    return [RunTable(rows[first:end]) for first, end in pairwise(borders)]


def join_spans(starts: Offsets, nbytes: int) -> SpanTable:
    """Equal pieces as spans in the same order, with neighbours joined."""
    if not len(starts):
        return SpanTable(np.empty((0, 2), dtype=np.int64))
    firsts, counts = _stretches(starts[1:] - starts[:-1] != nbytes)
    rows = np.empty((len(firsts), 2), dtype=np.int64)
    rows[:, 0], rows[:, 1] = starts[firsts], counts * nbytes
    return SpanTable(rows)


def are_pieces(spans: SpanTable, starts: Offsets, nbytes: int) -> bool:
    """Whether the spans, in order, are exactly the pieces that begin at `starts`. Neighbours may be joined."""
    lengths = spans.rows[:, 1]
    if not len(lengths) or lengths.min() <= 0:
        return False
    counts = lengths // nbytes
    if int(counts.sum()) != len(starts) or (counts * nbytes != lengths).any():
        return spans.joined() == join_spans(starts, nbytes)  # cut finer, or different bytes
    within = np.arange(len(starts), dtype=np.int64) - np.repeat(counts.cumsum() - counts, counts)
    return np.array_equal(np.repeat(spans.rows[:, 0], counts) + within * nbytes, starts)


def _stretches(breaks: NDArray[np.bool_]) -> tuple[Offsets, Offsets]:
    """The start and length of each stretch without a break. breaks[i]: between i and i + 1."""
    after = breaks.nonzero()[0]
    borders = np.empty(len(after) + 2, dtype=np.int64)
    borders[0], borders[-1] = 0, len(breaks) + 1
    np.add(after, 1, out=borders[1:-1])
    return borders[:-1], borders[1:] - borders[:-1]

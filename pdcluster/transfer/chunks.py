"""Arithmetic of chunks: which pages a token range covers, which contiguous copies that makes, and the digest of its bytes. Pure.

Positions are tokens, memory is page-major, so a token range is a list of whole pages (the last page of a prompt travels whole), and a layer
range is one contiguous part of each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from pdcluster.transfer.base import Run

Span = tuple[int, int]
"""(offset, nbytes)"""


@dataclass(frozen=True, slots=True)
class PageShape:
    """A page in a region: its tokens, and its layers of equal size one after the other."""

    page_tokens: int
    page_bytes: int
    num_layers: int = 1

    def part(self, first_layer: int, num_layers: int) -> Span:
        """Where these layers lie in a page."""
        layer_bytes = self.page_bytes // self.num_layers
        return first_layer * layer_bytes, num_layers * layer_bytes

    @property
    def whole(self) -> Span:
        return 0, self.page_bytes


def page_slice(first_token: int, num_tokens: int, page_tokens: int) -> slice:
    """Indexes, into a ticket's page list, of the pages that hold tokens [first_token, first_token + num_tokens)."""
    return slice(first_token // page_tokens, -(-(first_token + num_tokens) // page_tokens))


def coalesce(sources: Sequence[int], targets: Sequence[int], page_bytes: int, part: Span | None = None) -> tuple[Run, ...]:
    """Copies of one part of each page (all of it by default), page by page in order, joined where they are contiguous on both sides."""
    offset, nbytes = part if part is not None else (0, page_bytes)
    runs: list[Run] = []
    for source, target in zip(sources, targets, strict=True):
        start, end = source * page_bytes + offset, target * page_bytes + offset
        last = runs[-1] if runs else None
        if last is not None and last.source + last.nbytes == start and last.target + last.nbytes == end:
            runs[-1] = Run(last.source, last.target, last.nbytes + nbytes)
        else:
            runs.append(Run(start, end, nbytes))
    return tuple(runs)


def join(pages: Iterable[int], page_bytes: int, part: Span | None = None) -> list[Span]:
    """One part of each page (all of it by default) as spans in the given order, neighbours joined."""
    offset, nbytes = part if part is not None else (0, page_bytes)
    return joined((page * page_bytes + offset, nbytes) for page in pages)


def joined(pieces: Iterable[Span]) -> list[Span]:
    """The same bytes in the same order, neighbours joined."""
    spans: list[Span] = []
    for start, nbytes in pieces:
        if spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], spans[-1][1] + nbytes)
        else:
            spans.append((start, nbytes))
    return spans


def digest(memory: memoryview, spans: Iterable[Span]) -> int:
    """xxh3-64 over the spans' bytes in order; both ends of a chunk get the same number for the same bytes, whatever their page ids."""
    state = xxhash.xxh3_64()
    for offset, nbytes in spans:
        state.update(memory[offset : offset + nbytes])
    return int(state.intdigest())

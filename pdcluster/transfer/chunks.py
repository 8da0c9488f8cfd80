"""Arithmetic of chunks: which pages a token range covers, which contiguous copies that makes, and the digest of its bytes. Pure.

Positions are tokens, memory is page-major, so a token range is a list of whole pages; the last page of a prompt travels whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from pdcluster.transfer.base import Run

Span = tuple[int, int]
"""(offset, nbytes)"""


def page_slice(first_token: int, num_tokens: int, page_tokens: int) -> slice:
    """Indexes, into a ticket's page list, of the pages that hold tokens [first_token, first_token + num_tokens)."""
    return slice(first_token // page_tokens, -(-(first_token + num_tokens) // page_tokens))


def coalesce(sources: Sequence[int], targets: Sequence[int], page_bytes: int) -> tuple[Run, ...]:
    """Copies of whole pages, page by page in order, joined where they are contiguous on both sides."""
    runs: list[Run] = []
    for source, target in zip(sources, targets, strict=True):
        start, end = source * page_bytes, target * page_bytes
        last = runs[-1] if runs else None
        if last is not None and last.source + last.nbytes == start and last.target + last.nbytes == end:
            runs[-1] = Run(last.source, last.target, last.nbytes + page_bytes)
        else:
            runs.append(Run(start, end, page_bytes))
    return tuple(runs)


def join(pages: Iterable[int], page_bytes: int) -> list[Span]:
    """Pages as spans in the given order, neighbours joined."""
    spans: list[Span] = []
    for page in pages:
        start = page * page_bytes
        if spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], spans[-1][1] + page_bytes)
        else:
            spans.append((start, page_bytes))
    return spans


def digest(memory: memoryview, spans: Iterable[Span]) -> int:
    """xxh3-64 over the spans' bytes in order; both ends of a chunk get the same number for the same bytes, whatever their page ids."""
    state = xxhash.xxh3_64()
    for offset, nbytes in spans:
        state.update(memory[offset : offset + nbytes])
    return int(state.intdigest())

"""Byte ranges: spans of one memory, runs between two memories, and the digest of spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

# (offset, nbytes)
Span = tuple[int, int]
Spans = Sequence[Span]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """One contiguous copy: from `source` in the local region to `target` in the remote one. Offsets in bytes."""

    source: int
    target: int
    nbytes: int


# A tuple, or a table of many runs (`runs.RunTable`).
CopyRuns = Sequence[CopyRun]


def page_slice(first_token: int, num_tokens: int, page_tokens: int) -> slice:
    """The slice of a ticket's page list that holds tokens [first_token, first_token + num_tokens)."""
    return slice(first_token // page_tokens, -(-(first_token + num_tokens) // page_tokens))


def digest(memory: memoryview, spans: Iterable[Span]) -> int:
    """xxh3-64 over the spans' bytes in order. Both ends of a chunk get the same value for equal bytes, whatever their
    page ids.
    """
    state = xxhash.xxh3_64()
    for offset, nbytes in spans:
        state.update(memory[offset : offset + nbytes])
    return int(state.intdigest())

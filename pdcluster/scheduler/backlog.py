"""What a node has accepted and not done: tokens of prompts and the attention pairs they will make, rows that decode. Pure; read by load reports."""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster.cost import num_pairs
from pdcluster.scheduler.sequence import Sequence


def backlog(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> tuple[int, int]:
    """(tokens, pairs). A waiting prompt counts without what was cached when it came; the cache may change until it starts, and is counted then."""
    tokens, pairs = 0, 0.0
    for sequence in running:
        if sequence.num_pending > 1:
            tokens += sequence.num_pending
            pairs += num_pairs(sequence.num_pending, sequence.num_computed)
    for sequence in waiting:
        uncached = max(sequence.num_tokens - sequence.num_cached, 1)
        tokens += uncached
        pairs += num_pairs(uncached, sequence.num_cached)
    return tokens, round(pairs)


def decoding(running: Iterable[Sequence], num_reserved: int) -> tuple[int, int]:
    """(rows, context tokens) of what decodes here, or will: no remote prefills. Slots have no KV of their own yet."""
    contexts = [sequence.num_computed for sequence in running if not sequence.remote]
    return len(contexts) + num_reserved, sum(contexts)

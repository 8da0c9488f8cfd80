"""The backlog of a node: prompt tokens and attention pairs to compute, and rows that decode. Pure; for load reports."""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import HASH_BYTES
from pdcluster.cost.cost import num_pairs
from pdcluster.scheduler.sequence import Sequence


def backlog(sequences: Iterable[Sequence]) -> tuple[int, int]:
    """(tokens, pairs) to compute of running and waiting sequences. A waiting prompt counts without what is cached, or
    will be by its turn (`blocks_by_then`).
    """
    tokens, pairs = 0, 0.0
    for sequence in sequences:
        if sequence.state is not Residence.RUNNING:
            uncached = max(sequence.num_tokens - sequence.num_cached, 1)
            tokens += uncached
            pairs += num_pairs(uncached, sequence.num_cached)
        elif sequence.num_pending > 1:
            tokens += sequence.num_pending
            pairs += num_pairs(sequence.num_pending, sequence.num_computed)
    return tokens, round(pairs)


def blocks_by_then(sequence: Sequence, ahead: Iterable[Sequence]) -> int:
    """Leading hash blocks that the sequence shares with one served before it.

    Otherwise the next turn of a conversation whose last one still waits would count as a whole prompt, and routers
    would send it away from its cache.
    """
    return max((_num_common(sequence.hashes, other.hashes) for other in ahead), default=0)


def _num_common(one: bytearray, other: bytearray) -> int:
    """Hashes are chained: where two chains have the same block, all before it are the same."""
    high = min(len(one), len(other)) // HASH_BYTES
    if not high or one[:HASH_BYTES] != other[:HASH_BYTES]:
        return 0
    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = (middle - 1) * HASH_BYTES, middle * HASH_BYTES
        if one[begin:end] == other[begin:end]:
            low = middle
        else:
            high = middle - 1
    return low


def decoding(running: Iterable[Sequence], num_reserved: int) -> tuple[int, int]:
    """(rows, context tokens) of rows that decode here, or will. Slots have no KV of their own yet."""
    contexts = [sequence.num_computed for sequence in running if not sequence.remote]
    return len(contexts) + num_reserved, sum(contexts)

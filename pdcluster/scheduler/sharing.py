"""Shared pages: what a sequence publishes for all, and what a fork takes from its parent.

A fork is another choice of the same prompt. It shares its parent's pages and writes to none of them: the page of its
first token is copied first (copy on write). Requirements:

1. No page has two writers. A row writes only to pages that it alone owns, or that hold nothing of others behind its
   write.
2. The engine makes a copy at the start of the step that first writes to it. Until that step is over, its source keeps
   an owner here.
3. A failed step copied nothing: its forks compute their prompts themselves.
"""

from __future__ import annotations

import numpy as np

from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import HASH_BYTES
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.sequence import Sequence


class Forks:
    """Owned by one scheduler. Holds the sources of copies while a step makes them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._sources: list[int] = []
        # (source, target) pages that the next step copies, or the one in flight.
        self.copies: list[tuple[int, int]] = []
        # Sequences that need them.
        self.sequences: list[Sequence] = []

    def take(self, sequence: Sequence) -> None:
        """All pages of the prompt from the parent; at least one page must be available. Only the last token is
        computed, for its logits.
        """
        pool, parent = self._pool, sequence.parent
        assert parent is not None
        num_shared = (sequence.num_tokens - 1) // pool.page_tokens
        pages: list[int] = parent.pages[: num_shared + 1].tolist()
        pool.acquire(pages)
        source = pages[num_shared]
        target = pool.make_private(source)
        assert target is not None and target != source, "the leader owns it, too"
        self._sources.append(source)
        self.copies.append((source, target))
        self.sequences.append(sequence)
        sequence.add_pages([*pages[:num_shared], target])
        sequence.num_computed = sequence.num_tokens - 1
        sequence.num_published = min(parent.num_published, num_shared)
        sequence.parent = None

    def land(self) -> None:
        """The step is over (2)."""
        sources, self._sources, self.sequences, self.copies = self._sources, [], [], []
        self._pool.release(sources)


def can_fork(sequence: Sequence) -> bool:
    """Whether its parent has the KV of this very prompt, here and now. Otherwise the sequence is like any other."""
    parent = sequence.parent
    if parent is None or parent.state is not Residence.RUNNING or sequence.wants_prompt_logprobs:
        return False
    num_tokens = sequence.num_tokens
    return parent.num_computed >= num_tokens and np.array_equal(parent.tokens[:num_tokens], sequence.tokens)


def publish(pool: PagePool, sequence: Sequence) -> list[int]:
    """Publish the full computed pages. Where the cache has a page with the same contents, the sequence takes that.

    Nothing is published behind a forgotten page. Returns pages with one owner too many, for the caller to release: a
    step in flight may read them by its table.
    """
    num_full = sequence.num_computed // pool.page_tokens
    kept_for_step: list[int] = []
    if num_full == sequence.num_published:
        return kept_for_step
    sequence.extend_hashes(sequence.num_computed)
    width = pool.page_tokens // pool.block_tokens * HASH_BYTES
    for index in range(sequence.num_published, min(num_full, len(sequence.hashes) // width)):
        start = index * width
        if index and not pool.is_published(int(sequence.pages[index - 1])):
            break
        page = int(sequence.pages[index])
        parent_hash = bytes(sequence.hashes[start - HASH_BYTES : start]) if index else None
        if sequence.num_in_flight:
            pool.acquire((page,))
            kept_for_step.append(page)
        kept = pool.publish(page, bytes(sequence.hashes[start : start + width]), parent_hash)
        if kept != page:
            sequence.replace_page(index, kept)
        sequence.num_published += 1
    return kept_for_step

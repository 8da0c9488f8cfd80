"""PagePool under random histories, beside a model that knows only owners, writers and texts.

The model says for each page which of the four states it is in, and which page may be evicted: a cached one with no
cached child that was used the longest ago. The pool must agree after every step, and its own recount must find nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster.core.messages import HASH_BYTES
from pdcluster.kv.hashing import block_hashes
from pdcluster.kv.pages import PagePool

BLOCK = 2
# Each element stands for one page; two values make prefixes collide often.
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


@dataclass
class Holder:
    """Somebody with references: a sequence with its pages in token order, or a transfer that reads some of them."""

    text: tuple[int, ...]
    pages: list[int]
    num_published: int = 0
    nonce: int | None = None


@dataclass
class Model:
    owners: dict[int, int] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)
    # text up to the end of the page → page
    cache: dict[tuple[int, ...], int] = field(default_factory=dict)
    # When the page was last held, or last had a cached descendant that was held.
    used_at: dict[int, int] = field(default_factory=dict)


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.page_tokens = BLOCK
        self.pool = PagePool(1, BLOCK, BLOCK)
        self.model = Model()
        self.sequences: list[Holder] = []
        self.readers: list[list[int]] = []
        self.writers: list[int] = []
        self.told: set[bytes] = set()
        self.clock = 0
        self.next_nonce = 1

    @initialize(num_pages=st.integers(1, 8), blocks_per_page=st.integers(1, 2))
    def start(self, num_pages: int, blocks_per_page: int) -> None:
        self.page_tokens = BLOCK * blocks_per_page
        self.pool = PagePool(num_pages, self.page_tokens, BLOCK)

    # ------------------------------------------------------------ rules

    @rule(text=TEXTS, with_writer=st.booleans())
    def start_sequence(self, text: list[int], with_writer: bool) -> None:
        """Take the longest cached prefix and fresh pages for the rest, as a local request or as a slot."""
        hashes = self.hashes_of(tuple(text))
        expected = 0
        while expected < len(text) and tuple(text[: expected + 1]) in self.model.cache:
            expected += 1
        cached = self.pool.match(hashes)
        assert cached == [self.model.cache[tuple(text[: i + 1])] for i in range(expected)]
        self.pool.acquire(cached)
        self.own(cached, 1)
        fresh = self.allocate(len(text) - expected)
        if fresh is None:
            self.pool.release(cached)
            self.own(cached, -1)
            return
        sequence = Holder(tuple(text), cached + fresh, expected)
        if with_writer:
            sequence.nonce = self.next_nonce
            self.next_nonce += 1
            self.writers.append(sequence.nonce)
            self.pool.attach_writer(fresh, sequence.nonce)
            self.model.writer.update(dict.fromkeys(fresh, sequence.nonce))
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish_next(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.nonce is not None:
            self.detach(sequence.nonce)
        index = sequence.num_published
        if index == len(sequence.pages):
            return
        if index:
            above = sequence.pages[index - 1]
            assert self.pool.is_published(above) == (above in self.model.cache.values())
            if not self.pool.is_published(above):
                return
        hashes, width = self.hashes_of(sequence.text), self.page_tokens // BLOCK * HASH_BYTES
        start = index * width
        kept = self.pool.publish(
            sequence.pages[index], hashes[start : start + width], hashes[start - HASH_BYTES : start] if index else None
        )
        name = sequence.text[: index + 1]
        assert kept == self.model.cache.setdefault(name, sequence.pages[index])
        if kept != sequence.pages[index]:
            self.own([kept], 1)
            self.own([sequence.pages[index]], -1)
            sequence.pages[index] = kept
        sequence.num_published += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.pool.release(sequence.pages)
        self.own(sequence.pages, -1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """What a sequence has, from some page on, and what was computed behind it, is nobody's prefix any more; whoever
        holds it keeps it."""
        sequence = data.draw(st.sampled_from(self.sequences))
        pages = sequence.pages[data.draw(st.integers(0, len(sequence.pages) - 1)) :]
        self.pool.forget(pages)
        roots = [name for name, page in self.model.cache.items() if page in pages]
        held_before = {page for name, page in self.model.cache.items() if self.is_busy(name)}
        self.model.cache = {
            name: page
            for name, page in self.model.cache.items()
            if not any(name[: len(root)] == root for root in roots)
        }
        self.clock += 1
        for page in held_before:
            self.model.used_at[page] = self.clock

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def end_writer(self, data: st.DataObject) -> None:
        self.detach(data.draw(st.sampled_from(self.writers)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def start_reader(self, data: st.DataObject) -> None:
        """A transfer holds any pages of a sequence, not always from the first on."""
        sequence = data.draw(st.sampled_from(self.sequences))
        begin = data.draw(st.integers(0, len(sequence.pages) - 1))
        pages = sequence.pages[begin : data.draw(st.integers(begin + 1, len(sequence.pages)))]
        if sequence.nonce is None:
            self.pool.acquire(pages)
            self.own(pages, 1)
            self.readers.append(pages)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_reader(self, data: st.DataObject) -> None:
        pages = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.pool.release(pages)
        self.own(pages, -1)

    @rule(count=st.integers(1, 4))
    def allocate_and_free(self, count: int) -> None:
        pages = self.allocate(count)
        if pages is not None:
            self.pool.release(pages)
            self.own(pages, -1)

    @rule()
    def tell(self) -> None:
        added, removed = self.pool.drain_changes()
        assert not set(self.split(added)) & self.told, "a hash is added twice"
        assert set(self.split(removed)) <= self.told, "a hash is removed that was never added"
        self.told = self.told - set(self.split(removed)) | set(self.split(added))
        assert self.told == set(self.split(self.pool.snapshot()))

    # ------------------------------------------------------------ what must always hold

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        cached = set(self.model.cache.values())
        states = {"free": 0, "used": 0, "cached": 0, "quarantined": 0}
        for page in range(self.pool.num_pages):
            assert self.pool.num_owners(page) == self.model.owners.get(page, 0)
            if self.model.owners.get(page, 0):
                states["used"] += 1
            elif page in self.model.writer:
                states["quarantined"] += 1
            else:
                states["cached" if page in cached else "free"] += 1
        pool = self.pool
        assert states == {
            "free": pool.num_free,
            "used": pool.num_used,
            "cached": pool.num_cached,
            "quarantined": pool.num_quarantined,
        }
        assert pool.num_available == states["free"] + sum(not self.is_busy(name) for name in self.model.cache)

    @invariant()
    def the_cache_is_prefix_closed(self) -> None:
        assert all(len(name) == 1 or name[:-1] in self.model.cache for name in self.model.cache)
        for name in self.model.cache:
            assert self.pool.match_length(self.hashes_of(name)) == len(name)

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.pool.release(sequence.pages)
        for pages in self.readers:
            self.pool.release(pages)
        for nonce in self.writers:
            self.pool.detach_writer(nonce)
        self.pool.check_integrity()
        assert self.pool.num_used == self.pool.num_quarantined == self.pool.num_writers == 0
        assert len(self.pool.allocate(self.pool.num_pages) or ()) == self.pool.num_pages

    # ------------------------------------------------------------ the model's side

    def allocate(self, count: int) -> list[int] | None:
        """Allocate, and check that what was evicted had to be."""
        num_free, available = self.pool.num_free, self.pool.num_available
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > available)
        if pages is None:
            return None
        for page in pages[num_free:]:
            self.evict(page)
        assert len(set(pages)) == count
        for page in pages:
            assert (
                not self.model.owners.get(page, 0)
                and page not in self.model.writer
                and page not in self.model.cache.values()
            )
        self.own(pages, 1)
        return pages

    def evict(self, page: int) -> None:
        idle = {name: held for name, held in self.model.cache.items() if not self.is_busy(name)}
        leaves = {held for name, held in idle.items() if not any(other[:-1] == name for other in self.model.cache)}
        assert page in leaves, "a page was evicted that is held, or whose child is cached"
        assert self.model.used_at[page] == min(self.model.used_at[leaf] for leaf in leaves), (
            "not the least recently used leaf"
        )
        del self.model.cache[next(name for name, held in self.model.cache.items() if held == page)]

    def own(self, pages: list[int], change: int) -> None:
        """The time moves on with each call, so pages that one call lets go were last used at the same time."""
        self.clock += 1
        held_before = {page for name, page in self.model.cache.items() if self.is_busy(name)}
        for page in pages:
            self.model.owners[page] = self.model.owners.get(page, 0) + change
            assert self.model.owners[page] >= 0
        for page in held_before | set(pages):
            self.model.used_at[page] = self.clock

    def is_busy(self, name: tuple[int, ...]) -> bool:
        return any(
            other[: len(name)] == name and self.model.owners.get(page, 0) > 0
            for other, page in self.model.cache.items()
        )

    def detach(self, nonce: int) -> None:
        if nonce not in self.writers:
            return
        self.writers.remove(nonce)
        self.pool.detach_writer(nonce)
        self.model.writer = {page: writer for page, writer in self.model.writer.items() if writer != nonce}
        for sequence in self.sequences:
            if sequence.nonce == nonce:
                sequence.nonce = None

    def hashes_of(self, text: tuple[int, ...]) -> bytes:
        """Pages of several blocks begin with the same block, whatever they stand for, so that pages share block
        hashes."""
        filler = [7] * (self.page_tokens - BLOCK)
        return block_hashes([token for value in text for token in [*filler, value, value]], block_tokens=BLOCK)

    @staticmethod
    def split(hashes: bytes) -> list[bytes]:
        return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


class TestPagePoolMachine(PagePoolMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.full
@pytest.mark.timeout(900)
class TestPagePoolMachineAtLength(PagePoolMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)

"""vLLM's KV events become our block hashes: whatever is stored, evicted or lost, in any order."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ProtocolError
from pdcluster.core.messages import HASH_BYTES, pack_tokens
from pdcluster.kv.hashing import chain_root, extend
from pdcluster.node.vllm.events import (
    AllBlocksCleared,
    BlockHashes,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    CacheEvents,
    decode_events,
    salt_of,
)

BLOCK = 4
ROOTS = [chain_root(block_tokens=BLOCK, salt=salt) for salt in (b"a", b"b")]


class VllmCache:
    """vLLM's block pool as far as its events show it: copies of blocks, in chains, each evicted alone."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.copies: list[tuple[bytes, bytes]] = []  # vLLM's hash and ours
        self.events: list[CacheEvent] = []

    def store(self, root: bytes | None, tokens: list[int], cached: int) -> None:
        """A request computes its blocks from `cached` on, as one event or one for each block."""
        count = len(tokens) // BLOCK
        if cached >= count:
            return
        theirs, before = [], b""
        for index in range(count):
            block = pack_tokens(tokens[index * BLOCK : (index + 1) * BLOCK])
            salt = (root or b"none") if index == 0 else b""
            before = hashlib.sha256(before + salt + block).digest()[:8]
            theirs.append(before)
        ours = extend(b"", tokens, root=root or bytes(HASH_BYTES), block_tokens=BLOCK)
        cuts = list(range(cached, count)) if self.rng.random() < 0.5 else [cached]
        for begin, end in zip(cuts, [*cuts[1:], count], strict=True):
            keys: list[list[object] | None] = [None] * (end - begin)
            if begin == 0 and root is not None:
                keys[0] = [salt_of(root)]
            self.events.append(
                BlockStored(
                    [int.from_bytes(each, "big") for each in theirs[begin:end]],
                    int.from_bytes(theirs[begin - 1], "big") if begin else None,
                    tokens[begin * BLOCK : end * BLOCK],
                    BLOCK,
                    "GPU",
                    None,
                    keys if self.rng.random() < 0.5 or any(keys) else None,
                    0,
                )
            )
            for index in range(begin, end):
                mine = ours[index * HASH_BYTES : (index + 1) * HASH_BYTES] if root is not None else b""
                self.copies.append((theirs[index], mine))

    def evict(self) -> None:
        theirs, _ = self.copies.pop(self.rng.randrange(len(self.copies)))
        self.events.append(BlockRemoved([int.from_bytes(theirs, "big")], "GPU", 0))

    def clear(self) -> None:
        self.copies.clear()
        self.events.append(AllBlocksCleared())

    def has(self, tokens: list[int], root: bytes | None) -> int:
        """Leading blocks that are cached, which a new request need not compute."""
        present = {mine for _, mine in self.copies}
        if root is None:
            return 0
        ours = extend(b"", tokens, root=root, block_tokens=BLOCK)
        count = 0
        while count < len(ours) // HASH_BYTES and ours[count * HASH_BYTES : (count + 1) * HASH_BYTES] in present:
            count += 1
        return count

    def drain(self) -> tuple[CacheEvent, ...]:
        events, self.events = tuple(self.events), []
        return events


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


@given(st.integers(0, 2**32), st.lists(st.sampled_from(["store", "store", "evict", "clear", "drain"]), max_size=60))
def test_what_is_published_is_what_vllm_has_cached(seed: int, actions: list[str]) -> None:
    rng = random.Random(seed)
    cache, books = VllmCache(rng), BlockHashes(BLOCK, 10_000)
    believed: set[bytes] = set()
    for action in [*actions, "drain"]:
        if action == "store":
            root = rng.choice([*ROOTS, None])
            length = rng.choice([BLOCK - 1, 2 * BLOCK, 5 * BLOCK + 1, 40 * BLOCK])
            tokens = [rng.randrange(2) for _ in range(BLOCK)] + [7] * (length - BLOCK) if length >= BLOCK else [1]
            known = cache.has(tokens, root)
            cache.store(root, tokens, rng.choice([0, known]))
        elif action == "evict" and cache.copies:
            cache.evict()
        elif action == "clear":
            cache.clear()
        elif action == "drain":
            books.apply(CacheEvents(cache.drain()))
            added, removed = (split(each) for each in books.drain_changes())
            assert not set(added) & set(removed)
            assert not set(added) & believed and set(removed) <= believed
            believed = (believed | set(added)) - set(removed)
            cached = {mine for _, mine in cache.copies if mine}
            assert believed == cached == set(split(books.snapshot()))
            assert len(split(books.snapshot())) == len(cached)
    assert books.supports


def test_copies_of_a_block_are_counted() -> None:
    cache, books = VllmCache(random.Random(0)), BlockHashes(BLOCK, 8)
    tokens = list(range(2 * BLOCK))
    for _ in range(2):
        cache.store(ROOTS[0], tokens, 0)
    books.apply(CacheEvents(cache.drain()))
    assert len(split(books.snapshot())) == len(books) == 2
    for left in (3, 2, 1, 0):
        cache.evict()
        books.apply(CacheEvents(cache.drain()))
        assert len(split(books.snapshot())) == len(Counter(mine for _, mine in cache.copies))
        assert len(cache.copies) == left


def test_a_gap_forgets_everything_and_later_blocks_count_again() -> None:
    cache, books = VllmCache(random.Random(1)), BlockHashes(BLOCK, 100)
    tokens = list(range(3 * BLOCK))
    cache.store(ROOTS[0], tokens, 0)
    books.apply(CacheEvents(cache.drain()))
    before = books.snapshot()
    books.drain_changes()
    cache.store(ROOTS[0], tokens + [5] * BLOCK, 3)  # behind blocks that are forgotten
    cache.store(ROOTS[1], tokens, 0)
    books.apply(CacheEvents(cache.drain(), is_gap=True))
    added, removed = books.drain_changes()
    assert removed == before and books.num_gaps == 1
    assert added == extend(b"", tokens, root=ROOTS[1], block_tokens=BLOCK) == books.snapshot()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"group_idx": 1}, "group 1"),
        ({"block_size": 8, "token_ids": list(range(8))}, "8 tokens, hash blocks 4"),
        ({"token_ids": [1]}, "1 blocks with 1 tokens"),
        ({"extra_keys": []}, "with 0 lists of keys"),
    ],
)
def test_what_our_hashes_cannot_tell_ends_the_reports(changes: dict[str, object], fault: str) -> None:
    books = BlockHashes(BLOCK, 8)
    stored = BlockStored([1], None, list(range(BLOCK)), BLOCK, "GPU", None, [[salt_of(ROOTS[0])]], 0)
    books.apply(CacheEvents((stored,)))
    assert len(books.snapshot()) == HASH_BYTES
    books.apply(CacheEvents((msgspec.structs.replace(stored, **changes), stored)))
    assert not books.supports and fault in books.fault
    assert books.drain_changes() == (b"", b"") and books.snapshot() == b""


def test_a_model_of_several_groups_is_not_reported() -> None:
    books = BlockHashes(BLOCK, 8, num_groups=2)
    books.apply(CacheEvents((BlockStored([1], None, [0] * BLOCK, BLOCK, "GPU", None, [[salt_of(ROOTS[0])]], 0),)))
    assert not books.supports and books.snapshot() == b"" and "2 groups" in books.fault


@pytest.mark.parametrize(
    ("keys", "lora", "count"),
    [
        ([salt_of(ROOTS[0])], None, 1),
        (["adapter", salt_of(ROOTS[0])], "adapter", 1),
        (["adapter"], "adapter", 0),
        (["not hexadecimal digits: thirty-two"[:32]], None, 0),
        ([["image", 0], salt_of(ROOTS[0])], None, 0),
        (None, None, 0),
    ],
)
def test_only_text_under_a_root_of_ours_has_a_hash(keys: list[object] | None, lora: str | None, count: int) -> None:
    books = BlockHashes(BLOCK, 8)
    books.apply(CacheEvents((BlockStored([1], None, [0] * BLOCK, BLOCK, "GPU", lora, [keys], 0),)))
    expected = extend(b"", [0] * BLOCK, root=ROOTS[0], block_tokens=BLOCK) if count else b""
    assert books.snapshot() == expected
    books.apply(CacheEvents((BlockRemoved([1], "GPU", 0),)))
    assert books.snapshot() == b""


def test_a_copy_in_host_memory_is_no_cached_block() -> None:
    books = BlockHashes(BLOCK, 8)
    stored = BlockStored([1], None, [0] * BLOCK, BLOCK, "CPU", None, [[salt_of(ROOTS[0])]], None)
    books.apply(CacheEvents((stored, msgspec.structs.replace(stored, medium="GPU"), BlockRemoved([1], "CPU"))))
    assert len(books.snapshot()) == HASH_BYTES


def test_the_books_stay_bounded() -> None:
    books = BlockHashes(BLOCK, 8)
    for number in range(40):
        event = BlockStored([number], None, [number] * BLOCK, BLOCK, None, None, [[salt_of(ROOTS[0])]], 0)
        books.apply(CacheEvents((event,)))
        assert len(books) <= 16
    assert books.num_gaps == 2


def test_bytes_that_are_no_events_are_named() -> None:
    good = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])
    assert decode_events(good) == (AllBlocksCleared(),)
    for bad in (
        b"",
        b"\x93",
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, 3]),
    ):
        with pytest.raises(ProtocolError, match="pinned version"):
            decode_events(bad)

"""Cache deltas in order, with gaps, and the question that mends them; metrics of it all."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry

from pdcluster.core.messages import CacheDelta
from pdcluster.kv.hashing import block_hashes
from pdcluster_router.cluster.metrics import IndexCollector
from pdcluster_router.prefix_index.index import LEAST_MOVED, MOVED_PER_BLOCK, PrefixIndex
from pdcluster_router.prefix_index.updates import ASK_AGAIN_S, SLICE_BLOCKS, CacheUpdates

CHAIN = block_hashes(range(40), block_tokens=4)


def blocks(first: int, last: int) -> bytes:
    return CHAIN[16 * first : 16 * last]


@pytest.fixture
def caches() -> CacheUpdates:
    return CacheUpdates(PrefixIndex())


def test_deltas_follow_a_snapshot(caches: CacheUpdates) -> None:
    assert not caches.apply("a", CacheDelta(3, True, blocks(0, 2), b""), 0.0)
    assert not caches.apply("a", CacheDelta(4, False, blocks(2, 6), b""), 0.0)
    assert not caches.apply("a", CacheDelta(5, False, b"", blocks(4, 6)), 0.0)
    assert caches.index.depths(CHAIN) == {"a": 4} and caches.is_exact("a")


def test_a_gap_asks_for_a_snapshot_at_once_and_keeps_what_is_known_until_it_comes(caches: CacheUpdates) -> None:
    caches.apply("a", CacheDelta(0, True, blocks(0, 2), b""), 0.0)
    assert caches.apply("a", CacheDelta(2, False, blocks(4, 6), b""), 0.0)
    assert caches.index.depths(CHAIN) == {"a": 2} and not caches.is_exact("a") and caches.num_gaps == 1
    assert not caches.apply("a", CacheDelta(3, False, blocks(6, 8), b""), 0.1), "it was asked already"
    assert not caches.apply("a", CacheDelta(3, True, blocks(0, 8), b""), 0.2)
    assert caches.index.depths(CHAIN) == {"a": 8} and caches.is_exact("a")


def test_a_snapshot_that_does_not_come_is_asked_for_again(caches: CacheUpdates) -> None:
    caches.apply("a", CacheDelta(0, True, b"", b""), 0.0)
    caches.apply("a", CacheDelta(5, False, blocks(0, 1), b""), 0.0)
    assert not caches.is_overdue("a", 0.5)
    assert caches.is_overdue("a", ASK_AGAIN_S) and not caches.is_overdue("a", ASK_AGAIN_S + 0.1)


def test_a_delta_that_the_snapshot_contains_changes_nothing(caches: CacheUpdates) -> None:
    caches.apply("a", CacheDelta(7, True, blocks(0, 3), b""), 0.0)
    assert not caches.apply("a", CacheDelta(7, False, b"", blocks(2, 3)), 0.0)
    assert caches.index.depths(CHAIN) == {"a": 3} and caches.num_stale == 1


def test_a_delta_before_any_snapshot_asks_for_one(caches: CacheUpdates) -> None:
    assert caches.apply("a", CacheDelta(2, False, blocks(0, 1), b""), 0.0)
    assert caches.index.depths(CHAIN) == {}


def test_a_lost_node_is_forgotten_with_all_it_held(caches: CacheUpdates) -> None:
    caches.apply("a", CacheDelta(0, True, blocks(0, 9), b""), 0.0)
    caches.index.expect("a", CHAIN, 9.0)
    caches.lose("a")
    assert caches.index.depths(CHAIN, 0.0) == {} and caches.index.num_entries == 0 and not caches.is_exact("a")


def test_the_metrics_say_what_happened(caches: CacheUpdates) -> None:
    registry = CollectorRegistry()
    registry.register(IndexCollector(caches))
    caches.apply("a", CacheDelta(0, True, blocks(0, 2), b""), 0.0)
    caches.index.expect("a", blocks(0, 4), 9.0)
    caches.apply("a", CacheDelta(1, False, blocks(2, 4), b""), 0.0)
    caches.apply("a", CacheDelta(3, False, blocks(4, 5), b""), 0.0)
    values = {
        "pdcluster_index_entries": 4,
        "pdcluster_cache_snapshots_total": 1,
        "pdcluster_cache_deltas_total": 1,
        "pdcluster_cache_gaps_total": 1,
        "pdcluster_cache_expected": 0,
    }
    assert {name: registry.get_sample_value(name) for name in values} == values
    assert registry.get_sample_value("pdcluster_cache_expectations_total", {"outcome": "hit"}) == 1


def many(number: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(16 * number)


def work_off(caches: CacheUpdates) -> None:
    while caches.has_pieces:
        caches.take_piece()


def test_a_large_snapshot_is_taken_in_by_slices_and_what_follows_waits_for_it(caches: CacheUpdates) -> None:
    held = many(3 * SLICE_BLOCKS)
    caches.apply("a", CacheDelta(0, True, held, b""), 0.0)
    assert caches.index.num_entries == 0 and not caches.is_exact("a")
    assert not caches.apply("a", CacheDelta(1, False, b"", held[-16:]), 0.0)
    caches.take_piece()
    assert caches.index.num_entries == SLICE_BLOCKS and caches.index.depths(held[:16]) == {"a": 1}
    work_off(caches)
    assert caches.index.num_entries == 3 * SLICE_BLOCKS - 1 and caches.is_exact("a")
    caches.index.check_integrity()


def test_a_new_snapshot_ends_the_slices_of_the_one_before(caches: CacheUpdates) -> None:
    caches.apply("a", CacheDelta(0, True, many(3 * SLICE_BLOCKS), b""), 0.0)
    caches.take_piece()
    caches.apply("a", CacheDelta(4, True, blocks(0, 2), b""), 0.0)
    assert not caches.has_pieces and caches.index.holdings("a") == {blocks(0, 1), blocks(1, 2)} and caches.is_exact("a")


def test_nodes_take_turns_and_a_lost_one_has_none(caches: CacheUpdates) -> None:
    for name in ("a", "b"):
        caches.apply(name, CacheDelta(0, True, many(2 * SLICE_BLOCKS, ord(name)), b""), 0.0)
    caches.take_piece()
    caches.take_piece()
    assert caches.index.num_blocks("a") == caches.index.num_blocks("b") == SLICE_BLOCKS
    caches.lose("a")
    work_off(caches)
    assert caches.index.num_blocks("a") == 0 and caches.index.num_blocks("b") == 2 * SLICE_BLOCKS


def test_a_large_delta_is_removed_and_added_in_order(caches: CacheUpdates) -> None:
    old, new = many(2 * SLICE_BLOCKS, 1), many(2 * SLICE_BLOCKS, 2)
    caches.apply("a", CacheDelta(0, True, old, b""), 0.0)
    caches.apply("a", CacheDelta(1, False, new, old), 0.0)
    work_off(caches)
    assert caches.index.depths(old[:16]) == {} and caches.index.num_entries == 2 * SLICE_BLOCKS and caches.is_exact("a")


def test_no_slice_moves_more_than_its_share_of_a_table_even_when_most_of_it_is_of_no_use(
    caches: CacheUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    move = caches.index._move

    def noted(num_slots: int) -> None:
        moved.append(num_slots)
        move(num_slots)

    monkeypatch.setattr(caches.index, "_move", noted)
    for number in range(60):
        caches.apply(f"n{number}", CacheDelta(0, True, many(3 * SLICE_BLOCKS, number), b""), 0.0)
        if number % 10 == 9:
            for left in range(number - 9, number):
                caches.lose(f"n{left}")
        work_off(caches)
    caches.index.check_integrity()
    assert moved and max(moved) <= MOVED_PER_BLOCK * (SLICE_BLOCKS + 2) + LEAST_MOVED

"""PagePool: each rule by example. Random histories against a model are in test_pages_model.py."""

from __future__ import annotations

import pytest

from pdcluster.core.errors import ConfigError, IntegrityError
from pdcluster.core.messages import HASH_BYTES
from pdcluster.kv.hashing import block_hashes
from pdcluster.kv.pages import PagePool


def pool_of(num_pages: int, page_tokens: int = 4, block_tokens: int = 4) -> PagePool:
    return PagePool(num_pages, page_tokens, block_tokens)


def chain(text: str, block_tokens: int = 4) -> bytes:
    return block_hashes([ord(c) for c in text], block_tokens=block_tokens)


def publish_all(pool: PagePool, pages: list[int], hashes: bytes) -> list[int]:
    width = pool.page_tokens // pool.block_tokens * HASH_BYTES
    kept = []
    for index, page in enumerate(pages):
        start = index * width
        kept.append(
            pool.publish(page, hashes[start : start + width], hashes[start - HASH_BYTES : start] if index else None)
        )
    return kept


def cache(pool: PagePool, text: str) -> list[int]:
    """Compute a text as a sequence would, and let it go: its pages stay as prefix cache."""
    hashes = chain(text, pool.block_tokens)
    cached = pool.match(hashes)
    pool.acquire(cached)
    fresh = pool.allocate(len(text) // pool.page_tokens - len(cached))
    assert fresh is not None
    pages = publish_all(pool, cached + fresh, hashes)
    pool.release(pages)
    pool.check_integrity()
    return pages


def counts(pool: PagePool) -> dict[str, int]:
    pool.check_integrity()
    return {
        "free": pool.num_free,
        "used": pool.num_used,
        "cached": pool.num_cached,
        "quarantined": pool.num_quarantined,
    }


# ---------------------------------------------------------------- owners


def test_pages_come_from_the_free_list_and_return_to_it():
    pool = pool_of(3)
    pages = pool.allocate(2)
    assert pages is not None and len(set(pages)) == 2
    assert counts(pool) == {"free": 1, "used": 2, "cached": 0, "quarantined": 0}
    pool.release(pages)
    assert counts(pool) == {"free": 3, "used": 0, "cached": 0, "quarantined": 0}


def test_allocation_is_all_or_nothing():
    pool = pool_of(3)
    cache(pool, "aaaa")
    assert pool.allocate(4) is None
    assert counts(pool) == {"free": 2, "used": 0, "cached": 1, "quarantined": 0}
    assert len(pool.allocate(3) or ()) == 3


def test_allocating_nothing_gives_an_empty_list():
    pool = pool_of(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_a_page_is_free_only_after_its_last_owner():
    pool = pool_of(1)
    (page,) = pool.allocate(1) or ()
    pool.acquire([page])
    pool.release([page])
    assert pool.num_used == 1
    pool.release([page])
    assert pool.num_free == 1


def test_releasing_more_often_than_owned_is_an_error_and_changes_nothing():
    pool = pool_of(2)
    one, two = pool.allocate(2) or ()
    with pytest.raises(IntegrityError, match=f"page {two} is released 2 times"):
        pool.release([one, two, two])
    assert counts(pool) == {"free": 0, "used": 2, "cached": 0, "quarantined": 0}


def test_a_free_page_cannot_be_acquired():
    pool = pool_of(2)
    (page,) = pool.allocate(1) or ()
    with pytest.raises(IntegrityError, match="it is free"):
        pool.acquire([page, 1 - page])
    assert pool.num_owners(page) == 1


# ---------------------------------------------------------------- shape


@pytest.mark.parametrize(("page_tokens", "block_tokens"), [(48, 32), (16, 32), (0, 32), (32, 0)])
def test_page_sizes_that_are_no_multiple_of_the_hash_block_are_refused(page_tokens, block_tokens):
    with pytest.raises(ConfigError, match="multiple of the hash block"):
        PagePool(8, page_tokens, block_tokens)


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        PagePool(0, 32, 32)


# ---------------------------------------------------------------- prefix cache


def test_the_longest_cached_prefix_is_found_in_whole_pages():
    pool = pool_of(8)
    pages = cache(pool, "aaaabbbbcccc")
    assert pool.match(chain("aaaabbbbcccc")) == pages
    assert pool.match(chain("aaaabbbbdddd")) == pages[:2]
    assert pool.match(chain("aaaabbb")) == pages[:1]
    assert pool.match(chain("xaaabbbbcccc")) == []
    assert pool.match(b"") == []


def test_a_match_can_be_capped():
    pool = pool_of(8)
    pages = cache(pool, "aaaabbbbcccc")
    assert pool.match(chain("aaaabbbbcccc"), 2) == pages[:2]
    assert pool.match(chain("aaaabbbbcccc"), 0) == []
    assert pool.match_length(chain("aaaabbbbcccc"), 9) == 3


def test_pages_in_use_are_found_as_soon_as_they_are_published():
    pool = pool_of(4)
    pages = pool.allocate(2) or []
    publish_all(pool, pages[:1], chain("aaaa"))
    assert pool.match(chain("aaaabbbb")) == pages[:1]


def test_publishing_again_changes_nothing():
    pool = pool_of(4)
    pages = pool.allocate(1) or []
    assert publish_all(pool, pages, chain("aaaa")) == publish_all(pool, pages, chain("aaaa")) == pages
    assert pool.num_owners(pages[0]) == 1
    assert pool.drain_changes() == (chain("aaaa"), b"")


def test_of_two_pages_with_the_same_contents_the_older_stays_and_the_owner_moves_to_it():
    pool = pool_of(4)
    (older,) = publish_all(pool, pool.allocate(1) or [], chain("aaaa"))
    (newer,) = pool.allocate(1) or []
    assert publish_all(pool, [newer], chain("aaaa")) == [older]
    assert pool.num_owners(older) == 2
    assert pool.num_owners(newer) == 0
    assert counts(pool) == {"free": 3, "used": 1, "cached": 0, "quarantined": 0}


def test_a_duplicate_that_a_transfer_still_reads_is_freed_when_the_transfer_ends():
    pool = pool_of(4)
    publish_all(pool, pool.allocate(1) or [], chain("aaaa"))
    newer = pool.allocate(1) or []
    pool.acquire(newer)
    publish_all(pool, newer, chain("aaaa"))
    assert pool.num_owners(newer[0]) == 1
    pool.release(newer)
    assert pool.num_free == 3


def test_a_page_cannot_be_published_under_a_parent_that_is_not_cached():
    pool = pool_of(4)
    (page,) = pool.allocate(1) or []
    hashes = chain("aaaabbbb")
    with pytest.raises(IntegrityError, match="unknown"):
        pool.publish(page, hashes[16:], hashes[:16])


def test_a_page_cannot_be_published_under_a_parent_that_nobody_holds():
    """Its parent might be evicted before it, which would break the prefix closure."""
    pool = pool_of(4)
    cache(pool, "aaaa")
    (page,) = pool.allocate(1) or []
    hashes = chain("aaaabbbb")
    with pytest.raises(IntegrityError, match="cached"):
        pool.publish(page, hashes[16:], hashes[:16])


def test_a_page_keeps_its_name():
    pool = pool_of(4)
    pages = publish_all(pool, pool.allocate(1) or [], chain("aaaa"))
    with pytest.raises(IntegrityError, match="already"):
        publish_all(pool, pages, chain("bbbb"))


def test_publishing_a_page_that_nobody_owns_is_an_error():
    with pytest.raises(IntegrityError, match="it is free"):
        publish_all(pool_of(1), [0], chain("aaaa"))


def test_publishing_with_too_few_hashes_is_an_error():
    pool = pool_of(1, page_tokens=8)
    with pytest.raises(IntegrityError, match="16 bytes of hashes"):
        pool.publish((pool.allocate(1) or [])[0], chain("aaaa"), None)


def test_a_chain_whose_hashes_are_out_of_place_matches_nothing():
    """A peer that sends the second block's hash first must not be given the second block's page as its first."""
    pool = pool_of(4)
    cache(pool, "aaaabbbb")
    hashes = chain("aaaabbbb")
    assert pool.match(hashes[16:]) == []


# ---------------------------------------------------------------- eviction


def test_the_leaf_goes_before_its_parent():
    pool = pool_of(3)
    pages = cache(pool, "aaaabbbbcccc")
    assert pool.allocate(1) == [pages[2]]
    assert pool.match(chain("aaaabbbbcccc")) == pages[:2]
    assert pool.allocate(2) == [pages[1], pages[0]]


def test_the_longest_unused_leaf_goes_first():
    pool = pool_of(3)
    (a,), (b,), (c,) = cache(pool, "aaaa"), cache(pool, "bbbb"), cache(pool, "cccc")
    cache(pool, "aaaa")
    assert pool.allocate(3) == [b, c, a]


def test_a_branch_that_was_used_later_outlives_its_sibling():
    pool = pool_of(3)
    parent, older = cache(pool, "aaaabbbb")
    _, newer = cache(pool, "aaaacccc")
    cache(pool, "aaaabbbb")
    assert pool.allocate(3) == [newer, older, parent]


def test_a_parent_that_was_used_alone_outlives_older_branches():
    pool = pool_of(4)
    parent, child = cache(pool, "aaaabbbb")
    (other,) = cache(pool, "cccc")
    cache(pool, "aaaa")
    pool.allocate(1)
    assert pool.allocate(3) == [child, other, parent]


def test_pages_in_use_are_never_evicted():
    pool = pool_of(3)
    pages = cache(pool, "aaaabbbb")
    pool.acquire(pages[:1])
    assert pool.num_available == 2
    assert pool.allocate(3) is None
    assert pages[0] not in (pool.allocate(2) or [])


def test_ancestors_of_a_page_in_use_are_not_available():
    """A transfer may hold a page of the middle of a prompt after the sequence let go of the whole."""
    pool = pool_of(3)
    pages = pool.allocate(3) or []
    publish_all(pool, pages, chain("aaaabbbbcccc"))
    pool.acquire(pages[1:2])
    pool.release(pages)
    assert counts(pool) == {"free": 0, "used": 1, "cached": 2, "quarantined": 0}
    assert pool.num_available == 1
    assert pool.num_idle(pages) == 1
    assert pool.allocate(2) is None
    pool.release(pages[1:2])
    assert pool.num_available == 3
    assert pool.allocate(3) == [pages[2], pages[1], pages[0]]


def test_holding_only_the_end_of_an_idle_chain_keeps_all_of_it():
    pool = pool_of(4)
    pages = cache(pool, "aaaabbbbcccc")
    pool.acquire(pages[2:])
    pool.check_integrity()
    assert pool.num_available == 1
    assert pool.allocate(2) is None
    pool.release(pages[2:])
    assert pool.num_available == 4
    pool.check_integrity()


# ---------------------------------------------------------------- writers


def test_a_page_whose_owners_ended_is_quarantined_until_its_writer_ended():
    pool = pool_of(2)
    pages = pool.allocate(2) or []
    pool.attach_writer(pages, nonce=7)
    pool.release(pages)
    assert counts(pool) == {"free": 0, "used": 0, "cached": 0, "quarantined": 2}
    assert pool.allocate(1) is None
    pool.detach_writer(7)
    assert counts(pool) == {"free": 2, "used": 0, "cached": 0, "quarantined": 0}


def test_a_page_whose_writer_ended_first_stays_with_its_owner():
    pool = pool_of(1)
    pages = pool.allocate(1) or []
    pool.attach_writer(pages, nonce=7)
    pool.detach_writer(7)
    assert counts(pool)["used"] == 1
    pool.release(pages)
    assert counts(pool)["free"] == 1


def test_a_page_is_not_published_while_a_writer_may_still_write_to_it():
    pool = pool_of(1)
    pages = pool.allocate(1) or []
    pool.attach_writer(pages, nonce=7)
    with pytest.raises(IntegrityError, match="0x7"):
        publish_all(pool, pages, chain("aaaa"))
    pool.detach_writer(7)
    assert publish_all(pool, pages, chain("aaaa")) == pages


def test_a_writer_gets_private_unpublished_pages_only():
    pool = pool_of(4)
    published = publish_all(pool, pool.allocate(1) or [], chain("aaaa"))
    shared = pool.allocate(1) or []
    pool.acquire(shared)
    written = pool.allocate(1) or []
    pool.attach_writer(written, nonce=1)
    for pages in (published, shared, written, [3]):
        with pytest.raises(IntegrityError, match="cannot take writer 0x2"):
            pool.attach_writer(pages, nonce=2)
    assert pool.num_writers == 1


def test_a_nonce_names_one_writer():
    pool = pool_of(2)
    pool.attach_writer([], nonce=1)
    with pytest.raises(IntegrityError, match="attached already"):
        pool.attach_writer(pool.allocate(1) or [], nonce=1)
    pool.detach_writer(1)
    with pytest.raises(IntegrityError, match="not attached"):
        pool.detach_writer(1)


def test_a_quarantined_page_cannot_be_acquired():
    pool = pool_of(1)
    pages = pool.allocate(1) or []
    pool.attach_writer(pages, nonce=1)
    pool.release(pages)
    with pytest.raises(IntegrityError, match="quarantined"):
        pool.acquire(pages)


# ---------------------------------------------------------------- what the router is told


def test_changes_are_told_once():
    pool = pool_of(1)
    cache(pool, "aaaa")
    assert pool.drain_changes() == (chain("aaaa"), b"")
    assert pool.drain_changes() == (b"", b"")
    pool.allocate(1)
    assert pool.drain_changes() == (b"", chain("aaaa"))


def test_what_came_and_went_between_two_reports_is_not_told():
    pool = pool_of(1)
    cache(pool, "aaaa")
    cache(pool, "bbbb")
    assert pool.drain_changes() == (chain("bbbb"), b"")
    cache(pool, "aaaa")
    cache(pool, "bbbb")
    assert pool.drain_changes() == (b"", b"")


def test_pages_of_several_blocks_tell_every_blocks_hash():
    pool = pool_of(2, page_tokens=8)
    cache(pool, "aaaabbbbccccdddd")
    assert pool.drain_changes()[0] == chain("aaaabbbbccccdddd")
    assert pool.match_length(chain("aaaabbbbccccdddd")) == 2
    assert pool.match_length(chain("aaaabbbbcccc")) == 1


def test_a_block_that_two_pages_share_is_told_gone_with_the_last_of_them():
    pool = pool_of(2, page_tokens=8)
    cache(pool, "aaaabbbb")
    cache(pool, "aaaacccc")
    added, _ = pool.drain_changes()
    assert added == chain("aaaabbbb") + chain("aaaacccc")[16:]
    pool.allocate(1)
    assert pool.drain_changes() == (b"", chain("aaaabbbb")[16:])
    assert pool.snapshot() == chain("aaaacccc")
    pool.allocate(1)
    assert pool.drain_changes() == (b"", chain("aaaacccc"))
    assert pool.snapshot() == b""


# ---------------------------------------------------------------- integrity


def test_a_corrupted_count_is_found():
    pool = pool_of(2)
    pool.allocate(1)
    pool._num_used = 0
    with pytest.raises(IntegrityError, match="1 pages are used, but 0 are counted"):
        pool.check_integrity()


def test_an_orphan_in_the_cache_is_found():
    pool = pool_of(2)
    pages = cache(pool, "aaaabbbb")
    pool._parent[pages[1]] = None
    with pytest.raises(IntegrityError, match="depth"):
        pool.check_integrity()


def test_a_wrong_eviction_order_is_found():
    pool = pool_of(2)
    pages = cache(pool, "aaaabbbb")
    pool._idle.move_to_end(pages[1])
    with pytest.raises(IntegrityError, match="after its parent"):
        pool.check_integrity()

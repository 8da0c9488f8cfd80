"""Block hashes: what decides them, and that a chain can be extended."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.bootstrap.card import Adapter
from pdcluster.core.messages import HASH_BYTES, pack_tokens
from pdcluster.kv.hashing import STRETCH_BLOCKS, ChainEnd, block_hashes, chain_root, extend, is_extendable

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_only_full_blocks_have_a_hash():
    assert block_hashes(range(31)) == b""
    assert len(block_hashes(range(32))) == HASH_BYTES
    assert len(block_hashes(range(95))) == 2 * HASH_BYTES


def test_a_hash_is_sha256_of_what_stands_before_its_stretch_and_the_stretch_up_to_its_end():
    root, packed = chain_root(block_tokens=2), pack_tokens(range(2 * STRETCH_BLOCKS + 4))
    found = _split(block_hashes(range(2 * STRETCH_BLOCKS + 5), block_tokens=2))
    first = [_sha256(root, packed[: 8 * count]) for count in range(1, STRETCH_BLOCKS + 1)]
    second = [_sha256(first[-1], packed[8 * STRETCH_BLOCKS : 8 * (STRETCH_BLOCKS + count)]) for count in (1, 2)]
    assert found == first + second


def test_hashes_do_not_change_between_releases():
    """Nodes and routers of neighbouring versions must agree, or every cached prefix is lost in a rolling restart."""
    assert block_hashes(range(32), salt=b"tenant", adapter="a", weights="w").hex() == "57a5539701bbce523376e644b3d60e41"


@pytest.mark.parametrize("other", [{"salt": b"b"}, {"adapter": "b"}, {"weights": "b"}])
def test_salt_adapter_and_weights_each_separate_the_caches(other):
    assert block_hashes(range(64)) != block_hashes(range(64), **other)


@given(st.lists(st.tuples(st.text(max_size=4), st.text(min_size=1, max_size=4)), max_size=6))
def test_adapters_share_no_prefix_with_each_other_or_with_their_model(found):
    adapters = {Adapter(name, digest) for name, digest in found if name}
    roots = {chain_root(adapter=adapter.identity, weights="w") for adapter in adapters} | {chain_root(weights="w")}
    assert len(roots) == len(adapters) + 1
    assert len({extend(b"", range(32), root=root) for root in roots}) == len(roots)


def test_fields_of_the_root_do_not_run_together():
    assert chain_root(adapter="ab", weights="c") != chain_root(adapter="a", weights="bc")
    assert chain_root(salt=b"x") != chain_root(adapter="x")


def test_block_size_is_part_of_the_root():
    assert chain_root(block_tokens=16) != chain_root(block_tokens=32)


@given(TOKENS, TOKENS, TOKENS)
def test_equal_prefixes_share_exactly_their_full_blocks(prefix, left, right):
    one, two = block_hashes(prefix + left, block_tokens=4), block_hashes(prefix + right, block_tokens=4)
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    shared = (len(prefix) + same) // 4 * HASH_BYTES
    assert one[:shared] == two[:shared]
    rest = list(zip(_split(one[shared:]), _split(two[shared:]), strict=False))
    assert all(a != b for a, b in rest)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=5 * STRETCH_BLOCKS), st.integers(0, 5 * STRETCH_BLOCKS))
def test_extending_a_chain_gives_what_hashing_at_once_gives(tokens, cut):
    root = chain_root(block_tokens=2, salt=b"s")
    start = extend(b"", tokens[:cut], root=root, block_tokens=2)
    assert start + extend(start, tokens, root=root, block_tokens=2) == block_hashes(tokens, block_tokens=2, salt=b"s")


def test_a_chain_is_extended_without_knowing_its_root_behind_its_first_stretch():
    tokens = range(32 * (STRETCH_BLOCKS + 3))
    whole = block_hashes(tokens, salt=b"secret")
    for known in (STRETCH_BLOCKS, STRETCH_BLOCKS + 2):
        start = whole[: known * HASH_BYTES]
        assert is_extendable(start, b"")
        assert start + extend(bytearray(start), tokens, root=b"") == whole


def test_a_chain_is_not_started_without_a_root():
    with pytest.raises(ValueError, match="chain_root"):
        extend(b"", range(32), root=b"")


def test_a_chain_does_not_go_on_in_its_first_stretch_without_a_root():
    start = block_hashes(range(32), salt=b"secret")
    assert not is_extendable(start, b"") and is_extendable(start, b"r" * HASH_BYTES)
    with pytest.raises(ValueError, match="chain_root"):
        extend(start, range(64), root=b"")


def test_packed_tokens_and_arrays_hash_like_lists():
    tokens = [7, 0, 2**31 - 1, 5] * 16
    packed = pack_tokens(tokens)
    array = np.array(tokens, np.int32)
    expected = block_hashes(tokens)
    assert (
        expected
        == block_hashes(packed)
        == block_hashes(memoryview(packed))
        == block_hashes(array.data)
        == block_hashes(array)
    )


def _sha256(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(b"pdcluster.block." + before + tokens).digest()[:HASH_BYTES]


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


@given(st.integers(0, 70), st.integers(1, 5), st.integers(0, 2**32))
def test_a_chain_followed_block_by_block_has_the_same_hashes(num_blocks: int, block_tokens: int, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 1 << 31, num_blocks * block_tokens).astype("<i4").tobytes()
    root = chain_root(block_tokens=block_tokens, salt=b"s")
    end, found = ChainEnd(root), b""
    for begin in range(0, len(tokens), 4 * block_tokens):
        end = end.followed_by(tokens[begin : begin + 4 * block_tokens])
        found += end.hash
    assert found == extend(b"", tokens, root=root, block_tokens=block_tokens)
    assert end.num_blocks == num_blocks

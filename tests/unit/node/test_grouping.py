"""How many groups of layers pay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster.node.native.prefill import FIRST_GUESS_BYTES_S, LayerGroups
from pdcluster.transfer.protocol.session import TransferStats

STATS = TransferStats(backend="tcp", nbytes=1 << 24, chunks=4, resent=0, transfer_s=1.0, exposed_s=0.0, busy_s=0.5)


def test_a_small_prompt_leaves_in_one_piece() -> None:
    assert LayerGroups(28, page_bytes=1 << 16).milestones(1, "tcp") == ()


def test_a_slow_link_gets_more_groups_than_a_fast_one() -> None:
    groups = LayerGroups(28, page_bytes=1 << 20)
    before = groups.milestones(32, "tcp")
    groups.observe(replace(STATS, busy_s=1.0))
    assert len(groups.milestones(32, "tcp")) > len(before)
    assert groups.milestones(32, "shm") == before, "each backend has a bandwidth of its own"


def test_bandwidth_is_learnt_from_the_time_in_which_something_moved() -> None:
    groups = LayerGroups(4, page_bytes=1024)
    assert groups.bandwidth("tcp") == FIRST_GUESS_BYTES_S
    groups.observe(STATS)
    assert groups.bandwidth("tcp") == (1 << 24) / 0.5
    groups.observe(replace(STATS, nbytes=1000))
    assert groups.bandwidth("tcp") == (1 << 24) / 0.5, "a small transfer says nothing about bandwidth"


@given(num_layers=st.integers(1, 96), pages=st.integers(1, 5000), page_bytes=st.integers(1, 1 << 24))
def test_bells_are_ordered_layers_before_the_last(num_layers: int, pages: int, page_bytes: int) -> None:
    milestones = LayerGroups(num_layers, page_bytes).milestones(pages, "tcp")
    assert list(milestones) == sorted(set(milestones))
    assert all(0 < milestone < num_layers for milestone in milestones)

"""The cost models: chunks add up, reports carry every coefficient."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.cost import DecodeCost, NodeCost, PrefillCost, num_pairs


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=20), cached=st.integers(0, 10_000))
def test_the_pairs_of_chunks_add_up_to_those_of_the_prompt(lengths: list[int], cached: int) -> None:
    chunks, behind = 0.0, cached
    for length in lengths:
        chunks += num_pairs(length, behind)
        behind += length
    assert chunks == num_pairs(sum(lengths), cached)


def test_what_is_cached_costs_only_its_attention() -> None:
    cost = PrefillCost(0.01, 1e-4, 1e-8)
    assert cost.seconds(0, 1000) == 0
    assert cost.seconds(100, 1000) == pytest.approx(0.01 + 100e-4 + 1e-8 * 100 * 1050)
    assert cost.seconds(100, 1000) < cost.seconds(1100)


def test_a_long_prompt_pays_the_fixed_part_for_every_chunk() -> None:
    assert PrefillCost(1.0, 0.0, chunk_tokens=100).seconds(250) == pytest.approx(2.5)
    assert PrefillCost(1.0, 0.0, chunk_tokens=100).seconds(10) == 1.0
    assert PrefillCost(1.0, 0.0).seconds(250) == 1.0


def test_prompts_that_wait_together_share_steps() -> None:
    cost = PrefillCost(1.0, 0.0, chunk_tokens=100)
    assert cost.work_s(100, 0.0) < 2 * cost.seconds(50)


def test_a_decode_step_pays_for_rows_and_for_what_they_attend_to() -> None:
    cost = DecodeCost(0.01, 1e-3, 1e-6)
    assert cost.seconds(4, 1000) == pytest.approx(0.01 + 4e-3 + 1e-3)
    assert cost.seconds(4, 1000) - cost.added_s(4, 1000) == pytest.approx(0.01)


def test_a_report_comes_back_as_the_cost_it_was_made_from() -> None:
    cost = NodeCost(PrefillCost(1.0, 2.0, 3.0, 512, 7), DecodeCost(4.0, 5.0, 6.0, 8))
    assert NodeCost.of(cost.report()) == cost

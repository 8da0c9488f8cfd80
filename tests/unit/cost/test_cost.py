"""The cost models: chunks add up, reports carry every coefficient."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost, num_pairs

TOKENS = st.integers(0, 100_000)


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
    bars = CostError(0.1, 0.2, (1.0, -2.0, 3.0, 4.0, 5.0, -6.0))
    cost = NodeCost(PrefillCost(1.0, 2.0, 3.0, 512, 7, bars), DecodeCost(4.0, 5.0, 6.0, 8, CostError(0.3, 0.4)))
    assert NodeCost.of(cost.report()) == cost


def test_the_error_bar_of_a_prediction_is_noise_and_what_is_not_known_of_such_work_together() -> None:
    error = CostError(0.1, 0.0, (3.0, 0.0, 0.0, 0.0, 0.0, 4.0))
    assert PrefillCost(30.0, 0.0, 0.0, error=error).error_s(1) == pytest.approx(
        ((0.1 * 30) ** 2 + 3.0**2 + (4.0 * 0.5) ** 2) ** 0.5
    )
    assert DecodeCost(0.0, 10.0, 0.0, error=error).error_s(2, 1) == pytest.approx((2.0**2 + 3.0**2 + 4.0**2) ** 0.5)
    assert PrefillCost(30.0, 1.0, error=error).error_s(0) == 0.0


def test_coefficients_that_err_in_opposite_ways_leave_their_sum_well_known() -> None:
    """One step of 10 tokens was seen often: nobody knows what is fixed and what is each token's."""
    error = CostError(0.0, 0.0, (1.0, -0.1, 0.0, 0.0, 0.0, 0.0))
    cost = PrefillCost(1.0, 0.1, error=error)
    assert cost.error_s(10) == pytest.approx(0.0)
    assert cost.error_s(100) == pytest.approx(9.0)


@given(new=TOKENS, cached=TOKENS, chunk=st.sampled_from([0, -1, 1, 512]), costs=st.tuples(*[st.floats(0, 1)] * 3))
def test_a_prompts_seconds_are_those_of_a_backlog_of_it_to_the_last_bit(
    new: int, cached: int, chunk: int, costs: tuple[float, float, float]
) -> None:
    cost = PrefillCost(*costs, chunk_tokens=chunk)
    assert cost.seconds(new, cached) == cost.work_s(new, num_pairs(new, cached))
    assert cost.seconds(-new, cached) == 0.0

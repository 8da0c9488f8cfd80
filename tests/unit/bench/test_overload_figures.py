"""What bench.overload makes of what clients saw."""

import random
import statistics

import pytest

from bench.harness.offered_load import (
    MEAN_TOKENS,
    MOST_TOKENS,
    Outcome,
    attainments,
    by_length,
    goodput,
    prompt_tokens,
    refusals,
)


def served(ttft_s: float, num_tokens: int = 500, slo_s: float = 1.0) -> Outcome:
    return Outcome("all", num_tokens, 200, ttft_s, False, slo_s)


def refused(after_s: float = 0.01, has_retry_after: bool = True) -> Outcome:
    return Outcome("all", 500, 429, after_s, has_retry_after, 2.0)


def test_goodput_counts_what_came_within_the_level_of_its_router() -> None:
    assert goodput([served(0.9), served(1.1), refused()], seconds=2.0) == 0.5
    assert goodput([served(0.9, slo_s=2.0), served(1.1, slo_s=2.0), refused()], seconds=2.0) == 1.0


def test_a_refusal_without_retry_after_misses_the_goal() -> None:
    whole = {row.metric: row for row in refusals([served(0.5), refused(), refused()])}
    assert whole["refused with 429 and Retry-After"].holds is True
    lacking = {row.metric: row for row in refusals([served(0.5), refused(), refused(has_retry_after=False)])}
    assert (
        lacking["refused with 429 and Retry-After"].holds is False
        and lacking["refused with 429 and Retry-After"].ratio == 0.5
    )


def test_late_ones_and_slow_refusals_are_told_beside_the_level() -> None:
    rows = {
        row.metric: row
        for row in refusals([served(0.5, slo_s=2.0), served(2.5, slo_s=2.0), refused(0.02), refused(0.3)])
    }
    assert (rows["accepted and in time"].value, rows["accepted and in time"].ratio) == (1.0, 0.5)
    assert rows["TTFT of accepted requests, p99"].against_value == 2.0
    assert rows["time to a refusal, the longest"].holds is False


def test_an_overload_in_which_nobody_is_refused_misses_the_goal() -> None:
    assert [row.holds for row in refusals([served(0.5)])] == [False]


def test_long_and_short_prompts_are_told_apart() -> None:
    (row,) = by_length([served(0.5, 400), served(1.5, 400), served(0.5, 2 * MEAN_TOKENS), served(0.5, MEAN_TOKENS)])
    assert (row.value, row.against_value) == (1.0, 0.5)


def test_a_small_tenants_goal_is_all_of_its_requests() -> None:
    found = [served(0.5), served(1.5), *(Outcome("small", 500, 200, ttft_s, False) for ttft_s in (0.5, 0.6, 0.7, 1.5))]
    small, flood = attainments([Outcome("flood", 500, 200, 1.5, False), *found])
    assert (small.value, small.ratio, small.holds) == (0.75, 0.75, False)
    assert (flood.value, flood.holds) == (0.0, None)


def test_prompts_have_the_mean_that_capacity_is_told_from() -> None:
    rng = random.Random(0)
    drawn = [prompt_tokens(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(MEAN_TOKENS, rel=0.03) and max(drawn) == MOST_TOKENS

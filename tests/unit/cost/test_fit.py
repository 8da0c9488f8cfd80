"""The fit finds what steps cost, from mixed steps too, and is not led astray by outliers, by silence or by what it has
not seen."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster.cost.fit import CostFit, Step, least_nonnegative, step_of

TRUE = NodeCost(PrefillCost(5e-3, 5e-5, 2e-9), DecodeCost(8e-3, 1e-4, 3e-8))


def seconds(step: Step, cost: NodeCost = TRUE) -> float:
    added = cost.decode.added_s(step.rows, step.context_tokens)
    return cost.prefill.work_s(step.tokens, step.pairs) + added if step.tokens else cost.decode.fixed_s + added


def make_step(rng: random.Random, kind: str = "any") -> Step:
    rows = [(1, rng.randrange(100, 8000)) for _ in range(rng.randrange(1, 33))] if kind != "prefill" else []
    if kind == "prefill" or (kind == "any" and rng.random() < 0.4):
        rows.append((rng.randrange(16, 513), rng.randrange(0, 20_000)))
    return step_of(rows, 1.0)


def run(fit: CostFit, num: int, *, kind: str = "any", noise: float = 0.0, seed: int = 0, cost: NodeCost = TRUE) -> None:
    rng = random.Random(seed)
    for _ in range(num):
        step = make_step(rng, kind)
        took = seconds(step, cost) * (1 + noise * rng.uniform(-1, 1))
        fit.observe(Step(step.tokens, step.pairs, step.rows, step.context_tokens, took))


def assert_close(found: NodeCost, wanted: NodeCost = TRUE, within: float = 0.1) -> None:
    for new, cached in ((64, 0), (512, 0), (512, 16_000)):
        assert found.prefill.seconds(new, cached) == pytest.approx(wanted.prefill.seconds(new, cached), rel=within)
    for rows, context in ((1, 500), (8, 20_000), (32, 100_000)):
        assert found.decode.seconds(rows, context) == pytest.approx(wanted.decode.seconds(rows, context), rel=within)


def test_rows_of_one_token_are_decodes_and_the_others_chunks() -> None:
    assert step_of([(1, 10), (1, 20), (64, 32)], 0.5) == Step(64, num_pairs(64, 32), 2, 32, 0.5)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_steps_teach_both_halves(noise: float, seed: int) -> None:
    fit = CostFit()
    run(fit, 600, noise=noise, seed=seed)
    assert_close(fit.cost(), within=0.04 + noise / 2)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_the_prior_is_scaled_by_the_first_step_so_that_any_machine_is_learned(factor: float) -> None:
    prefill, decode = TRUE.prefill, TRUE.decode
    cost = NodeCost(
        PrefillCost(prefill.fixed_s * factor, prefill.token_s * factor, prefill.pair_s * factor),
        DecodeCost(decode.fixed_s * factor, decode.row_s * factor, decode.context_s * factor),
    )
    fit = CostFit()
    run(fit, 300, cost=cost)
    assert_close(fit.cost(), cost)


def test_a_few_steps_give_the_right_order_of_magnitude() -> None:
    fit = CostFit()
    run(fit, 4)
    assert fit.cost().decode.seconds(8, 20_000) == pytest.approx(TRUE.decode.seconds(8, 20_000), rel=1.0)


def test_outliers_are_clipped() -> None:
    fit = CostFit()
    run(fit, 200)
    for seed in range(10):
        run(fit, 20, seed=seed)
        fit.observe(Step(0, 0.0, 8, 20_000, 3.0))
    assert_close(fit.cost(), within=0.25)


@pytest.mark.parametrize("kind", ["prefill", "any"])
@pytest.mark.parametrize("place", [0, 1, 2, 5, 7, 8, 20])
def test_a_step_that_took_far_too_long_is_soon_outweighed_even_among_the_first_ones(place: int, kind: str) -> None:
    fit = CostFit()
    run(fit, place, kind=kind, noise=0.1)
    slow = step_of([(24, 0)], 1.0)
    fit.observe(Step(slow.tokens, slow.pairs, 0, 0, 300 * seconds(slow)))
    run(fit, 60, kind=kind, noise=0.1, seed=1)
    for new, cached in ((24, 0), (64, 0), (512, 0)):
        assert fit.cost().prefill.seconds(new, cached) == pytest.approx(TRUE.prefill.seconds(new, cached), rel=0.4)


def test_a_machine_that_became_slower_is_followed() -> None:
    fit = CostFit()
    run(fit, 300)
    slower = NodeCost(PrefillCost(15e-3, 15e-5, 6e-9), DecodeCost(24e-3, 3e-4, 9e-8))
    run(fit, 1500, cost=slower, seed=1)
    assert_close(fit.cost(), slower, within=0.15)


def test_a_machine_that_became_ten_times_slower_is_a_third_of_the_way_followed_after_a_few_hundred_steps() -> None:
    fit = CostFit()
    run(fit, 300)
    slower = NodeCost(PrefillCost(50e-3, 5e-4, 2e-8), DecodeCost(80e-3, 1e-3, 3e-7))
    run(fit, 400, cost=slower, seed=1)
    assert fit.cost().prefill.seconds(512, 0) > 0.3 * slower.prefill.seconds(512, 0)
    assert fit.cost().decode.seconds(8, 4000) > 0.3 * slower.decode.seconds(8, 4000)


def test_what_prefill_costs_is_not_forgotten_while_only_decodes_run() -> None:
    fit = CostFit()
    run(fit, 300)
    run(fit, 5000, kind="decode", seed=1)
    assert_close(fit.cost())


def test_long_contexts_are_not_forgotten_while_only_short_prompts_come() -> None:
    fit = CostFit()
    run(fit, 600)
    for _ in range(1500):
        step = step_of([(200, 0)], 1.0)
        fit.observe(Step(step.tokens, step.pairs, 0, 0, seconds(step)))
    assert fit.cost().prefill.seconds(512, 16_000) == pytest.approx(TRUE.prefill.seconds(512, 16_000), rel=0.3)


def test_samples_are_counted_by_kind_and_nonsense_is_not_counted() -> None:
    fit = CostFit(512)
    run(fit, 5, kind="prefill")
    fit.observe(Step(10, 50.0, 0, 0, 0.0))
    fit.observe(Step(0, 0.0, 0, 0, 1.0))
    cost = fit.cost()
    assert (cost.prefill.samples, cost.decode.samples, cost.prefill.chunk_tokens) == (5, 0, 512)


steps = st.builds(
    Step,
    st.integers(0, 10_000),
    st.floats(0, 1e9),
    st.integers(0, 512),
    st.integers(0, 10_000_000),
    st.floats(1e-9, 1e4, allow_nan=False),
)


@settings(max_examples=60)
@given(observed=st.lists(steps, max_size=40))
def test_whatever_steps_come_the_coefficients_are_finite_and_never_negative(observed: list[Step]) -> None:
    fit = CostFit()
    for step in observed:
        fit.observe(step)
    cost = fit.cost()
    values = (
        cost.prefill.fixed_s,
        cost.prefill.token_s,
        cost.prefill.pair_s,
        cost.decode.fixed_s,
        cost.decode.row_s,
        cost.decode.context_s,
    )
    assert all(np.isfinite(value) and value >= 0 for value in values)


three = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


@given(data=st.lists(three, min_size=4, max_size=4), moment=three)
def test_the_least_nonnegative_point_cannot_be_improved(data: list[list[float]], moment: list[float]) -> None:
    rows = np.array(data)
    gram = rows.T @ rows + 0.1 * np.eye(3)
    wanted = np.array(moment)
    x = least_nonnegative(gram, wanted)
    slope = wanted - gram @ x
    assert (x >= 0).all()
    assert (slope <= 1e-6).all(), "moving up helps nowhere"
    assert np.allclose(slope[x > 0], 0, atol=1e-6), "where x is free its slope is zero"


def covered(fit: CostFit, *, noise: float, kind: str, seed: int, num: int = 300) -> float:
    """Share of new steps that last as long as predicted, within the error bars."""
    rng, cost, found = random.Random(seed), fit.cost(), 0
    for _ in range(num):
        step = make_step(rng, kind)
        took = seconds(step) * (1 + noise * rng.uniform(-1, 1))
        work = (
            (1.0, float(step.tokens), step.pairs)
            if kind == "prefill"
            else (1.0, float(step.rows), float(step.context_tokens))
        )
        half = cost.prefill if kind == "prefill" else cost.decode
        predicted = seconds(step, cost)
        found += abs(took - predicted) <= half.error.seconds(work, predicted)
    return found / num


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_nine_of_ten_new_steps_are_within_the_error_bars(noise: float, kind: str) -> None:
    shares = []
    for seed in range(4):
        fit = CostFit()
        run(fit, 600, noise=noise, seed=seed)
        shares.append(covered(fit, noise=noise, kind=kind, seed=seed + 50))
    assert sum(shares) / len(shares) == pytest.approx(0.925, abs=0.06)


def test_error_bars_shrink_with_steps_and_grow_with_noise() -> None:
    found = {}
    for num, noise in ((12, 0.1), (500, 0.1), (500, 0.4)):
        fit = CostFit()
        run(fit, num, noise=noise, seed=1)
        found[num, noise] = fit.cost().prefill.error_s(256, 1000) / fit.cost().prefill.seconds(256, 1000)
    assert found[500, 0.1] < found[500, 0.4] < found[12, 0.1]


def test_nobody_claims_to_know_what_was_never_run() -> None:
    """Only prompts of 64 tokens: those are known well, a long context is not, whatever the noise, and decoding least of
    all."""
    fit, rng = CostFit(), random.Random(3)
    for _ in range(300):
        fit.observe(Step(64, num_pairs(64, 0), 0, 0, 0.01 * rng.uniform(0.98, 1.02)))
    cost = fit.cost()
    assert cost.prefill.error_s(64) < 0.05 * cost.prefill.seconds(64)
    assert cost.prefill.error_s(64, 20_000) > 0.1 * cost.prefill.seconds(64, 20_000)
    assert cost.decode.error.doubt > 1.0
    assert cost.prefill.error.doubt < 0.02


def test_a_stopped_process_now_and_then_does_not_widen_the_bars() -> None:
    fit = CostFit()
    run(fit, 300, noise=0.1)
    before = fit.cost().decode.error.spread
    for seed in range(4):
        fit.observe(Step(0, 0.0, 8, 20_000, 3.0))
        run(fit, 25, noise=0.1, seed=seed, kind="decode")
    assert fit.cost().decode.error.spread < 1.5 * before


@given(
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 64), st.floats(1e-7, 1e3)), min_size=1, max_size=40),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_error_bars_are_finite_numbers_whatever_the_steps(steps: list[tuple[int, int, float]], all_alike: bool) -> None:
    fit = CostFit()
    for tokens, rows, took in [steps[0]] * len(steps) if all_alike else steps:
        fit.observe(Step(tokens, num_pairs(tokens, 0), rows, 100 * rows, took))
    for half in (fit.cost().prefill, fit.cost().decode):
        error = half.error
        assert all(np.isfinite(value) for value in (error.spread, error.doubt, *error.root))
        assert error.spread >= 0
        assert error.doubt >= 0


def test_a_cost_is_worked_out_once_until_another_step_is_seen() -> None:
    """An idle node reports it many times a second."""
    fit = CostFit()
    run(fit, 40)
    known = fit.cost()
    assert fit.cost() is known
    run(fit, 1, seed=5)
    assert fit.cost().prefill.samples + fit.cost().decode.samples == 41
    assert fit.cost() != known

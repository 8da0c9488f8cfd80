"""What a node measured itself and what is typical are each believed by how sure they are."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcluster.core.bounds import MAX_SECONDS
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster.cost.fit import CostFit, Step
from pdcluster_router.cluster.pacing import SURE_SAMPLES, blended_decode, blended_prefill, completed

TYPICAL = NodeCost(PrefillCost(5e-3, 5e-5, 4e-9, 512, 5000), DecodeCost(8e-3, 1e-4, 3e-8, 5000))


def own(num_steps: int, factor: float = 1.3) -> NodeCost:
    """Of a node `factor` times as slow, fitted to so many short prompts and to no decode step."""
    fit, chance = CostFit(512), random.Random(7)
    for _ in range(num_steps):
        tokens = chance.randrange(16, 65)
        pairs = num_pairs(tokens, 0)
        fit.observe(
            Step(tokens, pairs, 0, 0, factor * TYPICAL.prefill.work_s(tokens, pairs) * chance.uniform(0.95, 1.05))
        )
    return fit.cost()


def test_short_prompts_cost_what_the_node_measured_and_long_ones_what_is_typical() -> None:
    blend = blended_prefill(own(40).prefill, TYPICAL.prefill)
    assert blend.seconds(48) == pytest.approx(1.3 * TYPICAL.prefill.seconds(48), rel=0.05)
    alone_off = abs(own(40).prefill.seconds(512, 30_000) / TYPICAL.prefill.seconds(512, 30_000) - 1)
    assert abs(blend.seconds(512, 30_000) / TYPICAL.prefill.seconds(512, 30_000) - 1) < min(0.45, alone_off)


def test_more_steps_weigh_more() -> None:
    few, many = (
        abs(blended_prefill(own(steps).prefill, TYPICAL.prefill).seconds(48) / (1.3 * TYPICAL.prefill.seconds(48)) - 1)
        for steps in (1, 60)
    )
    assert many <= few + 0.02


def test_a_node_that_is_certain_is_believed_and_one_that_knows_nothing_is_not() -> None:
    certain = PrefillCost(1e-2, 1e-4, 1e-8, 512, 10)
    assert blended_prefill(certain, TYPICAL.prefill).seconds(512, 100) == pytest.approx(
        certain.seconds(512, 100), rel=1e-3
    )
    ignorant = DecodeCost(1.0, 1.0, 1.0, 3, CostError(0.5, 10.0, (1e3, 0.0, 1e3, 0.0, 0.0, 1e3)))
    assert blended_decode(ignorant, TYPICAL.decode).seconds(8, 4000) == pytest.approx(
        TYPICAL.decode.seconds(8, 4000), rel=1e-3
    )


def test_a_half_that_never_ran_is_typical_and_one_that_ran_enough_its_own() -> None:
    found = completed(own(SURE_SAMPLES), TYPICAL)
    assert found is not None
    assert (found.prefill, found.decode) == (own(SURE_SAMPLES).prefill, TYPICAL.decode)
    assert completed(own(SURE_SAMPLES), None) is None
    assert completed(own(3), None) is None


def test_costs_of_nothing_can_be_blended_too() -> None:
    blend = blended_prefill(PrefillCost(0.0, 0.0, 0.0, 0, 3, CostError(0.5, 1.0)), PrefillCost(0.0, 1e-4, 0.0, 0, 300))
    assert 0.0 <= blend.token_s <= 1e-4
    assert blend.fixed_s == blend.pair_s == 0.0


def test_a_coefficient_that_both_found_to_be_nothing_stays_nothing_however_unsure_they_are() -> None:
    """Divided by such a coefficient, the error bars were beyond what a float holds."""
    unsure = CostError(0.5, 1.0, (1e-3, 0.0, 1e-4, 1e-5, 0.0, 1e-6))
    blend = blended_decode(DecodeCost(2e-3, 1e-4, 0.0, 9, unsure), DecodeCost(1e-3, 2e-4, 0.0, 300, unsure))
    assert blend.context_s == 0.0 and 1e-3 <= blend.fixed_s <= 2e-3


COEFFICIENTS = st.tuples(*[st.one_of(st.just(0.0), st.floats(0.0, MAX_SECONDS))] * 3)
ROOTS = st.tuples(*[st.floats(-MAX_SECONDS, MAX_SECONDS)] * 6)
SINGULAR = (1e9, -1.5e-7, 0.0, -1e9, -1e-3, 0.0)


@settings(max_examples=200, deadline=None)
@given(COEFFICIENTS, ROOTS, COEFFICIENTS, ROOTS)
@example((0.0, 1.0, 1e-18), (-1e-300, -6e-6, -4e-15, -1e-3, -1e-30, 1e-3), (1e-30, 5e-324, 1.0), SINGULAR)
@example(
    (1e-9, 0.0, 1.0),
    (-1.0, -1.0, -1e-300, -1e-300, 1e-3, -12.0),
    (0.0, 1e-9, 0.0),
    (1e-300, 1e-9, -5e-324, -1e-300, -5e-324, 1e-300),
)
def test_whatever_a_node_may_report_makes_a_cost(
    own_s: tuple[float, ...], own_root: tuple[float, ...], typical_s: tuple[float, ...], typical_root: tuple[float, ...]
) -> None:
    """One report of which nothing can be made would fail every request of the router."""
    reported = DecodeCost(*own_s, 9, CostError(0.5, 1.0, own_root))  # type: ignore[arg-type, misc]
    typical = DecodeCost(*typical_s, 300, CostError(0.5, 1.0, typical_root))  # type: ignore[arg-type, misc]
    blend = blended_decode(reported, typical)
    assert all(0.0 <= each <= MAX_SECONDS for each in (blend.fixed_s, blend.row_s, blend.context_s))

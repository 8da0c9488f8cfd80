"""What a node's cost model and load together say about the next seconds there."""

from dataclasses import replace

import pytest

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster_router.cluster.pacing import MIN_SAMPLES, SURE_SAMPLES, NodePacing, NodeWork, pace, typical_cost

COST = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 256, 100), DecodeCost(0.02, 1e-4, 1e-8, 100))


def _pace(tokens: int = 0, cached: int = 0, rows: int = 10) -> NodePacing:
    return pace(COST, NodeWork(tokens, round(num_pairs(tokens, cached)), rows, rows * 1000))


def test_rows_beside_a_long_prompt_wait_longer_for_each_token_than_beside_a_short_one() -> None:
    beside_short, beside_long = _pace(tokens=1000), _pace(tokens=1000, cached=60_000)
    assert beside_long.prompt_step_s - beside_short.prompt_step_s == pytest.approx(2e-9 * 256 * 60_000)
    assert beside_long.prompt_step_s > 1.5 * beside_short.prompt_step_s


def test_without_a_prompt_a_full_chunk_of_a_prompt_like_those_of_the_rows_is_expected_beside_them() -> None:
    full_s = COST.prefill.work_s(256, 256 * 500)
    assert _pace().prompt_step_s == pytest.approx(full_s + COST.decode.added_s(10, 10_000))
    assert _pace(rows=0).prompt_step_s == pytest.approx(COST.prefill.seconds(256))


def test_rows_stretch_a_long_prompt_less_than_a_short_one() -> None:
    assert 1.0 < _pace(tokens=1000, cached=60_000).stretch < _pace(tokens=1000).stretch


def _cost(times: float, samples: int) -> NodeCost:
    """Of a node that is so many times as slow."""
    prefill = replace(COST.prefill, fixed_s=0.005 * times, token_s=1e-4 * times, samples=samples)
    return NodeCost(prefill, replace(COST.decode, fixed_s=0.02 * times, samples=samples))


def test_who_claims_most_steps_does_not_say_alone_what_is_typical() -> None:
    """The largest claim was believed, however large: one node that lies, or counts wrongly, priced all nodes that know
    little of themselves."""
    honest = [_cost(times, 100 + round(10 * times)) for times in (0.9, 1.0, 1.1)]
    for liar in (_cost(0.001, 1 << 60), _cost(1000.0, 1 << 60)):
        found = typical_cost([*honest, liar])
        assert found in honest
        assert typical_cost([liar, *reversed(honest)]) == found, "whatever the order"


def test_a_node_that_is_sure_counts_before_those_that_are_not() -> None:
    sure = _cost(1.0, SURE_SAMPLES)
    assert typical_cost([_cost(0.5, SURE_SAMPLES - 1), sure, _cost(0.6, MIN_SAMPLES)]) == sure
    assert typical_cost([_cost(0.5, MIN_SAMPLES), _cost(0.7, MIN_SAMPLES - 1)]) == _cost(0.5, MIN_SAMPLES)


def test_nothing_is_typical_before_somebody_ran_steps_of_both_kinds() -> None:
    few = _cost(1.0, MIN_SAMPLES - 1)
    assert typical_cost([]) is None
    assert typical_cost([NodeCost(COST.prefill, few.decode), few]) is None
    assert typical_cost([NodeCost(COST.prefill, few.decode), NodeCost(few.prefill, COST.decode)]) == COST, (
        "each half from who knows it"
    )

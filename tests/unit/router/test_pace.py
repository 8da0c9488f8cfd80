"""What a node's cost model and load together say about the next seconds there."""

import pytest

from pdcluster.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster_router.pace import Pace, Work, pace

COST = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 256, 100), DecodeCost(0.02, 1e-4, 1e-8, 100))


def _pace(tokens: int = 0, cached: int = 0, rows: int = 10) -> Pace:
    return pace(COST, Work(tokens, round(num_pairs(tokens, cached)), rows, rows * 1000))


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

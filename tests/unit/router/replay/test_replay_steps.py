"""Closed forms of many steps against steps added one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import COST

from pdcluster.cost.cost import num_pairs
from pdcluster_router.replay.node import Segment, segment


def _step_s(rows: int, context: int, chunk: int, done: int) -> float:
    prefill, decode = COST.prefill, COST.decode
    weights = max(decode.fixed_s if rows else 0.0, prefill.fixed_s + prefill.token_s * chunk if chunk else 0.0)
    return weights + prefill.pair_s * num_pairs(chunk, done) + decode.row_s * rows + decode.context_s * context


@given(
    rows=st.integers(0, 50),
    context=st.integers(0, 10_000),
    chunk=st.integers(0, 512),
    done=st.integers(0, 5000),
    count=st.integers(1, 40),
)
def test_steps_add_up(rows: int, context: int, chunk: int, done: int, count: int) -> None:
    if not rows:
        context = 0
    found = segment(COST, 5.0, count, rows, context, chunk, done)
    total = 5.0 + sum(_step_s(rows, context + rows * step, chunk, done + chunk * step) for step in range(count))
    assert found.end_s == pytest.approx(total)


@given(first_s=st.floats(0.001, 1), growth_s=st.floats(0, 0.1), count=st.integers(1, 1000), share=st.floats(0, 1.2))
def test_a_moment_lies_in_the_step_that_is_found(first_s: float, growth_s: float, count: int, share: float) -> None:
    found = Segment(2.0, first_s, growth_s, count)
    moment = 2.0 + share * (found.end_s - 2.0)
    steps = found.steps_until(moment)
    assert 0 <= steps <= count
    assert steps == count or found.after(steps) >= moment
    assert steps == 0 or found.after(steps - 1) < moment


def test_before_the_first_step_nothing_is_done() -> None:
    assert Segment(2.0, 0.1, 0.0, 5).steps_until(2.0) == 0

"""Bounds that the terms of `seconds` keep, whatever a node reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import make_load, make_node

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.core.node_row import NodeRow
from pdcluster_router.policy.predicted.cost_model import alone_s, paced_s

COST = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 256, 100), DecodeCost(0.02, 1.5e-4, 3e-8, 100))
TOKENS = st.integers(1, 200_000)


def node_row(rows: int, waiting: int, itl_s: float) -> NodeRow:
    load = make_load(
        rows=rows,
        running=rows,
        context_tokens=3000 * rows,
        waiting=int(waiting > 0),
        waiting_tokens=waiting,
        itl_s=itl_s,
    )
    return make_node("d0", "decode", load, COST).row(COST)


@given(st.integers(1, 100), TOKENS, st.floats(0.0, 0.1), TOKENS, TOKENS, st.integers(1, 5000))
def test_rows_are_neither_slower_nor_faster_than_their_steps(
    rows: int, waiting: int, itl_s: float, new: int, cached: int, output: int
) -> None:
    node = node_row(rows, waiting, itl_s)
    busy_s = max(alone_s(node, new, cached) / max(new / node.chunk_tokens, 1.0), node.decode_fixed_s) + node.added_s
    found = paced_s(node, new, cached, output)
    assert found <= max(busy_s, node.itl_s) * (1 + 1e-9)
    assert found >= min(busy_s, node.itl_s) * (1 - 1e-9)


def test_one_long_prompt_may_slow_a_row_more_than_the_mean_and_a_prompt_in_every_step_may_not() -> None:
    node = node_row(10, 0, 0.0)
    busy_s, mean_s = node.tpot_s + 0.02, node.tpot_s + 0.01
    chunks = (
        (busy_s - node.added_s - 0.005 - 256e-4) / 2e-9 / 256
    )  # so far behind its beginning that a step of it takes busy_s
    beside_half = paced_s(node, 256 * 100, chunks - 128 * 100, 200)
    assert mean_s + 0.002 < beside_half < busy_s
    assert paced_s(node, 256 * 100, chunks - 128 * 100, 100) == pytest.approx(busy_s)

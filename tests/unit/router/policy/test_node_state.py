"""A node in numbers: what follows from its report, its costs and the work sent since."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import make_load, make_node
from seconds_oracle import Pace

from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster_router.cluster.view import InFlightWork, NodeView
from pdcluster_router.core.node_row import NodeRow

COUNTS = st.integers(0, 5000)
ROLES: st.SearchStrategy[Role] = st.sampled_from(["prefill", "decode", "mixed"])

costs = st.builds(
    NodeCost,
    st.builds(
        PrefillCost,
        st.floats(0, 0.01),
        st.floats(0, 1e-3),
        st.floats(0, 1e-8),
        st.sampled_from([0, 16, 512]),
        st.just(100),
    ),
    st.builds(DecodeCost, st.floats(0, 0.01), st.floats(0, 1e-3), st.floats(0, 1e-8), st.just(100)),
)
pendings = st.builds(InFlightWork, *[COUNTS] * len(InFlightWork._fields))


@st.composite
def loads(draw: st.DrawFn) -> Load | None:
    if draw(st.integers(0, 9)) == 0:
        return None
    counts = {
        name: draw(COUNTS)
        for name in ("waiting", "waiting_tokens", "waiting_pairs", "rows", "context_tokens", "slots_used", "running")
    }
    pages = draw(st.integers(0, 1000))
    free = draw(st.integers(0, pages))
    load = make_load(**counts, pages_total=pages, pages_free=free, pages_cached=draw(st.integers(0, pages - free)))
    return msgspec.structs.replace(load, itl_s=draw(st.floats(0, 1)))


@given(load=loads(), pending=pendings, cost=costs, role=ROLES, in_flight=COUNTS)
def test_a_row_says_of_a_nodes_work_what_the_plain_pace_says(
    load: Load | None, pending: InFlightWork, cost: NodeCost, role: Role, in_flight: int
) -> None:
    node = NodeView(
        Endpoint("n", "boot", "n:1"), role, in_flight, load, 32, 4096, pending=pending, cost=cost, kv_bytes_per_token=7
    )
    node_row, said = node.row(cost), Pace.of(node, cost)
    assert (node_row.wait_s, node_row.backlog_s, node_row.stretch) == (said.wait_s, said.backlog_s, said.stretch)
    assert (node_row.tpot_s, node_row.itl_s, node_row.prompt_step_s) == (said.tpot_s, said.itl_s, said.prompt_step_s)
    assert (node_row.rows, node_row.context_tokens) == (said.rows, said.context_tokens)
    assert node_row.added_s == cost.decode.added_s(said.rows, said.context_tokens)
    assert (node_row.num_prompts, node_row.num_requests) == (node.num_prompts, node.num_requests)
    assert node_row.chunk_tokens == (cost.prefill.chunk_tokens or inf) and node_row.is_server == (role != "decode")
    assert (node_row.decode_fixed_s, node_row.each_row_s, node_row.context_s) == (
        cost.decode.fixed_s,
        cost.decode.row_s,
        cost.decode.context_s,
    )


@pytest.mark.parametrize(("rows", "itl_s"), [(0, 0.25), (1, 1.0), (8, 1.5)])
def test_gaps_between_tokens_count_while_there_are_rows_that_have_them(rows: int, itl_s: float) -> None:
    cost = NodeCost(PrefillCost(0.01, 1e-3, samples=100), DecodeCost(0.25, 0.0, samples=100))
    load = msgspec.structs.replace(make_load(rows=rows), itl_s=itl_s if rows else 9.0)
    assert NodeView(Endpoint("n", "boot", "n:1"), "mixed", 0, load, 32, 4096, cost=cost).row(cost).itl_s == itl_s


@given(load=loads(), pending=pendings, cost=costs)
def test_a_rows_room_is_what_the_report_and_the_work_on_its_way_leave(
    load: Load | None, pending: InFlightWork, cost: NodeCost
) -> None:
    node_row = NodeView(Endpoint("n", "boot", "n:1"), "mixed", 0, load, 32, 4096, pending=pending).row(cost)
    if load is None:
        assert (node_row.missing_rows, node_row.tight, node_row.spare_pages) == (0.0, 0.0, 0.0)
        return
    left = load.pages_free + load.pages_cached
    missing = load.slots_used + pending.rows - load.slots + 1
    assert node_row.missing_rows == (max(missing, 0) / load.slots if load.slots else 0.0)
    assert (node_row.tight > 0) == (load.pages_total > 0 and left < load.pages_total // 4)
    assert node_row.spare_pages == left - pending.context_tokens / 32


COST = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 256, 100), DecodeCost(0.02, 1e-4, 1e-8, 100))


def row_of(tokens: int = 0, cached: int = 0, rows: int = 10) -> NodeRow:
    pairs = round(num_pairs(tokens, cached))
    load = make_load(waiting_tokens=tokens, waiting_pairs=pairs, rows=rows, context_tokens=rows * 1000)
    return make_node("n", "mixed", load, COST).row(COST)


def test_rows_beside_a_long_prompt_wait_longer_for_each_token_than_beside_a_short_one() -> None:
    beside_short, beside_long = row_of(tokens=1000), row_of(tokens=1000, cached=60_000)
    assert beside_long.prompt_step_s - beside_short.prompt_step_s == pytest.approx(2e-9 * 256 * 60_000)
    assert beside_long.prompt_step_s > 1.5 * beside_short.prompt_step_s


def test_without_a_prompt_a_full_chunk_of_a_prompt_like_those_of_the_rows_is_expected_beside_them() -> None:
    full_s = COST.prefill.work_s(256, 256 * 500)
    assert row_of().prompt_step_s == pytest.approx(full_s + COST.decode.added_s(10, 10_000))
    assert row_of(rows=0).prompt_step_s == pytest.approx(COST.prefill.seconds(256))


def test_rows_stretch_a_long_prompt_less_than_a_short_one() -> None:
    assert 1.0 < row_of(tokens=1000, cached=60_000).stretch < row_of(tokens=1000).stretch

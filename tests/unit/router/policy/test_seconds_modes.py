"""When `seconds` lets a decode node compute a prompt itself: as far as first tokens are nearer to being late than its
rows are to being slow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from scripted_cluster import EMPTY_LOAD, make_node

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.candidates import Candidate
from pdcluster_router.policy.predicted_seconds import Seconds
from pdcluster_router.queueing.headroom import Headroom

COST = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 512, 100), DecodeCost(0.02, 1.5e-4, 3e-8, 100))
QUERY = Query(num_tokens=4000, expected_output=200)


def _node(name: str, role: str, *, tokens: int = 0, rows: int = 0, context: int = 0, itl_s: float = 0.0) -> NodeView:
    load = replace(
        EMPTY_LOAD,
        waiting=int(tokens > 0),
        waiting_tokens=tokens,
        waiting_pairs=round(num_pairs(tokens, 0)),
        rows=rows,
        running=rows,
        slots=256,
        slots_used=rows,
        context_tokens=context,
        pages_total=100_000,
        pages_free=100_000,
        itl_s=itl_s,
    )
    return replace(make_node(name, role), load=load, cost=COST, bandwidth={"d": 1e10, "p": 1e10}, max_len=100_000)


def _computes(num_held: int, rows: int, **changes: float) -> str:
    """The node that computes the prompt; rows run on the decode node."""
    view = ClusterView((_node("p", "prefill", tokens=4000), _node("d", "decode", rows=rows, context=rows * 5000)))
    return Seconds().choose(replace(QUERY, num_held=num_held, **changes), view).first.name  # type: ignore[arg-type]


def test_few_rows_take_a_prompt_when_many_wait() -> None:
    assert _computes(num_held=10, rows=5) == "d"


def test_rows_that_are_nearly_slow_are_left_alone_while_nobody_will_be_late() -> None:
    assert _computes(num_held=2, rows=55) == "p"


def test_the_more_wait_the_slower_the_rows_that_still_help() -> None:
    most_rows = [
        max((rows for rows in range(0, 100, 5) if _computes(num_held, rows) == "d"), default=-1)
        for num_held in (0, 1, 4, 16)
    ]
    assert most_rows == sorted(most_rows) and most_rows[0] < most_rows[-1]


@pytest.mark.parametrize(
    ("output", "itl_s", "first"), [(200, 0.0, "d"), (8, 0.0, "p"), (200, 0.03, "d"), (200, 0.045, "p")]
)
def test_rows_are_not_made_slow_for_any_queue(output: int, itl_s: float, first: str) -> None:
    """Eight steps of 58 ms beside them are little of 200 tokens and all of 8; rows that were slow lately get nothing
    more to carry."""
    view = ClusterView((_node("p", "prefill", tokens=4000), _node("d", "decode", rows=10, context=50_000, itl_s=itl_s)))
    assert Seconds().choose(replace(QUERY, num_held=200, expected_output=output), view).first.name == first


def test_a_prompt_that_waits_on_a_decode_node_will_be_a_row_there() -> None:
    """One step of a whole prompt would hold it up longer than it may be."""
    whole = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 0, 100), COST.decode)
    nodes = [_node("p", "prefill", tokens=40_000), _node("d", "decode"), _node("d", "decode", tokens=100)]
    prefill, idle, computing = (replace(node, cost=whole) for node in nodes)
    firsts = [
        Seconds().choose(replace(QUERY, num_held=20, itl_s=0.1), ClusterView((prefill, decode))).first.name
        for decode in (idle, computing)
    ]
    assert firsts == ["d", "p"]


def test_a_row_on_a_prefill_node_expects_the_prompts_that_wait_in_the_router() -> None:
    view = ClusterView((_node("p", "prefill"), _node("d", "decode")))
    few, many = (
        _decode_s(Seconds().choose(replace(QUERY, num_held=held, force="local"), view).record.candidates.read())
        for held in (0, 20)
    )
    assert many > 2 * few


def _decode_s(candidates: list[Candidate]) -> float:
    return next(candidate.terms["decode"] for candidate in candidates if candidate.node == "p")


def test_of_nodes_with_rows_only_those_suit_that_a_prompt_does_not_slow() -> None:
    """Eight tokens are an answer here: a prompt beside it takes all of it. The prefill node has much to do."""
    prefill, idle, rows = (
        _node("p", "prefill", tokens=40_000),
        _node("d", "decode"),
        _node("d1", "decode", rows=20, context=100_000),
    )
    decision = Seconds().choose(replace(QUERY, expected_output=8), ClusterView((prefill, idle, rows)))
    assert decision.first.name == "d"
    assert Headroom().usable(decision) & {"d-boot", "d1-boot"} == {"d-boot"}

"""What a router remembers of the prompt work that it sent."""

from __future__ import annotations

import pytest
from policy_cases import make_load, make_node

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.policy.selector import RecentWork

COST = NodeCost(PrefillCost(0.01, 1e-4, 0.0, 0, 100), DecodeCost(0.01, 0.001, 0.0, 100))
NODE = make_node("p0", "prefill", make_load(), COST)


def test_a_steady_stream_is_as_many_nodes_as_it_keeps_busy() -> None:
    sent = RecentWork(5.0)
    for number in range(1000):
        sent.add(NODE, 900, 0, 0.05 * number)  # 0.1 s of work, twenty times a second
    assert sent.per_second(50.0) == pytest.approx(2.0, rel=0.02)


def test_what_is_cached_is_no_work() -> None:
    all_of_it, rest = RecentWork(5.0), RecentWork(5.0)
    all_of_it.add(NODE, 1000, 0, 1.0)
    rest.add(NODE, 400, 600, 1.0)
    assert rest.per_second(1.0) == pytest.approx(0.05 / 0.11 * all_of_it.per_second(1.0))


def test_it_is_forgotten_and_never_negative() -> None:
    sent = RecentWork(5.0)
    assert sent.per_second(3.0) == 0.0
    sent.add(NODE, 1000, 0, 1.0)
    shares = [sent.per_second(moment) for moment in (1.0, 2.0, 6.0, 100.0)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 1e-6 * shares[0]
    assert sent.per_second(0.5) == shares[0], "a moment before the last one is that one"


def test_a_node_whose_cost_is_unknown_adds_nothing() -> None:
    sent = RecentWork(5.0)
    sent.add(make_node("p0", "prefill", make_load(), None), 1000, 0, 1.0)
    assert sent.per_second(1.0) == 0.0

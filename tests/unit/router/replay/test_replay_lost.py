"""The replay tells policies what the router tells them of prefixes that no node kept."""

from dataclasses import replace

import pytest
from replay_cases import COST

from pdcluster.cost.cost import PrefillCost
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.replay.node import NodeSpec, SimNode
from pdcluster_router.replay.routing import ReplayRouter, RouterSpec
from pdcluster_router.replay.simulation import Simulation
from pdcluster_router.replay.workloads import generate

BLOCK_TOKENS = 512
# Nothing waits for long: what is asked for again was computed.
FAST = replace(COST, prefill=PrefillCost(0.01, 1e-5, 0.0, BLOCK_TOKENS, 10))


class Listening:
    """Least load, and what it was told."""

    name = "listening"

    def __init__(self) -> None:
        self._rule = make_policy("least-load")
        self.lost: list[float] = []

    def choose(self, query: Query, view: ClusterView) -> Decision:
        self.lost.append(query.lost)
        return self._rule.choose(query, view)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        return self._rule.choose_decode(query, view, prefill)


@pytest.mark.parametrize(("cache_tokens", "is_scarce"), [(200_000, True), (4_000_000, False)])
def test_a_policy_is_told_that_documents_no_longer_fit(cache_tokens: int, is_scarce: bool) -> None:
    policy = Listening()
    nodes = [SimNode(f"n{number}", "mixed", NodeSpec(FAST, cache_tokens, BLOCK_TOKENS)) for number in range(2)]
    Simulation(nodes, ReplayRouter(nodes, RouterSpec(policy))).run(generate("documents", 200, seed=0))
    assert len(policy.lost) >= 200 and policy.lost[0] == 0.0
    assert policy.lost[-1] > 0.3 if is_scarce else policy.lost[-1] < 0.03, (
        "one came before what it has in common with another was computed"
    )

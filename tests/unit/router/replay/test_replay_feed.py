"""The production index behind a feed: equal to the nodes' caches without delay, catching up with it, repaired after
losses."""

import random

import pytest
from replay_cases import COST, random_trace

from pdcluster_router.policy.base import Decision
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.prefix_index.index import PrefixIndex
from pdcluster_router.replay.feed import IMMEDIATE, REPORT_S, Feed, FeedSpec
from pdcluster_router.replay.node import NodeSpec, SimNode, Task
from pdcluster_router.replay.routing import ReplayRouter, RouterSpec
from pdcluster_router.replay.simulation import Simulation
from pdcluster_router.replay.trace import BlockChain


def _nodes(count: int = 3, cache_tokens: int = 2048) -> list[SimNode]:
    return [SimNode(f"n{number}", "mixed", NodeSpec(COST, cache_tokens, 16)) for number in range(count)]


class Watched(ReplayRouter):
    """At each choice, compares what the index says with what nodes hold."""

    def try_admit(self, task: Task, now: float) -> Decision | None:
        choice = super().try_admit(task, now)
        blocks = task.request.blocks
        told = self.index.depths(b"".join(blocks)) if blocks else {}
        assert told == {
            feed.node.name: depth for feed in self.feeds.values() if (depth := feed.node.cache.depth(blocks))
        }
        return choice


@pytest.mark.parametrize("seed", range(3))
def test_without_delay_the_index_says_what_nodes_hold(seed: int) -> None:
    nodes = _nodes(cache_tokens=512)
    simulation = Simulation(nodes, Watched(nodes, RouterSpec(make_policy("product"), seed=seed)))
    simulation.run(random_trace(seed, 300))
    assert sum(node.cache.num_kept for node in nodes) > 0


def _grow(node: SimNode, chain: BlockChain, number: int) -> bytes:
    blocks = chain.extend((), [number, number + 1])
    hold = node.cache.open(blocks, 2)
    assert hold is not None
    node.cache.publish(hold, blocks)
    node.cache.close(hold)
    return b"".join(blocks)


def test_a_delayed_feed_says_what_was_true_before() -> None:
    (node,), index, chain = _nodes(1), PrefixIndex(), BlockChain()
    feed = Feed(node, index, FeedSpec(delay_s=1.0), random.Random(0))
    hashes = _grow(node, chain, 1)
    feed.update(0.0)
    assert index.depths(hashes) == {} and feed.report is None
    feed.update(0.9)
    assert index.depths(hashes) == {}
    feed.update(1.0)
    assert index.depths(hashes) == {"n0": 2} and feed.report_s == 0.0


def test_a_lost_message_is_noticed_and_a_snapshot_repairs_the_index() -> None:
    (node,), index, chain = _nodes(1), PrefixIndex(), BlockChain()
    feed = Feed(node, index, FeedSpec(delay_s=0.1, loss=0.3), random.Random(2))
    grown = []
    for step in range(100):
        grown.append(_grow(node, chain, 10 * step))
        feed.update(float(step))
    feed.spec = FeedSpec(delay_s=0.1)
    for step in range(100, 104):  # no more losses: what is told now closes the last gap
        grown.append(_grow(node, chain, 10 * step))
        feed.update(float(step))
        feed.update(step + 0.5)
    assert feed.num_gaps > 5
    for hashes in grown:
        blocks = tuple(hashes[at : at + 16] for at in range(0, len(hashes), 16))
        assert index.depths(hashes).get("n0", 0) == node.cache.depth(blocks)


def test_an_immediate_feed_loses_nothing() -> None:
    assert FeedSpec(0.0, 0.0) == IMMEDIATE


@pytest.mark.parametrize("has_table", [False, True])
def test_how_fast_paths_were_is_known_by_the_next_report_and_choices_see_it(has_table: bool) -> None:
    nodes = _nodes()
    router = ReplayRouter(nodes, RouterSpec(make_policy("seconds"), bandwidth=1e9))

    def rates() -> list[float]:
        view = router._view()
        found: list[float] = view.roster.paths(0, view.reported[0].bandwidth).tolist()
        return found

    router._hear(0.0)
    if has_table:
        assert router._view().table is not None
    assert rates() == [1e9] * 3
    for _ in range(50):
        router.moved("n0", "n1", 1e6, 1.0)
        router.moved("n2", "n1", 1e6, 0.5)
    assert rates() == [1e9] * 3, "no node has reported since"
    router._hear(REPORT_S + 0.01)
    assert rates() == pytest.approx([1e6] * 3, rel=0.05), "what it sends is slow, whoever gets it"
    for _ in range(50):
        router.moved("n0", "n2", 1e7, 1.0)
    router._hear(2 * (REPORT_S + 0.01))
    assert rates() == pytest.approx([1e7, 1.5e6, 1e7], rel=0.7), "n1 still receives slowly"

"""A node whose engine stands still while its loop goes on: its requests go on elsewhere, and it takes none until the
engine gets on."""

from __future__ import annotations

import asyncio
import random

import pytest
from local_cluster import LocalCluster, LocalNode
from oracle import VOCAB, OracleEngine, reference

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


def prompt_of(number: int) -> list[int]:
    return [random.Random(number).randrange(VOCAB) for _ in range(24 + number % 7)]


async def run_all(cluster: LocalCluster, first: int, count: int, num_output: int) -> set[str]:
    """Right answers, and the nodes that gave them."""
    answers = await asyncio.gather(*(cluster.run(prompt_of(first + n), num_output) for n in range(count)))
    used = set()
    for number, (tokens, done) in enumerate(answers, start=first):
        assert tokens == reference(prompt_of(number), num_output), f"request {number}"
        used |= {str(done.route.prefill), str(done.route.decode)}
    return used


def engine_of(node: LocalNode) -> OracleEngine:
    assert isinstance(node.engine, OracleEngine)
    return node.engine


@pytest.mark.parametrize("name", ["d0", "p0"])
async def test_requests_of_a_stuck_node_go_on_elsewhere_and_it_returns(name: str) -> None:
    async with LocalCluster(ROLES, num_pages=128, force="remote") as cluster:
        await run_all(cluster, 0, 40, 12)  # steps of both kinds are known now
        node = cluster.nodes[name]
        events = cluster.router.events
        engine_of(node).hold = True
        running = asyncio.create_task(run_all(cluster, 100, 12, 20))
        await cluster.until(lambda: node.parts.stuck.is_stuck)
        assert await running
        await cluster.until(lambda: [each.kind for each in events.since(0)][-1] == "node-stuck")
        (view,) = (each for each in cluster.router.view().nodes if each.name == name)
        assert not view.accepts_work and view.load is not None and view.load.stuck
        assert name not in await run_all(cluster, 200, 12, 5), "it is out of rotation"
        engine_of(node).hold = False
        engine_of(node).finish()
        await cluster.until(lambda: all(each.accepts_work for each in cluster.router.view().nodes))
        assert [each.kind for each in events.since(0)][-1] == "node-answers"
        assert name in await run_all(cluster, 300, 24, 5), "and it is back"
        await cluster.until_idle()

"""A node's loop that plans a step while one runs: when it does, what a failed step costs, and that it times each step
once."""

from __future__ import annotations

import asyncio
import random

import pytest
from local_cluster import LocalCluster
from oracle import VOCAB, reference

from pdcluster.core.errors import ConfigError
from pdcluster.node.native.engine_side import MAX_FAILURES
from pdcluster.node.native.process import check
from pdcluster.settings.config import NodeConfig, SchedulerConfig


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(VOCAB) for _ in range(length)]


def test_ranks_cannot_look_ahead_and_say_so() -> None:
    ahead = SchedulerConfig(look_ahead=True)
    with pytest.raises(ConfigError, match="only rank 0 knows what it draws"):
        check(NodeConfig(scheduler=ahead, role="mixed", tp=2))
    check(NodeConfig(scheduler=ahead, role="mixed"))
    check(NodeConfig(role="mixed", tp=2))


async def test_a_step_behind_one_that_failed_does_not_count_as_another_failure() -> None:
    """Each of the failures takes the step behind it along; were those counted, too, the node would give itself up."""
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        nodes = list(cluster.nodes.values())
        for node in nodes:
            node.engine.hold = True
        tasks = [asyncio.create_task(cluster.run(prompt_of(4, seed), 12)) for seed in range(4)]
        for node in nodes:
            await cluster.until(lambda node=node: node.parts.decode.num_legs > 0)
            node.engine.hold = False
            node.engine.finish()
            await cluster.until(lambda node=node: node.engine.num_ahead > 0)
            node.engine.fail_steps = MAX_FAILURES - 1
        assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == [
            reference(prompt_of(4, seed), 12) for seed in range(4)
        ]
        assert all(not node.task.done() for node in nodes)
        await cluster.until_idle()


async def test_steps_in_a_row_are_timed_one_by_one() -> None:
    async with LocalCluster({"m0": "mixed"}) as cluster:
        await cluster.run(prompt_of(4), 40)
        node = cluster.nodes["m0"]
        report = node.parts.stopwatch.report()
        assert node.engine.num_ahead > 20
        assert report is not None and report.decode_samples + report.prefill_samples == node.side._steps
        await cluster.until_idle()


async def test_rows_that_come_and_go_all_get_their_own_tokens() -> None:
    async with LocalCluster({"m0": "mixed"}, num_pages=96) as cluster:
        gate = asyncio.Semaphore(6)

        async def one(index: int) -> None:
            async with gate:
                tokens, _ = await cluster.run(prompt_of(1 + index % 9, index), 1 + index * 5 % 30)
            assert tokens == reference(prompt_of(1 + index % 9, index), 1 + index * 5 % 30)

        await asyncio.gather(*(one(index) for index in range(40)))
        assert cluster.nodes["m0"].engine.num_ahead > 50
        await cluster.until_idle()

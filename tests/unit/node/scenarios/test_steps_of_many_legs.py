"""What a step costs the prefill side follows its rows, not how many requests wait or are parked beside them."""

from __future__ import annotations

import asyncio

from oracle import reference
from simulated_cluster import SimulatedCluster
from virtual_time import VirtualLoop, run_virtually

from pdcluster.core.step import StepPlan


def test_a_step_looks_at_the_legs_of_its_rows_only() -> None:
    async def play(loop: VirtualLoop) -> None:
        cluster = SimulatedCluster(loop, {"p0": "prefill", "d0": "decode"}, num_pages=256)
        cluster.force = "remote"
        async with cluster:
            side = cluster.nodes["p0"].parts.prefill
            looked, rows = 0, 0
            advance, on_step = side._advance, side.on_step

            def counted_advance(leg: object) -> None:
                nonlocal looked
                looked += 1
                advance(leg)  # type: ignore[arg-type]

            def counted_step(plan: StepPlan) -> None:
                nonlocal rows
                rows += len(plan.rows)
                on_step(plan)

            side._advance, side.on_step = counted_advance, counted_step  # type: ignore[method-assign]
            prompts = [[number, *range(40)] for number in range(12)]
            results = await asyncio.gather(*(cluster.run(prompt, 3) for prompt in prompts))
            assert [tokens for tokens, _ in results] == [reference(prompt, 3) for prompt in prompts]
            # beside each row of a step: a leg is looked at when it is scheduled, gets its ticket, and has its token
            assert looked <= rows + 3 * len(prompts)
            await cluster.until_idle()

    run_virtually(play)

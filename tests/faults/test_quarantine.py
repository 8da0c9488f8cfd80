"""Memory that no proof has freed: seen by routers and metrics, missing from what can be reserved, and given back by
proof alone."""

from __future__ import annotations

import asyncio

import pytest
from fake_backend import Fault
from oracle import reference
from simulated_cluster import SimulatedCluster
from virtual_time import VirtualLoop, run_virtually

from pdcluster.core.errors import PdclusterError
from pdcluster.core.messages import Load
from pdcluster_router.cluster.metrics import NodeCollector

NUM_PAGES, PAGE_TOKENS = 40, 4
PROMPT = list(range(80))
# Nobody knows what became of the write, and it may land for ever.
NEVER = Fault(delay_s=1e7, unknown_s=0.01)


def test_quarantined_memory_shrinks_capacity_visibly_and_is_reclaimed_by_proof_only() -> None:
    async def play(loop: VirtualLoop) -> None:
        cluster = SimulatedCluster(loop, {"p0": "prefill", "d0": "decode"}, num_pages=NUM_PAGES, checks_permits=False)
        cluster.force = "remote"
        async with cluster:
            cluster.network.plan_write = lambda *_: NEVER
            with pytest.raises(PdclusterError):
                await cluster.run(PROMPT, 4, deadline_s=5.0)
            pages = cluster.nodes["d0"].parts.pages
            await cluster.until(lambda: not pages.num_used)
            await asyncio.sleep(1.0)  # a writer that can prove something does so at once
            held = pages.num_quarantined
            assert held >= len(PROMPT) // PAGE_TOKENS

            await asyncio.sleep(600)
            assert pages.num_quarantined == held, "no timer frees them"
            load = load_of(cluster, "d0")
            assert load.pages_quarantined == held
            assert load.pages_free + load.pages_cached == NUM_PAGES - held
            assert metric(cluster, "d0", "quarantined") == held and metric(cluster, "d0", "used") == 0
            with pytest.raises(PdclusterError):
                await cluster.run([7] * (NUM_PAGES - held + 1) * PAGE_TOKENS, 2, deadline_s=3.0)

            cluster.network.plan_write = lambda *_: Fault()
            await cluster.crash("p0", restart_s=0.3)
            await cluster.until(lambda: not pages.num_quarantined, timeout_s=30)
            await cluster.until(lambda: metric(cluster, "d0", "quarantined") == 0, timeout_s=30)
            await cluster.until(lambda: len(cluster.router.view().nodes) == 2, timeout_s=30)
            tokens, _ = await cluster.run(PROMPT, 4)
            assert tokens == reference(PROMPT, 4)
            await cluster.until_idle()

    run_virtually(play)


def load_of(cluster: SimulatedCluster, node: str) -> Load:
    (load,) = [each.load for each in cluster.router.view().nodes if each.name == node]
    assert load is not None
    return load


def metric(cluster: SimulatedCluster, node: str, state: str) -> float:
    """As /metrics shows it."""
    samples = (sample for family in NodeCollector(cluster.router).collect() for sample in family.samples)
    (value,) = [
        each.value
        for each in samples
        if each.name == "pdcluster_node_kv_pages" and each.labels["node"] == node and each.labels["state"] == state
    ]
    return value

"""The cluster key changes under load, by three rolling restarts: add, swap, remove."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from tests.chaos.__main__ import judged, roll
from tests.chaos.cluster import ChaosCluster, ClusterShape
from tests.chaos.edges import GuardedEdges
from tests.chaos.load import ChaosLoad, requests_of

SEED, REQUESTS, CLIENTS = 45, 20, 4


@pytest.mark.timeout(900)
async def test_a_key_changes_without_a_failed_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(what: str) -> None:
        with capsys.disabled():
            print(what)

    async with ChaosCluster(ClusterShape(transfer="tcp", is_guarded=True), tmp_path) as cluster:
        assert isinstance(cluster.edges, GuardedEdges)
        key_file = cluster.edges.key_file
        old, new = key_file.read_text().strip(), secrets.token_hex(32)
        load = ChaosLoad(cluster, requests_of(SEED, REQUESTS), SEED)
        await load.learn()
        clients = asyncio.create_task(load.run(CLIENTS))
        for keys in ((old, new), (new, old), (new,)):
            key_file.write_text("\n".join(keys) + "\n")
            await roll(cluster, tell)
        load.end()
        await clients
        left = await cluster.until_idle()
        await load.close()
        assert load.report.num_right > REQUESTS and judged(load.report, left, tell, SEED)

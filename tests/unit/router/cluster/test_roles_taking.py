"""Which roles nodes take work in, by what they serve: what the choice of weights is made from."""

from __future__ import annotations

import asyncio

from local_cluster import LocalCluster


async def test_roles_follow_the_nodes_that_take_work_and_each_change_is_counted() -> None:
    async with LocalCluster({"p0": "prefill", "d0": "decode"}) as cluster:
        table, prefill, decode = cluster.router, cluster.nodes["p0"], cluster.nodes["d0"]
        (digest,) = prefill.card().model_digests

        async def becomes(*roles: str) -> None:
            seen = table.roles_version
            await cluster.until(lambda: table.roles_taking().get(digest, set()) == set(roles))
            assert table.roles_version >= seen

        await becomes("prefill", "decode")
        before = table.roles_version
        await table.manage(prefill.me.incarnation, cordoned=True, timeout_s=5.0)
        await becomes("decode")
        assert table.roles_version > before
        await table.manage(prefill.me.incarnation, cordoned=False, role="mixed", timeout_s=5.0)
        await becomes("mixed", "decode")
        calm = table.roles_version
        await asyncio.sleep(0.1)
        assert table.roles_version == calm, "reports of load change nothing"
        await decode.kill()
        await becomes("mixed")
        assert table.roles_version > calm

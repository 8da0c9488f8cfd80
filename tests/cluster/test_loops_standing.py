"""Roles and cordons changed while requests run: nothing that runs is lost, new work goes where it may."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from local_cluster import LocalCluster
from oracle import VOCAB, reference

from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import Load
from pdcluster_router.admin.service import Admin
from pdcluster_router.cluster.node_table import NodeState


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(VOCAB) for _ in range(length)]


async def incarnation_of(cluster: LocalCluster, name: str) -> str:
    return next(node.endpoint.incarnation for node in cluster.router.view().nodes if node.name == name)


async def test_roles_flip_under_load_and_every_request_keeps_its_tokens() -> None:
    async with LocalCluster({"a": "prefill", "b": "decode"}, num_pages=128, force="remote") as cluster:

        async def one(index: int) -> str:
            prompt = prompt_of(5 + index * 11 % 70)
            tokens, done = await cluster.run(prompt, 6)
            assert tokens == reference(prompt, 6), f"request {index}"
            return str(done.route.decode)

        async def flip() -> None:
            for role_a, role_b in (
                ("decode", "prefill"),
                ("prefill", "decode"),
                ("mixed", "mixed"),
                ("decode", "prefill"),
            ):
                await cluster.router.manage(await incarnation_of(cluster, "a"), role=role_a, timeout_s=5.0)
                await cluster.router.manage(await incarnation_of(cluster, "b"), role=role_b, timeout_s=5.0)

        first, _ = await asyncio.gather(asyncio.gather(*(one(index) for index in range(30))), flip())
        assert {node.name: node.role for node in cluster.router.view().nodes} == {"a": "decode", "b": "prefill"}
        assert first and {await one(index) for index in range(30, 34)} == {"a"}
        await cluster.until_idle()


async def test_a_cordoned_node_finishes_what_runs_and_gets_nothing_new() -> None:
    async with LocalCluster({"d0": "mixed", "d1": "mixed"}, num_pages=128) as cluster:
        running = [asyncio.create_task(cluster.run(prompt_of(30 + index), 40)) for index in range(4)]
        await cluster.until(lambda: sum(node.num_requests for node in cluster.router.view().nodes) >= 4)
        answer = await cluster.router.manage(await incarnation_of(cluster, "d0"), cordoned=True, timeout_s=5.0)
        assert answer.cordoned
        assert [node.name for node in cluster.router.view().nodes if node.accepts_work] == [
            "d1"
        ]  # before its next report
        for index in range(3):
            tokens, done = await cluster.run(prompt_of(60 + index), 4)
            assert done.route.decode == "d1" and tokens == reference(prompt_of(60 + index), 4)
        for index, (tokens, _) in enumerate(await asyncio.gather(*running)):
            assert tokens == reference(prompt_of(30 + index), 40)
        await cluster.router.manage(await incarnation_of(cluster, "d0"), cordoned=False, timeout_s=5.0)
        await cluster.until(lambda: all(node.accepts_work for node in cluster.router.view().nodes))
        await cluster.until_idle()


async def test_a_cordon_and_a_role_hold_as_soon_as_the_node_said_so_before_it_reports_anything() -> None:
    async with LocalCluster({"d0": "mixed", "d1": "mixed"}) as cluster:
        router = cluster.router
        hear_report = router._handlers.pop(Load)
        await router.manage(await incarnation_of(cluster, "d0"), cordoned=True, timeout_s=5.0)
        await router.manage(await incarnation_of(cluster, "d1"), role="decode", timeout_s=5.0)
        assert [(node.name, node.role) for node in router.view().nodes if node.accepts_work] == [("d1", "decode")]
        await router.manage(await incarnation_of(cluster, "d0"), cordoned=False, timeout_s=5.0)
        assert all(node.accepts_work for node in router.view().nodes), (
            "it never reported the cordon, so it may have no report to make of its end"
        )
        router._handlers[Load] = hear_report


async def test_a_node_on_its_way_out_gets_no_work_whatever_it_is_told_meanwhile() -> None:
    async with LocalCluster({"d0": "mixed", "d1": "mixed"}) as cluster:
        router = cluster.router
        cluster.nodes["d0"].parts.links.standing.drain()
        await cluster.until(lambda: [node.name for node in router.view().nodes if node.accepts_work] == ["d1"])
        router._handlers.pop(Load)
        await router.manage(await incarnation_of(cluster, "d0"), cordoned=False, timeout_s=5.0)
        await router.manage(await incarnation_of(cluster, "d0"), role="decode", timeout_s=5.0)
        assert [node.name for node in router.view().nodes if node.accepts_work] == ["d1"]


async def test_what_a_node_reported_before_its_cordon_does_not_say_that_it_is_empty() -> None:
    """Another router may have sent it work since."""
    async with LocalCluster({"m0": "mixed"}) as cluster:
        router = cluster.router
        hear_report, reports = router._handlers[Load], list[tuple[NodeState, Load]]()
        router._handlers[Load] = lambda *report: reports.append(report)
        admin = Admin(
            router,
            cluster.dispatch,
            cluster.selector.holder,
            router.events,
            cluster.dispatch.explainer,
            time.monotonic,
        )
        drain = admin.drain("m0", 20.0)
        told = asyncio.ensure_future(anext(drain))
        await cluster.until(lambda: not any(node.accepts_work for node in router.view().nodes))
        await asyncio.sleep(0.1)
        assert reports and not told.done()
        for report in reports:
            hear_report(*report)
        assert (await told).is_done
        await drain.aclose()


async def test_a_node_that_is_not_there_is_named_as_such() -> None:
    async with LocalCluster({"m0": "mixed"}) as cluster:
        with pytest.raises(NodeLost, match="left the cluster"):
            await cluster.router.manage("nobody", role="decode", timeout_s=1.0)

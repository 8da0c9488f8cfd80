"""The Admin service over a real socket, on real node loops: what operators see, what they change, and who may."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from local_cluster import LocalCluster
from oracle import VOCAB, reference

from pdcluster.core.errors import Cancelled, ConfigError
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.rpc import bootstrap_pb2
from pdcluster.settings.config import RouterConfig
from pdcluster_router.admin.grpc import SERVICE, listening
from pdcluster_router.admin.roles import RoleController, RoleSettings
from pdcluster_router.admin.service import Admin
from pdcluster_router.core.generation import ANYBODY
from pdcluster_router.core.ids import own_id
from pdcluster_router.explain.recorder import MAX_ALIKE
from pdcluster_router.process import keep_roles

TOKEN = "0123456789abcdef0123"
PAIR = {"p0": "prefill", "d0": "decode"}


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(VOCAB) for _ in range(length)]


def admin_of(cluster: LocalCluster) -> Admin:
    dispatch = cluster.dispatch
    return Admin(
        cluster.router,
        dispatch,
        cluster.selector.holder,
        cluster.router.events,
        dispatch.explainer,
        time.monotonic,
    )


@asynccontextmanager
async def administered(cluster: LocalCluster, token: str | None = None) -> AsyncIterator[tuple[Any, str]]:
    async with (
        listening(admin_of(cluster), "127.0.0.1:0", token) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield stubs.AdminStub(channel), address


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value.code(), caught.value.details() or ""


async def until(condition: Callable[[], Any]) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


async def test_nodes_are_listed_with_what_they_reported() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        await cluster.run(prompt_of(40), 3)
        await cluster.until_idle()
        await cluster.until(
            lambda: all(node.load is not None and node.load.pages_cached > 0 for node in cluster.router.view().nodes)
        )
        nodes = {node.name: node for node in (await stub.ListNodes(pb.ListNodesRequest())).nodes}
        assert set(nodes) == {"p0", "d0"} and {node.state for node in nodes.values()} == {"ready"}
        assert nodes["p0"].role == bootstrap_pb2.ROLE_PREFILL and nodes["d0"].load.pages_cached > 0
        described = await stub.DescribeNode(pb.DescribeNodeRequest(node="d0"))
        assert (
            described.cost.decode_samples > 0
            and len(described.cost.decode_root) == 6
            and described.cost.prefill_doubt > 0
        )
        events = described.events
        assert [event.kind for event in events] == ["node-up"]


async def test_a_decode_node_is_described_by_what_others_write_to_it() -> None:
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    async with LocalCluster(roles) as cluster, administered(cluster) as (stub, _):
        await cluster.run(prompt_of(40), 3)
        await cluster.until_idle()
        await cluster.until(lambda: any(node.load and node.load.paths for node in cluster.router.view().nodes))
        written = {name: (await stub.DescribeNode(pb.DescribeNodeRequest(node=name))) for name in roles}
        (writer,) = [name for name, told in written.items() if told.paths]
        assert not written["d0"].paths and [path.peer for path in written["d0"].received] == [writer]
        (sent,), (received,) = written[writer].paths, written["d0"].received
        assert (received.backend, received.breaker, received.is_chosen) == (sent.backend, "closed", True)
        assert not written[writer].received


async def test_native_nodes_refuse_adapters_by_name_and_the_router_asks_nobody_else() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        told = await stub.LoadAdapter(pb.LoadAdapterRequest(name="sql", path="/adapters/sql"))
        assert {each.node for each in told.nodes} == set(PAIR)
        assert all("engine is native" in each.error and not each.digest for each in told.nodes)
        code, details = await code_of(stub.UnloadAdapter(pb.UnloadAdapterRequest(name="sql")))
        assert code is grpc.StatusCode.NOT_FOUND and "adapter sql" in details
        for bad in ({"name": ""}, {"name": "n" * 129}, {"name": "a\n"}, {"name": "a", "path": "x" * 2000}):
            code, _details = await code_of(stub.LoadAdapter(pb.LoadAdapterRequest(**{"path": "/a", **bad})))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, _details = await code_of(stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path="/a", nodes=["nobody"])))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_a_role_and_a_cordon_reach_the_node_and_are_told_as_events() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        assert (
            await stub.SetRole(pb.SetRoleRequest(node="p0", role=bootstrap_pb2.ROLE_MIXED))
        ).role == bootstrap_pb2.ROLE_MIXED
        assert (await stub.Cordon(pb.CordonRequest(node="d0", cordoned=True))).state == "cordoned"
        await cluster.until(
            lambda: (
                {node.name: (node.role, node.accepts_work) for node in cluster.router.view().nodes}["d0"]
                == ("decode", False)
            )
        )
        tokens, done = await cluster.run(prompt_of(20), 4)
        assert tokens == reference(prompt_of(20), 4) and done.route.decode == "p0"
        assert (await stub.Cordon(pb.CordonRequest(node="d0", cordoned=False))).state == "ready"
        kinds = [event.kind async for event in stub.Events(pb.EventsRequest())]
        assert kinds[-3:] == ["role", "cordon", "uncordon"]


async def test_a_drain_tells_how_much_is_left_and_when_the_node_may_stop() -> None:
    async with (
        LocalCluster({"m0": "mixed", "m1": "mixed"}, num_pages=128) as cluster,
        administered(cluster) as (stub, _),
    ):
        running = [asyncio.create_task(cluster.run(prompt_of(30 + index), 60)) for index in range(4)]
        await cluster.until(lambda: sum(node.num_requests for node in cluster.router.view().nodes) >= 4)
        told = [progress async for progress in stub.Drain(pb.DrainRequest(node="m0", deadline_s=30.0))]
        assert (
            told[-1].safe_to_stop and not told[-1].running and not any(progress.safe_to_stop for progress in told[:-1])
        )
        for index, (tokens, _) in enumerate(await asyncio.gather(*running)):
            assert tokens == reference(prompt_of(30 + index), 60)
        assert (await stub.DescribeNode(pb.DescribeNodeRequest(node="m0"))).node.state == "cordoned"


async def test_what_runs_at_the_deadline_of_a_drain_moves_to_another_node() -> None:
    async with (
        LocalCluster({"m0": "mixed", "m1": "mixed"}, num_pages=128) as cluster,
        administered(cluster) as (stub, _),
    ):
        await stub.Cordon(pb.CordonRequest(node="m1", cordoned=True))
        running = [asyncio.create_task(cluster.run(prompt_of(30 + index), 300)) for index in range(3)]
        await cluster.until(lambda: sum(node.num_requests for node in cluster.router.view().nodes) >= 3)
        await stub.Cordon(pb.CordonRequest(node="m1", cordoned=False))
        told = [progress async for progress in stub.Drain(pb.DrainRequest(node="m0", deadline_s=0.05))]
        assert told[-1].safe_to_stop and told[-1].moved == 3 and not told[0].moved
        for index, (tokens, done) in enumerate(await asyncio.gather(*running)):
            assert tokens == reference(prompt_of(30 + index), 300) and done.route.decode == "m1"
        kinds = [event.kind async for event in stub.Events(pb.EventsRequest())]
        assert kinds[-3:] == ["drain", "moved", "drained"]


async def test_an_uncordon_ends_a_drain_and_moves_nothing() -> None:
    async with (
        LocalCluster({"m0": "mixed", "m1": "mixed"}, num_pages=128) as cluster,
        administered(cluster) as (stub, _),
        administered(cluster) as (another_router, _),
    ):
        for taken_back_by in (stub, another_router):
            await stub.Cordon(pb.CordonRequest(node="m1", cordoned=True))
            running = asyncio.create_task(cluster.run(prompt_of(30), 300))
            await cluster.until(lambda: any(node.num_requests for node in cluster.router.view().nodes))
            await stub.Cordon(pb.CordonRequest(node="m1", cordoned=False))
            drained = stub.Drain(pb.DrainRequest(node="m0", deadline_s=30.0))
            await anext(aiter(drained))
            await taken_back_by.Cordon(pb.CordonRequest(node="m0", cordoned=False))
            code, details = await code_of(drained)
            assert code is grpc.StatusCode.CANCELLED and "m0 takes work again" in details
            assert (await running)[1].route.decode == "m0"
            assert (await stub.DescribeNode(pb.DescribeNodeRequest(node="m0"))).node.state == "ready"
            assert "moved" not in [event.kind async for event in stub.Events(pb.EventsRequest())]


async def test_two_drains_of_a_node_are_one_and_the_earlier_deadline_counts() -> None:
    async with (
        LocalCluster({"m0": "mixed", "m1": "mixed"}, num_pages=128) as cluster,
        administered(cluster) as (stub, _),
    ):
        await stub.Cordon(pb.CordonRequest(node="m1", cordoned=True))
        running = [asyncio.create_task(cluster.run(prompt_of(30 + index), 300)) for index in range(3)]
        await cluster.until(lambda: sum(node.num_requests for node in cluster.router.view().nodes) >= 3)
        await stub.Cordon(pb.CordonRequest(node="m1", cordoned=False))

        async def drained(deadline_s: float) -> tuple[bool, int]:
            told = [progress async for progress in stub.Drain(pb.DrainRequest(node="m0", deadline_s=deadline_s))]
            return told[-1].safe_to_stop, told[-1].moved

        assert await asyncio.gather(drained(600.0), drained(0.05)) == [(True, 3)] * 2
        await asyncio.gather(*running)
        kinds = [event.kind async for event in stub.Events(pb.EventsRequest())]
        assert kinds.count("moved") == 1


@pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -1.0])
async def test_a_drain_until_no_moment_at_all_is_refused_and_changes_nothing(deadline_s: float) -> None:
    async with LocalCluster({"m0": "mixed"}) as cluster, administered(cluster) as (stub, _):
        code, details = await code_of(stub.Drain(pb.DrainRequest(node="m0", deadline_s=deadline_s)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "deadline_s" in details
        assert (await stub.DescribeNode(pb.DescribeNodeRequest(node="m0"))).node.state == "ready"


async def test_requests_are_listed_where_they_run_and_a_cancelled_one_frees_everything() -> None:
    async with LocalCluster(PAIR, num_pages=128) as cluster, administered(cluster) as (stub, _):
        running = asyncio.create_task(cluster.run(prompt_of(30), 300))

        async def is_decoding() -> bool:
            found = (await stub.ListRequests(pb.ListRequestsRequest())).requests
            return bool(found) and found[0].state == "decode"

        await until(is_decoding)
        (request,) = (await stub.ListRequests(pb.ListRequestsRequest(node="d0"))).requests
        assert (request.mode, request.prefill, request.decode, request.prompt_tokens) == ("remote", "p0", "d0", 30)
        assert request.output_tokens >= 1 and request.attempts == 1 and request.age_s > 0
        assert (await stub.CancelRequest(pb.CancelRequestRequest(id=request.id, reason="a runaway"))).cancelled == 1
        with pytest.raises(Cancelled, match="a runaway"):
            await running
        await cluster.until_idle()
        assert (await code_of(stub.CancelRequest(pb.CancelRequestRequest(id=request.id))))[
            0
        ] is grpc.StatusCode.NOT_FOUND


async def test_a_request_is_cancelled_by_what_its_client_calls_it() -> None:
    async with LocalCluster(PAIR, num_pages=128) as cluster, administered(cluster) as (stub, _):
        running = [
            asyncio.create_task(cluster.run(prompt_of(30 + index), 300, client_id=name))
            for index, name in enumerate(("a", "b", "a"))
        ]
        await cluster.until(lambda: len(cluster.dispatch.open) == 3)
        assert (await stub.CancelRequest(pb.CancelRequestRequest(id="a", reason="a runaway"))).cancelled == 2
        for request in (running[0], running[2]):
            with pytest.raises(Cancelled, match="a runaway"):
                await request
        assert len(cluster.dispatch.open) == 1 and not running[1].done()
        assert (await code_of(stub.CancelRequest(pb.CancelRequestRequest(id="a"))))[0] is grpc.StatusCode.NOT_FOUND
        (other,) = (await stub.ListRequests(pb.ListRequestsRequest())).requests
        alike = asyncio.create_task(cluster.run(prompt_of(33), 300, client_id=other.id))
        await cluster.until(lambda: len(cluster.dispatch.open) == 2)
        assert (await stub.CancelRequest(pb.CancelRequestRequest(id=other.id))).cancelled == 1, (
            "a request's own id goes first"
        )
        assert not alike.done() and (await stub.CancelRequest(pb.CancelRequestRequest(id=other.id))).cancelled == 1
        running.append(alike)
        await asyncio.gather(*running, return_exceptions=True)
        await cluster.until_idle()


async def test_a_runaway_is_cancelled_by_its_clients_name_whatever_was_called_so_since() -> None:
    async with LocalCluster(PAIR, num_pages=128) as cluster, administered(cluster) as (stub, _):
        runaway = asyncio.create_task(cluster.run(prompt_of(30), 300, client_id="job"))
        await cluster.until(lambda: len(cluster.dispatch.open) == 1)
        explainer = cluster.dispatch.explainer
        for number in range(MAX_ALIKE + 1):
            explainer.close(explainer.open(f"r{number}-0", ANYBODY, 0.0, "job"), None)
        assert (await stub.CancelRequest(pb.CancelRequestRequest(id="job"))).cancelled == 1
        with pytest.raises(Cancelled):
            await runaway


async def test_the_id_of_an_answer_explains_that_request_and_not_one_whose_client_calls_it_so() -> None:
    async with LocalCluster(PAIR, num_pages=128) as cluster, administered(cluster) as (stub, _):
        explainer, own = cluster.dispatch.explainer, "42474cff8be94e1d52277be5"
        explainer.close(explainer.open(f"{own}-0", ANYBODY, 0.0), None)
        explainer.close(explainer.open("other-0", ANYBODY, 0.0, f"cmpl-{own}"), None)
        told = await stub.Explain(pb.ExplainRequest(id=f"cmpl-{own}"))
        assert [json.loads(choice)["request"] for choice in told.json] == [f"{own}-0"]


async def test_requests_on_a_node_that_nobody_knows_are_no_empty_list() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        code, details = await code_of(stub.ListRequests(pb.ListRequestsRequest(node="zz")))
        assert code is grpc.StatusCode.NOT_FOUND and "d0, p0" in details


@pytest.mark.parametrize(
    ("called", "own"),
    [
        ("cmpl-42474cff8be94e1d52277be5", "42474cff8be94e1d52277be5"),
        ("chatcmpl-w3-42474cff8be94e1d52277be5-1", "w3-42474cff8be94e1d52277be5-1"),
        ("42474cff8be94e1d52277be5-0", "42474cff8be94e1d52277be5-0"),
        ("cmpl-of-a-client", "cmpl-of-a-client"),
    ],
)
def test_a_request_may_be_called_as_in_the_body_of_its_answer(called: str, own: str) -> None:
    assert own_id(called) == own


async def test_a_request_is_explained_in_json_and_for_people() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        await cluster.run(prompt_of(30), 3)
        (open_or_done,) = cluster.dispatch.explainer.recent(1)
        reply = await stub.Explain(pb.ExplainRequest(id=open_or_done.request))
        told = json.loads(reply.json[0])
        assert told["request"] == open_or_done.request and told["decisions"][0]["candidates"]
        assert "p0" in reply.text and "d0" in reply.text
        code, details = await code_of(stub.Explain(pb.ExplainRequest(id="nobody")))
        assert code is grpc.StatusCode.NOT_FOUND and "nobody" in details


async def test_the_policy_is_shown_checked_and_replaced() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        before = await stub.GetPolicy(pb.GetPolicyRequest())
        assert before.live in before.known and before.shadow == ""
        other = next(name for name in before.known)
        checked = await stub.SetPolicy(pb.SetPolicyRequest(live=other, shadow=other, dry_run=True))
        assert (checked.live, checked.shadow) == (before.live, "")
        assert (await stub.SetPolicy(pb.SetPolicyRequest(shadow=other))).shadow == other
        tokens, _ = await cluster.run(prompt_of(20), 4)
        assert tokens == reference(prompt_of(20), 4)
        assert (await stub.SetPolicy(pb.SetPolicyRequest(shadow=""))).shadow == ""
        code, details = await code_of(stub.SetPolicy(pb.SetPolicyRequest(live="fortune")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "fortune" in details


async def test_the_cache_is_counted_by_node() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        await cluster.run(prompt_of(40), 3)
        await cluster.until_idle()
        await cluster.until(lambda: cluster.router.caches.index.num_entries >= 20)
        cache = await stub.GetCache(pb.GetCacheRequest())
        blocks = {node.node: node.blocks for node in cache.nodes}
        assert blocks["p0"] >= 10 and blocks["d0"] >= 10 and cache.entries == sum(blocks.values()) and cache.bytes > 0


async def test_the_controller_of_roles_is_obeyed_and_its_reason_told() -> None:
    async with LocalCluster({"p0": "prefill", "d0": "decode", "d1": "decode"}) as cluster:
        admin = admin_of(cluster)
        eager = RoleSettings(backlog_high_s=-1.0, use_low=2.0, sustain_s=0.0)
        keeping = asyncio.create_task(keep_roles(admin, RoleController(eager)))
        await cluster.until(
            lambda: sorted(node.role for node in cluster.router.view().nodes) == ["decode", "prefill", "prefill"]
        )
        await cluster.until(lambda: {"auto-role", "role"} <= {event.kind for event in cluster.router.events.since(0)})
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        kinds = {event.kind: event.message for event in cluster.router.events.since(0)}
        assert "prompts wait per prefill node" in kinds["auto-role"] and "decode becomes prefill" in kinds["role"]
        tokens, _ = await cluster.run(prompt_of(30), 5)
        assert tokens == reference(prompt_of(30), 5)


async def test_events_can_be_followed() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        call = stub.Events(pb.EventsRequest(since=2, follow=True))
        waiting = asyncio.ensure_future(anext(aiter(call)))
        await stub.Cordon(pb.CordonRequest(node="p0", cordoned=True))
        assert (await waiting).kind == "cordon"
        call.cancel()


async def test_names_that_are_not_there_are_answered_with_those_that_are() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (stub, _):
        for call in (
            stub.DescribeNode(pb.DescribeNodeRequest(node="p9")),
            stub.Cordon(pb.CordonRequest(node="p9", cordoned=True)),
            stub.Drain(pb.DrainRequest(node="p9")),
        ):
            code, details = await code_of(call)
            assert code is grpc.StatusCode.NOT_FOUND and "d0, p0" in details
        code, details = await code_of(stub.SetRole(pb.SetRoleRequest(node="p0")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "role" in details


async def test_without_the_token_nothing_is_told_and_nothing_changes() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster, TOKEN) as (stub, address):
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),)):
            for call in (
                stub.ListNodes(pb.ListNodesRequest(), metadata=metadata),
                stub.Cordon(pb.CordonRequest(node="p0", cordoned=True), metadata=metadata),
                stub.Drain(pb.DrainRequest(node="p0"), metadata=metadata),
                stub.Events(pb.EventsRequest(), metadata=metadata),
            ):
                assert (await code_of(call))[0] is grpc.StatusCode.UNAUTHENTICATED
        async with grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await code_of(check))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert all(node.accepts_work for node in cluster.router.view().nodes)
        allowed = (("authorization", f"Bearer {TOKEN}"),)
        assert len((await stub.ListNodes(pb.ListNodesRequest(), metadata=allowed)).nodes) == 2


async def test_the_service_can_be_found_by_reflection() -> None:
    async with LocalCluster(PAIR) as cluster, administered(cluster) as (_, address):

        def services() -> set[str]:
            with grpc.insecure_channel(address) as channel:
                return set(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert SERVICE in await asyncio.to_thread(services)


def test_an_admin_port_for_everybody_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--admin-token-file FILE"):
        RouterConfig(admin="0.0.0.0:50052")
    assert RouterConfig(admin="[::1]:50052").admin_token() is None
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert RouterConfig(admin="0.0.0.0:50052", admin_token_file=file).admin_token() == TOKEN
    file.write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        RouterConfig(admin_token_file=file).admin_token()
    with pytest.raises(ConfigError, match="cannot be read"):
        RouterConfig(admin_token_file=tmp_path / "none").admin_token()

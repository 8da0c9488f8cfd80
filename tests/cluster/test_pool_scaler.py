"""KEDA's external scaler on two real routers, asked by a real gRPC client while nodes come and load changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from child_cluster import Processes

from pdcluster.rpc import externalscaler_pb2 as pb
from pdcluster.rpc import externalscaler_pb2_grpc as stubs
from tests.chaos.cluster import ChildProcess

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 60.0
FROM_ZERO = (
    "--set=router.scaler=127.0.0.1:0", "--set=router.from_zero=true", "--set=router.console=none",
    "--set=router.itl_s=0.012", "--set=router.slo.ttft_s=60",
)  # fmt: skip


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.kill()


class Keda:
    """What KEDA does with one router."""

    def __init__(self, router: ChildProcess, role: str) -> None:
        self.channel = grpc.aio.insecure_channel(str(router.facts["scaler"]))
        self.stub = stubs.ExternalScalerStub(self.channel)
        self.pool = pb.ScaledObjectRef(name="pool", namespace="default", scalerMetadata={"role": role})

    async def wanted(self) -> float:
        spec = (await self.stub.GetMetricSpec(self.pool)).metricSpecs[0]
        request = pb.GetMetricsRequest(scaledObjectRef=self.pool, metricName=f"s0-{spec.metricName}")
        value = (await self.stub.GetMetrics(request)).metricValues[0].metricValueFloat
        assert spec.targetSizeFloat == spec.targetSize == 1
        assert (await self.stub.IsActive(self.pool)).result == (value > 0)
        return value


async def complete(client: httpx.AsyncClient, seed: int) -> None:
    body = {"model": "pystdlib-3m", "prompt": f"def f{seed}(" + "x, " * 300, "max_tokens": 40, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


async def wait_for(keda: list[Keda], wanted: float) -> None:
    """Until both routers want at least so many nodes."""
    async with asyncio.timeout(LIMIT_S):
        while min([await each.wanted() for each in keda]) < wanted:
            await asyncio.sleep(0.1)


@pytest.mark.full
async def test_pools_grow_from_nothing_as_both_routers_say(processes: Processes) -> None:
    bootstrap = await processes.bootstrap("registry")
    routers = [await processes.router(f"router-{i}", bootstrap, more=FROM_ZERO) for i in range(2)]
    pools = {role: [Keda(router, role) for router in routers] for role in ("prefill", "decode")}
    told = pools["decode"][1].stub.StreamIsActive(pools["decode"][1].pool)
    assert not (await told.read()).result
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S, base_url=f"http://{routers[0].address}") as client:
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded"), ready.text
        first = asyncio.create_task(complete(client, 0))
        await wait_for(pools["prefill"], 1)
        async with asyncio.timeout(LIMIT_S):
            assert (await told.read()).result, "the other router says that a request waits"
        for role in ("prefill", "decode"):
            await processes.node(f"{role}-0", bootstrap, role=role).start()
        await first
        load = [asyncio.create_task(crowd(client, seed)) for seed in range(12)]
        await wait_for(pools["decode"], 2)
        one, other = [await each.wanted() for each in pools["decode"]]
        assert abs(one - other) <= 1, "both routers find nearly the same"
        metrics = (await client.get("/metrics")).text
        assert 'pdcluster_pool_wanted_nodes{role="decode"}' in metrics
        assert 'pdcluster_pool_saturation{role="prefill"}' in metrics
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        async with asyncio.timeout(LIMIT_S):
            while max([await each.wanted() for each in pools["decode"]]) > 1:
                await asyncio.sleep(0.2)
    told.cancel()


async def crowd(client: httpx.AsyncClient, seed: int) -> None:
    while True:
        await complete(client, seed)


async def test_a_trigger_that_names_no_role_is_refused_with_the_way_out(processes: Processes) -> None:
    bootstrap = await processes.bootstrap("registry")
    router = await processes.router("router-0", bootstrap, more=FROM_ZERO)
    for role, told in (("", "the trigger names no role"), ("prefil", "did you mean prefill")):
        keda = Keda(router, role)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await keda.stub.IsActive(keda.pool)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in str(refused.value.details()) and "prefill, decode or mixed" in str(refused.value.details())
    keda = Keda(router, "prefill")
    with pytest.raises(grpc.aio.AioRpcError, match="ask for wanted_nodes"):
        await keda.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=keda.pool, metricName="queue"))

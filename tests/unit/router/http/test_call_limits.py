"""Limits of gRPC calls before a message is read, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_dispatcher import ScriptedDispatcher, until
from scripted_grpc import served_grpc

from pdcluster import client as api
from pdcluster.core.errors import Overloaded, Unauthorized
from pdcluster.rpc import externalscaler_pb2 as scaler_pb
from pdcluster.rpc import externalscaler_pb2_grpc as scaler_stubs
from pdcluster.rpc import inference_pb2 as pb
from pdcluster.rpc import inference_pb2_grpc as stubs
from pdcluster.telemetry.tracing import TracedSpan
from pdcluster_router.admin import scaler
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.core.tracing import Tracing
from pdcluster_router.frontend.grpc import MAX_WATCHERS, GrpcSettings, Inference, listening
from pdcluster_router.frontend.health import CachedExposition
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import router_metrics
from pdcluster_router.http.call_limits import MOST_WAITING, MessageReads
from pdcluster_router.http.errors import SlowRequest

LARGE = "a" * (4 << 20)


class CountedReads(MessageReads):
    num = 0

    async def read(self, context: grpc.aio.ServicerContext, owner: str) -> object:
        self.num += 1
        return await super().read(context, owner)


@asynccontextmanager
async def guarded(tracing: Tracing | None = None) -> AsyncIterator[tuple[str, CountedReads]]:
    """A server with one tenant, and what it reads."""
    dispatcher, settings = ScriptedDispatcher(), GrpcSettings()
    places = Places(8, Tenants({"acme": Entry(keys=["sk-acme-0001"])}))
    servicer = Inference(dispatcher, settings, router_metrics(), places, tracing)
    servicer.reads = reads = CountedReads(4)
    async with listening(servicer, dispatcher, "127.0.0.1:0", settings, drain_s=0.1) as address:
        yield address, reads


async def test_who_has_no_key_may_not_ask_for_a_trace() -> None:
    class Spans(list[TracedSpan]):
        def record(self, span: TracedSpan) -> None:
            self.append(span)

    spans, headers = Spans(), {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    async with guarded(Tracing(spans, 0.0)) as (address, _):
        async with api.AsyncClient(address) as client:
            with pytest.raises(Unauthorized):
                await client.complete("hi", headers=headers)
        assert not spans
        async with api.AsyncClient(address, api_key="sk-acme-0001") as client:
            await client.complete("hi", max_tokens=50, headers=headers)
        await until(lambda: len(spans) == 1)


async def test_a_large_message_without_a_key_is_refused_unread() -> None:
    async with guarded() as (address, reads):
        async with api.AsyncClient(address) as client:
            told = await asyncio.gather(*(client.complete(LARGE) for _ in range(8)), return_exceptions=True)
            assert all(isinstance(error, Unauthorized) for error in told), told
        assert reads.num == 0
        async with api.AsyncClient(address, api_key="sk-acme-0001") as client:
            assert (await client.complete("hi", max_tokens=50)).texts == ("hello world",)
        assert reads.num == 1


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_packed_message_is_not_unpacked(compression: grpc.Compression) -> None:
    async with (
        served_grpc(ScriptedDispatcher()) as address,
        grpc.aio.insecure_channel(address, compression=compression) as channel,
    ):
        call = stubs.InferenceStub(channel).Generate(pb.GenerateRequest(text="a" * (6 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_watchers_keep_no_call_out() -> None:
    async with served_grpc(ScriptedDispatcher()) as address, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for _ in range(3)]
        calls = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            for channel in channels
            for _ in range(MAX_WATCHERS // 2)
        ]
        told = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        refused = [each for each in told if isinstance(each, grpc.aio.AioRpcError)]
        assert {each.code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(told) - len(refused) <= MAX_WATCHERS
        health = health_pb2_grpc.HealthStub(channels[0])
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        async with api.AsyncClient(address) as client:
            assert (await client.complete("hi", max_tokens=50)).texts == ("hello world",)
        for call in calls:
            call.cancel()


async def test_a_watched_name_is_short() -> None:
    async with served_grpc(ScriptedDispatcher()) as address, grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="a" * 100_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_scalers_streams_keep_no_call_out() -> None:
    pool = scaler_pb.ScaledObjectRef(name="pool", namespace="default", scalerMetadata={"role": "decode"})
    async with scaler.listening(dict, "127.0.0.1:0") as address, grpc.aio.insecure_channel(address) as channel:
        stub = scaler_stubs.ExternalScalerStub(channel)
        streams = [stub.StreamIsActive(pool) for _ in range(scaler.MAX_STREAMS + scaler.MAX_CALLS)]
        told = await asyncio.gather(*(stream.read() for stream in streams), return_exceptions=True)
        refused = [each for each in told if isinstance(each, grpc.aio.AioRpcError)]
        assert refused and {each.code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert not (await stub.IsActive(pool, timeout=20.0)).result
        for stream in streams:
            stream.cancel()


class SlowCall:
    """Of a grpc.aio.ServicerContext: a message that comes when the test says so."""

    def __init__(self) -> None:
        self.message: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    num_reading = most_reading = 0

    async def read(self) -> object:
        SlowCall.num_reading += 1
        SlowCall.most_reading = max(SlowCall.most_reading, SlowCall.num_reading)
        try:
            return await self.message
        finally:
            SlowCall.num_reading -= 1


async def test_as_many_messages_are_read_at_a_time_and_one_that_stands_still_makes_room() -> None:
    reads = MessageReads(2, grace_s=0.05)
    SlowCall.most_reading = 0
    slow = [SlowCall() for _ in range(2)]
    reading = [asyncio.create_task(reads.read(call, f"owner-{at}")) for at, call in enumerate(slow)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    quick = [SlowCall() for _ in range(20)]
    for call in quick:
        call.message.set_result("whole")
    told = await asyncio.gather(*(reads.read(call, f"other-{at}") for at, call in enumerate(quick)))  # type: ignore[arg-type]
    assert told == ["whole"] * 20
    assert SlowCall.most_reading == 2
    async with asyncio.timeout(10.0):  # and not when its own time is over
        with pytest.raises(SlowRequest):
            await reading[0]
    reading[1].cancel()
    await asyncio.gather(*reading, return_exceptions=True)


async def test_callers_take_turns() -> None:
    reads = MessageReads(1, grace_s=0.01)
    slow = [asyncio.create_task(reads.read(SlowCall(), "stranger")) for _ in range(50)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    probe = SlowCall()
    probe.message.set_result("whole")
    assert await reads.read(probe, "kubelet") == "whole"  # type: ignore[arg-type]
    assert sum(each.done() for each in slow) < 10
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert await reads.read(probe, "kubelet") == "whole", "nothing of those who left is kept"  # type: ignore[arg-type]


async def test_a_message_that_does_not_come_and_a_turn_that_does_not_come_end() -> None:
    reads = MessageReads(1, read_s=0.1, grace_s=60.0)
    slow = asyncio.create_task(reads.read(SlowCall(), "a"))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    late = asyncio.create_task(MessageReads.read(reads, SlowCall(), "b"))  # type: ignore[arg-type]
    for task in (slow, late):
        with pytest.raises((SlowRequest, Overloaded)):
            await task


class Slow:
    """A call whose message takes so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def read(self) -> str:
        await asyncio.sleep(self.seconds)
        return "message"


async def test_an_owner_of_many_slow_messages_ends_none_of_another() -> None:
    reads = MessageReads(8, read_s=20.0, grace_s=0.1)
    greedy = [asyncio.create_task(reads.read(Slow(60.0), "greedy")) for _ in range(30)]
    await asyncio.sleep(0.01)
    assert await reads.read(Slow(1.5), "modest") == "message"
    for task in greedy:
        task.cancel()
    told = await asyncio.gather(*greedy, return_exceptions=True)
    assert any(isinstance(error, SlowRequest) for error in told), "they make room for each other"


async def test_an_owner_has_so_many_who_wait() -> None:
    reads = MessageReads(2, read_s=20.0, grace_s=20.0)
    waiting = [asyncio.create_task(reads.read(Slow(60.0), "a")) for _ in range(MOST_WAITING + 2)]
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await reads.read(Slow(0.0), "a")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_scrape_is_made_once_for_all_who_ask_within_a_second() -> None:
    gate, num = asyncio.Event(), 0

    async def make() -> bytes:
        nonlocal num
        num += 1
        await gate.wait()
        return b"%d" % num

    exposed = CachedExposition(make, 60.0)
    asking = [asyncio.create_task(exposed.text()) for _ in range(16)]
    await until(lambda: num == 1)
    asking[0].cancel()  # whoever leaves takes no text from the others
    gate.set()
    assert await asyncio.gather(*asking[1:]) == [b"2"] * 15
    assert await exposed.text() == b"2" and num == 2


async def test_a_scrape_that_failed_is_tried_again() -> None:
    exposed = CachedExposition(lambda: asyncio.sleep(0, 1 / 0))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await exposed.text()

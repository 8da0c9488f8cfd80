"""KEDA's external scaler asks for its token, in every call and stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from pdcluster.rpc import externalscaler_pb2 as pb
from pdcluster.rpc import externalscaler_pb2_grpc as stubs
from pdcluster_router.admin import scaler

TOKEN = "0123456789abcdef0123"


@asynccontextmanager
async def asked(token: str | None) -> AsyncIterator[stubs.ExternalScalerStub]:
    async with (
        scaler.listening(dict, "127.0.0.1:0", token) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield stubs.ExternalScalerStub(channel)


def pool(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="pool", namespace="default", scalerMetadata={"role": "decode", **metadata})


async def all_calls(stub: stubs.ExternalScalerStub, of: pb.ScaledObjectRef) -> list[grpc.StatusCode]:
    codes = []
    for call in (
        stub.IsActive(of),
        stub.GetMetricSpec(of),
        stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=of, metricName=scaler.METRIC)),
    ):
        try:
            await call
            codes.append(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())
    stream = stub.StreamIsActive(of)
    try:
        await stream.read()
        codes.append(grpc.StatusCode.OK)
    except grpc.aio.AioRpcError as error:
        codes.append(error.code())
    stream.cancel()
    return codes


@pytest.mark.parametrize("metadata", [{}, {"tokenFromEnv": "SCALER_TOKEN"}, {"token": TOKEN}, {"tokenFromEnv": "é"}])
async def test_a_trigger_without_the_token_is_told_how_to_give_it(metadata: dict[str, str]) -> None:
    async with asked(TOKEN) as stub:
        assert set(await all_calls(stub, pool(**metadata))) == {grpc.StatusCode.UNAUTHENTICATED}
        with pytest.raises(grpc.aio.AioRpcError, match="give the trigger tokenFromEnv"):
            await stub.IsActive(pool(**metadata))


async def test_the_token_comes_as_keda_sends_it() -> None:
    async with asked(TOKEN) as stub:
        assert set(await all_calls(stub, pool(tokenFromEnv=TOKEN))) == {grpc.StatusCode.OK}


async def test_without_a_token_every_trigger_is_answered() -> None:
    async with asked(None) as stub:
        assert set(await all_calls(stub, pool())) == {grpc.StatusCode.OK}

"""A sample of what strangers and other tenants try, on one cluster of real processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import pytest
import zmq
from shared_network import ALICE, SharedNetwork

from pdcluster.bootstrap.agent import open_channel
from pdcluster.bootstrap.credentials import BootstrapCredentials, Identity, bootstrap_credentials
from pdcluster.rpc import (
    admin_pb2,
    admin_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

LIMIT_S = 10.0


async def refused(call: Awaitable[object]) -> grpc.StatusCode:
    """How gRPC says no."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(call, LIMIT_S)
    return error.value.code()


async def leave_as(network: SharedNetwork, credentials: BootstrapCredentials | None) -> grpc.StatusCode:
    """p0's name, by somebody else."""
    async with open_channel(f"127.0.0.1:{network.ports['bootstrap']}", credentials) as channel:
        request = bootstrap_pb2.LeaveRequest(node="p0", incarnation="x")
        return await refused(bootstrap_pb2_grpc.BootstrapStub(channel).Leave(request, timeout=LIMIT_S))


async def nobody_without_a_key_ends_a_registration(network: SharedNetwork) -> None:
    assert await leave_as(network, None) is grpc.StatusCode.UNAVAILABLE


async def another_key_ends_no_registration(network: SharedNetwork) -> None:
    assert await leave_as(network, bootstrap_credentials((bytes(32),), Identity("node", "p0"))) is (
        grpc.StatusCode.UNAVAILABLE
    )


async def a_link_without_the_key_gets_no_answer(network: SharedNetwork) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for name in ("p0 link", "d0 link"):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.connect(f"tcp://127.0.0.1:{network.ports[name]}")
                dealer.send(b"\x93hello")
                assert not await asyncio.to_thread(dealer.poll, 1000)
    finally:
        context.destroy(0)


async def a_lane_without_the_token_is_closed(network: SharedNetwork) -> None:
    with socket.create_connection(("127.0.0.1", network.ports["d0 kv"]), LIMIT_S) as sock:
        sock.sendall(b"pdclKV1\n" + bytes(100))
        try:
            assert await asyncio.to_thread(sock.recv, 100) == b""
        except ConnectionResetError:
            return


async def a_body_without_a_key_is_not_read(network: SharedNetwork) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", network.ports["http"])
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n")
    status = await asyncio.wait_for(reader.readline(), LIMIT_S)
    writer.close()
    assert b" 401 " in status


async def grpc_asks_for_a_key(network: SharedNetwork) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{network.ports['grpc']}") as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="x"))
        assert await refused(call.read()) is grpc.StatusCode.UNAUTHENTICATED


async def admin_asks_for_its_token(network: SharedNetwork) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{network.ports['admin']}") as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        assert await refused(stub.ListNodes(admin_pb2.ListNodesRequest())) is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {ALICE}"),)
        call = stub.ListNodes(admin_pb2.ListNodesRequest(), metadata=metadata)
        assert await refused(call) is grpc.StatusCode.UNAUTHENTICATED


async def secrets_are_in_no_log(network: SharedNetwork) -> None:
    logs = "".join(network.processes.log_of(name) for name in network.children)
    assert network.key_file.read_text().strip() not in logs and network.token not in logs and ALICE not in logs


CASES: tuple[Callable[[SharedNetwork], Awaitable[None]], ...] = (
    nobody_without_a_key_ends_a_registration,
    another_key_ends_no_registration,
    a_link_without_the_key_gets_no_answer,
    a_lane_without_the_token_is_closed,
    a_body_without_a_key_is_not_read,
    grpc_asks_for_a_key,
    admin_asks_for_its_token,
    secrets_are_in_no_log,
)


async def test_strangers_get_nothing_and_tenants_all(tmp_path: Path) -> None:
    async with SharedNetwork(tmp_path) as network, network.client() as client:
        expected = (await network.complete(client))["choices"]
        for case in CASES:
            await case(network)
            answer = await network.complete(client)
            assert answer["choices"] == expected and answer["usage"]["pdcluster"]["mode"] == "remote", case.__name__
        with pytest.raises(httpx.HTTPError):
            await client.get(f"http://127.0.0.1:{network.ports['bootstrap']}/", timeout=3.0)

"""What strangers may cost a router before it knows them: bytes on their way, calls, streams and scrapes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from fake_cluster import RouterProcess, fake_cluster, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.fakes.fake_node import Speed
from pdcluster import client as api
from pdcluster.core.errors import PdclusterError

pytestmark = pytest.mark.timeout(300)

KEY, MIB = "sk-acme-0001", 1 << 20
BODY = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-acme-0001\r\ncontent-type: application/json\r\n"
# Beside what bounds allow: objects of connections, buffers of the kernel's sizes, the heap's own holes.
SLACK_BYTES = 60 * MIB


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with fake_cluster(["prefill", "decode"], Speed(prefill_s=0.0005, token_s=0.002)) as (address, _):
        yield address


@pytest.fixture
def router(bootstrap: str, tmp_path: Path) -> Iterator[RouterProcess]:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[acme]\nkeys = ["{KEY}"]\n[other]\nkeys = ["sk-other-0001"]\n')
    tenants.chmod(0o600)
    found = RouterProcess(bootstrap, "--tenants", str(tenants), open_files=8192)
    try:
        until(lambda: httpx.get(f"{found.url}/ready", trust_env=False, timeout=60.0).status_code == 200)
        completes(found)
        yield found
    finally:
        assert found.stop() == 0


def completes(router: RouterProcess, key: str = "sk-other-0001") -> float:
    """Seconds that another tenant's request takes. It is served."""
    began = time.monotonic()
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx.post(f"{router.url}/v1/completions", json=BODY, headers=headers, trust_env=False, timeout=60.0)
    assert reply.status_code == 200, reply.text
    return time.monotonic() - began


def memory(router: RouterProcess) -> int:
    return int(psutil.Process(router.process.pid).memory_info().rss)


def connected(router: RouterProcess, stack: contextlib.ExitStack) -> socket.socket:
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=60))


def test_bodies_a_byte_short_of_whole(router: RouterProcess) -> None:
    before, part = memory(router), bytes(8 * MIB - 1)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            client = connected(router, stack)
            client.sendall(POST + b"content-length: %d\r\n\r\n" % (8 * MIB))
            client.sendall(part)
        assert memory(router) - before < 64 * MIB + SLACK_BYTES
        completes(router)


def test_heads_that_do_not_end(router: RouterProcess) -> None:
    before = memory(router)
    with contextlib.ExitStack() as stack:
        for _ in range(3000):
            with contextlib.suppress(ConnectionError):  # it is told that there are too many
                connected(router, stack).sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 60_000)
        assert memory(router) - before < 8 * MIB + SLACK_BYTES
        completes(router)


def test_large_messages_without_a_key(router: RouterProcess) -> None:
    before, most, is_over = memory(router), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not is_over.wait(0.005):
            most = max(most, memory(router))

    def ask(_: int) -> str:
        with api.Client(router.grpc) as client, contextlib.suppress(PdclusterError):
            client.complete("a" * (8 * MIB - 1000))
            return "served"
        return "refused"

    looking = threading.Thread(target=look)
    looking.start()
    with ThreadPoolExecutor(40) as pool:
        told = list(pool.map(ask, range(40)))
    is_over.set()
    looking.join()
    assert told == ["refused"] * 40
    assert most - before < SLACK_BYTES
    completes(router)


def test_watchers_of_health(router: RouterProcess) -> None:
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(router.grpc, options=(("grpc.use_local_subchannel_pool", 1),)))
            for _ in range(22)
        ]
        calls = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            for channel in channels
            for _ in range(100)
        ]
        with contextlib.suppress(grpc.RpcError):
            next(calls[-1])
        with api.Client(router.grpc, api_key="sk-other-0001") as client:
            assert client.complete([5, 6, 7], max_tokens=4, ignore_eos=True, timeout_s=60.0).finish_reasons
        health = health_pb2_grpc.HealthStub(channels[0])
        assert (
            health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.SERVING
        )
        for call in calls:
            call.cancel()


def test_many_who_scrape(router: RouterProcess) -> None:
    """Most scrapes are of the same second, so their texts are the same."""
    with httpx.Client(base_url=router.url, trust_env=False, timeout=60.0) as client, ThreadPoolExecutor(16) as pool:
        began = time.monotonic()
        texts = list(pool.map(lambda _: client.get("/metrics").text, range(320)))
        spent_s = time.monotonic() - began
        assert len(set(texts)) <= spent_s + 2
    completes(router)

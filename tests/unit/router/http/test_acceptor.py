"""Accepted clients: those beyond its descriptors are answered and do not take what is kept for others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from scripted_dispatcher import ScriptedDispatcher

from pdcluster.core.errors import ConfigError
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.server import listening, router_metrics
from pdcluster_router.http import acceptor
from pdcluster_router.http.acceptor import AcceptLimits, limits_of_process

ASKS = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
OK, FULL = b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable"
# Numbers that listening takes: its socket and the spare one.
LISTENING = 2


@contextlib.contextmanager
def free_from() -> Iterator[int]:
    """A number from which on all descriptors are free, and below which none is."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.dup(0)]
    while taken[-1] <= highest:
        taken.append(os.dup(0))
    os.close(first := taken.pop())
    try:
        yield first
    finally:
        for number in taken:
            os.close(number)


@asynccontextmanager
async def opened(limits: AcceptLimits) -> AsyncIterator[tuple[str, int, RouterMetrics]]:
    metrics = router_metrics()
    app = create_app(ScriptedDispatcher(), HttpSettings(), metrics)
    async with listening(app, "127.0.0.1:0", drain_s=1.0, accept_limits=limits) as address:
        host, _, port = address.rpartition(":")
        yield host, int(port), metrics


async def connected(host: str, port: int) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, port))
    return client


async def whole_answer(client: socket.socket) -> bytes:
    loop, said = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionResetError):
        while data := await loop.sock_recv(client, 65536):
            said += data
    client.close()
    return said


def refused(metrics: RouterMetrics) -> float | None:
    return metrics.registry.get_sample_value("pdcluster_http_connections_refused_total")


async def test_there_is_room_again_when_clients_leave() -> None:
    loop = asyncio.get_running_loop()
    with free_from() as first:
        # Each client takes a number here and one at its other end.
        async with opened(AcceptLimits(first + LISTENING + 6)) as (host, port, metrics):
            crowd = [await connected(host, port) for _ in range(8)]
            told = []
            for client in crowd:
                await loop.sock_sendall(client, ASKS)
                told.append((await loop.sock_recv(client, 65536)).partition(b"\r\n")[0])
            assert told[0] == OK and told[-1] == FULL and set(told) == {OK, FULL}
            assert refused(metrics) == told.count(FULL)
            for client in crowd:
                client.close()
            async with asyncio.timeout(10.0):
                while True:
                    client = await connected(host, port)
                    await loop.sock_sendall(client, ASKS)
                    is_in = (await loop.sock_recv(client, 65536)).startswith(OK)
                    client.close()
                    if is_in:
                        break
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("asks", [True, False])
async def test_each_of_many_is_told_though_few_may_linger(asks: bool) -> None:
    loop = asyncio.get_running_loop()
    with free_from() as first:
        async with opened(AcceptLimits(first + LISTENING, refused=2)) as (host, port, metrics):
            crowd = [await connected(host, port) for _ in range(60)]
            for client in crowd:
                with contextlib.suppress(OSError):
                    if asks:
                        await loop.sock_sendall(client, ASKS)
            for answer in [await whole_answer(client) for client in crowd]:
                assert answer.startswith(FULL) and b"retry later" in answer
                assert b"retry-after: 1\r\n" in answer and b"connection: close\r\n" in answer
            assert refused(metrics) == 60


async def test_who_reads_nothing_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "LINGER_S", 0.05)
    loop = asyncio.get_running_loop()
    with free_from() as first:
        async with opened(AcceptLimits(first + LISTENING)) as (host, port, _):
            client = await connected(host, port)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                async with asyncio.timeout(10.0):
                    while True:
                        await loop.sock_sendall(client, b"x" * 4096)
                        await asyncio.sleep(0.01)
            client.close()


@contextlib.contextmanager
def open_files(limit: int) -> Iterator[None]:
    """This process may open no higher number meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_any_descriptor_a_spare_one_answers() -> None:
    loop = asyncio.get_running_loop()
    async with opened(AcceptLimits(1 << 20)) as (host, port, metrics):
        with free_from() as first:
            crowd = [socket.socket() for _ in range(3)]
            with open_files(first + len(crowd)):
                for client in crowd:
                    client.setblocking(False)
                    await loop.sock_connect(client, (host, port))
                answers = await asyncio.wait_for(asyncio.gather(*(loop.sock_recv(each, 65536) for each in crowd)), 10.0)
        assert [answer.startswith(FULL) for answer in answers] == [True] * 3 and refused(metrics) == 3
        for client in crowd:
            client.close()


async def test_without_a_spare_one_clients_wait_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    async with opened(AcceptLimits(1 << 20)) as (host, port, _):
        client = socket.socket()
        client.setblocking(False)
        with open_files(3):
            await loop.sock_connect(client, (host, port))
            await asyncio.sleep(2.5 * acceptor.PAUSE_S)
        await loop.sock_sendall(client, ASKS)
        assert (await asyncio.wait_for(loop.sock_recv(client, 65536), 10.0)).startswith(OK)
        client.close()
        assert len([each for each in caplog.records if "no client is accepted" in each.message]) == 1


async def test_a_limit_that_leaves_none_for_clients_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"raise it: ulimit -n, LimitNOFILE"):
        async with opened(AcceptLimits(3)):
            raise AssertionError("must not listen")


def test_clients_leave_descriptors_to_links_and_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: limits.append(pair))
    assert limits_of_process() == (3072, 256) and limits[-1] == (4096, 4096)
    limits.append((2**20, 2**20))
    assert limits_of_process() == (2**20 - 4096, 1024)

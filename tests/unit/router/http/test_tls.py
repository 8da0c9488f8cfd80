"""HTTP over TLS: what plain connections do holds, handshakes are bounded, and the certificate changes under way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import httpx
import pytest
import uvloop
from certificates import NAME, Authority
from prometheus_client import CollectorRegistry
from scripted_dispatcher import MODEL, ScriptedDispatcher, Wait, says, until

from pdcluster.settings.tls_files import read_certificate
from pdcluster.settings.tls_trust import client_context
from pdcluster.telemetry.metrics import TlsMetrics
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.server import listening, router_metrics
from pdcluster_router.http import connection, tls
from pdcluster_router.http.acceptor import AcceptLimits
from pdcluster_router.http.exchange import Exchange
from pdcluster_router.http.tls import ServerTls

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
STREAM = json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()
ASKS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(STREAM),
    STREAM,
)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Edge:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self.authority.write(self.cert, self.key)
        self.registry = CollectorRegistry()
        self.tls = ServerTls(self.cert, self.key, TlsMetrics(self.registry))
        self.dispatcher = ScriptedDispatcher()
        self.metrics = router_metrics()
        self.port = 0

    def handshakes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value(
            "pdcluster_tls_handshakes_total", {"listener": "http", "outcome": outcome}
        )

    @contextlib.asynccontextmanager
    async def listening(self, limits: AcceptLimits | None = None) -> AsyncIterator[None]:
        app = create_app(self.dispatcher, HttpSettings(), self.metrics)
        async with (
            asyncio.timeout(60.0),
            listening(app, "127.0.0.1:0", drain_s=0.2, tls=self.tls, accept_limits=limits) as address,
        ):
            self.port = int(address.rpartition(":")[2])
            yield

    def context(self, authority: Authority | None = None) -> ssl.SSLContext:
        return client_context((authority or self.authority).file)

    async def connect(self, context: ssl.SSLContext | None = None) -> Streams:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context or self.context(), server_hostname=NAME
        )

    async def plain(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path)


async def answered(streams: Streams) -> bytes:
    """The first line of what comes for a probe; all of the answer is read."""
    reader, writer = streams
    writer.write(HEALTH)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return head.partition(b"\r\n")[0]


async def closed(streams: Streams) -> None:
    streams[1].close()
    with contextlib.suppress(OSError):
        await streams[1].wait_closed()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that still comes."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_requests_are_answered_over_one_connection(edge: Edge) -> None:
    async with edge.listening():
        streams = await edge.connect()
        assert [await answered(streams) for _ in range(3)] == [b"HTTP/1.1 200 OK"] * 3
        shown = streams[1].get_extra_info("ssl_object")
        assert (shown.version(), shown.selected_alpn_protocol()) == ("TLSv1.3", None)
        await closed(streams)
        async with httpx.AsyncClient(verify=edge.context(), base_url=f"https://127.0.0.1:{edge.port}") as client:
            streamed = client.stream(
                "POST", "/v1/completions", content=STREAM,
                headers={"content-type": "application/json"}, extensions={"sni_hostname": NAME},
            )  # fmt: skip
            async with streamed as reply:
                assert reply.http_version == "HTTP/1.1" and (await reply.aread()).endswith(b"data: [DONE]\n\n")
        assert edge.handshakes("done") == 2


async def test_the_protocol_is_agreed_upon(edge: Edge) -> None:
    context = edge.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with edge.listening():
        streams = await edge.connect(context)
        assert streams[1].get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        assert await answered(streams) == b"HTTP/1.1 200 OK"
        await closed(streams)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_who_speaks_no_tls_or_an_old_one_is_refused(edge: Edge) -> None:
    old = edge.context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with edge.listening():
        with pytest.raises(OSError):  # ConnectionError where the alert was not read
            await edge.connect(old)
        reader, writer = await edge.plain()
        writer.write(HEALTH)
        assert b"HTTP" not in await ended(reader)
        writer.close()
        await until(lambda: edge.handshakes("failed") == 2)
        streams = await edge.connect()
        assert await answered(streams) == b"HTTP/1.1 200 OK"
        await closed(streams)


@pytest.mark.parametrize("way", ["cut", "reset", "said"])
async def test_a_client_that_leaves_a_stream_is_noticed(edge: Edge, way: str) -> None:
    """With and without the goodbye of TLS: neither waits for another token."""
    never = asyncio.Event()
    edge.dispatcher.script = lambda _: [*says("a b c", "length"), Wait(never)]
    async with edge.listening():
        reader, writer = await edge.connect()
        writer.write(ASKS)
        await reader.readuntil(b"data: ")
        raw: socket.socket = writer.get_extra_info("socket")
        if way == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if way == "said":
            writer.close()
        else:
            writer.transport.abort()
        await until(lambda: len(edge.dispatcher.cancelled) == 1)
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_a_slow_handshake_ends(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.2)
    async with edge.listening():
        reader, writer = await edge.plain()
        other = await edge.connect()
        assert await answered(other) == b"HTTP/1.1 200 OK"
        assert await ended(reader) == b""
        assert edge.handshakes("late") == 1
        writer.close()
        await closed(other)


async def test_handshakes_of_a_stranger_end_before_one_of_another_address(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "MOST_HANDSHAKES", 4)
    async with edge.listening():
        slow = socket.create_connection(("127.0.0.1", edge.port), source_address=("127.0.0.2", 0))
        slow.setblocking(False)
        strangers = [await edge.plain() for _ in range(12)]
        await until(lambda: edge.handshakes("displaced") == 9)
        streams = await asyncio.open_connection(sock=slow, ssl=edge.context(), server_hostname=NAME)
        assert await answered(streams) == b"HTTP/1.1 200 OK"
        for other in (streams, *strangers):
            other[1].transport.abort()


async def test_of_too_many_handshakes_the_oldest_end(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "MOST_HANDSHAKES", 4)
    async with edge.listening():
        strangers = [await edge.plain() for _ in range(12)]
        other = await edge.connect()
        assert await answered(other) == b"HTTP/1.1 200 OK"
        assert edge.handshakes("displaced") == 9 and edge.handshakes("done") == 1
        for reader, _ in strangers[:9]:
            assert await ended(reader) == b""
        assert not any(reader.at_eof() for reader, _ in strangers[9:])
        for _, writer in strangers:
            writer.close()
        await closed(other)


async def test_open_handshakes_do_not_keep_a_router_from_stopping(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LAST_HANDSHAKES_S", 0.05)
    async with edge.listening():
        reader, writer = await edge.plain()
        streams = await edge.connect()
        assert await answered(streams) == b"HTTP/1.1 200 OK"
    assert await ended(reader) == b"" and await ended(streams[0]) == b""
    writer.close()
    await closed(streams)


async def test_beyond_the_limit_of_open_files_an_alert_is_the_answer(edge: Edge) -> None:
    lowest = socket.socket()
    try:
        async with edge.listening(AcceptLimits(lowest.fileno() + 16)):
            crowd = [socket.socket() for _ in range(40)]
            try:
                with pytest.raises(ssl.SSLError, match="INTERNAL_ERROR"):
                    await edge.connect()
            finally:
                for each in crowd:
                    each.close()
        assert edge.metrics.registry.get_sample_value("pdcluster_http_connections_refused_total") == 1
    finally:
        lowest.close()


async def test_a_new_certificate_is_for_new_connections(edge: Edge, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    async with edge.listening():
        before = await edge.connect()
        other.write(edge.cert, edge.key)
        edge.tls.use(read_certificate(edge.cert, edge.key))
        with pytest.raises(ssl.SSLCertVerificationError):
            await edge.connect()
        after = await edge.connect(edge.context(other))
        assert [await answered(each) for each in (before, after)] == [b"HTTP/1.1 200 OK"] * 2
        await closed(before)
        await closed(after)


class Large:
    """Implements server.ListenedApp: each answer is more than sockets hold."""

    SIZE = 24 << 20

    def __init__(self) -> None:
        self.settings, self.metrics = HttpSettings(), router_metrics()

    def begin(self, exchange: Exchange) -> None:
        pass

    def complete(self, exchange: Exchange) -> None:
        exchange.reply(200, bytes(self.SIZE))

    late = stalled = gone = stopping = over = begin


LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@LOOPS
def test_who_reads_slowly_gets_all_of_a_last_answer(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    monkeypatch.setattr(connection, "GOODBYE_S", 0.05)

    async def scene() -> None:
        async with (
            asyncio.timeout(60.0),
            listening(Large(), "127.0.0.1:0", drain_s=30.0, tls=edge.tls) as address,
        ):
            edge.port = int(address.rpartition(":")[2])
            reader, writer = await edge.connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.5)  # many times what a goodbye may take
            assert len(await ended(reader)) == Large.SIZE
            await closed((reader, writer))

    run(scene())


@LOOPS
def test_who_says_no_goodbye_does_not_keep_a_router_from_stopping(
    edge: Edge, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    """As clients with pools of connections, which look at none that they do not use."""
    context = edge.context()

    async def scene() -> None:
        app = create_app(edge.dispatcher, HttpSettings(), edge.metrics)
        async with asyncio.timeout(30.0):
            async with listening(app, "127.0.0.1:0", drain_s=60.0, tls=edge.tls) as address:
                client = await asyncio.to_thread(silent_client, int(address.rpartition(":")[2]), context)
        client.close()

    run(scene())


def silent_client(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Has the answer to a request, and reads no more."""
    client = context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30.0), server_hostname=NAME)
    client.sendall(HEALTH)
    assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
    return client

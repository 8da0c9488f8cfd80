"""HTTP/1.1 as clients send it, byte by byte or all at once: framing, order, keep-alive, limits, deadlines. Over real
sockets, by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scripted_dispatcher import MODEL, TEXT, ScriptedDispatcher, Wait, says, served, until

from pdcluster.core.version import VERSION
from pdcluster_router.frontend.app import HttpSettings
from pdcluster_router.frontend.server import KEEPALIVE, bind, sweep
from pdcluster_router.http.connection import MAX_HEAD_BYTES, Connection, ConnectionLimits, Connections
from pdcluster_router.http.exchange import Exchange

PLAIN = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

HEALTHY = b'{"status":"ok","version":"%b"}' % VERSION.encode()


def request(body: bytes = BODY, *headers: str, length: int | None = None, version: str = "1.1") -> bytes:
    lines = [
        f"POST {PLAIN} HTTP/{version}",
        "host: x",
        f"content-length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


@pytest.fixture
def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher()


@pytest.fixture
async def wire(dispatcher: ScriptedDispatcher) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with served(dispatcher) as url, opened(url) as streams:
        yield streams


async def test_a_request_that_comes_byte_by_byte_is_as_good_as_one_in_one_piece(wire) -> None:
    reader, writer = wire
    for byte in request():
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    status, headers, body = await answer(reader)
    assert status == 200 and json.loads(body)["choices"][0]["text"] == "hello world" and "date" in headers


async def test_pipelined_requests_are_answered_in_their_order_and_run_one_after_the_other(
    wire, dispatcher: ScriptedDispatcher
) -> None:
    reader, writer = wire
    gate = asyncio.Event()
    dispatcher.script = lambda generation: [Wait(gate), *says("a")] if len(dispatcher.started) == 1 else says("b")
    writer.write(request() + HEALTH + request() + HEALTH)
    await until(lambda: len(dispatcher.started) == 1)
    await asyncio.sleep(0.02)
    assert len(dispatcher.started) == 1
    gate.set()
    bodies = [(await answer(reader))[2] for _ in range(4)]
    assert [json.loads(bodies[at])["choices"][0]["text"] for at in (0, 2)] == ["a", "b"]
    assert bodies[1] == bodies[3] == HEALTHY
    writer.write(HEALTH)
    assert (await answer(reader))[0] == 200, "the connection goes on"


async def test_a_long_line_of_pipelined_requests_is_answered(wire, dispatcher: ScriptedDispatcher) -> None:
    reader, writer = wire
    gate = asyncio.Event()
    dispatcher.script = lambda generation: [Wait(gate), *says("a")]
    writer.write(request() + HEALTH * 2000)
    await until(lambda: len(dispatcher.started) == 1)
    gate.set()
    assert [(await answer(reader))[0] for _ in range(2001)] == [200] * 2001


@pytest.mark.parametrize("num", [1, 1500])
@pytest.mark.parametrize("is_at_once", [False, True])
async def test_a_client_that_sent_more_requests_early_is_seen_to_leave(
    wire, dispatcher: ScriptedDispatcher, num: int, is_at_once: bool
) -> None:
    _, writer = wire
    dispatcher.script = lambda generation: [Wait(asyncio.Event())]
    writer.write(request() + HEALTH * num * is_at_once)
    await until(lambda: len(dispatcher.started) == 1)
    if not is_at_once:
        writer.write(HEALTH * num)
        await until(lambda: writer.transport.get_write_buffer_size() == 0)
    writer.close()
    await until(lambda: dispatcher.cancelled)
    assert dispatcher.cancelled == [dispatcher.started[0].request] and not dispatcher.ended


class ByHand:
    """Implements http_connection.Application: answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Exchange] = []

    def complete(self, exchange: Exchange) -> None:
        self.waiting.append(exchange)

    def begin(self, exchange: Exchange) -> None:
        pass

    late = crowded = stalled = gone = stopping = over = begin


class Pipe(asyncio.Transport):
    """To whom a client writes as long as it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading_now, self.written = True, b""
        self.is_closed = self.is_cut = False

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_what_comes_early_is_bounded_and_all_of_it_is_answered() -> None:
    application, pipe = ByHand(), Pipe()
    connection = Connection(application, ConnectionLimits(1000), Connections())
    connection.connection_made(pipe)
    to_come, num_answered = [HEALTH, *[HEALTH * 1000] * 10], 0
    while to_come or application.waiting:
        while to_come and pipe.is_reading_now:
            connection.data_received(to_come.pop(0))
        if not num_answered:
            assert len(to_come) == 7, "one that runs, a read that is parsed, and 64 KiB"
        application.waiting.pop().reply(200, b"")
        num_answered += 1
    assert num_answered == 10_001 and pipe.is_reading_now


def test_the_kernel_asks_whether_a_silent_client_is_still_there() -> None:
    with bind("127.0.0.1:0", is_port_shared=False) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [accepted.getsockopt(socket.IPPROTO_TCP, option) for option, _ in KEEPALIVE] == [
                value for _, value in KEEPALIVE
            ]


@pytest.mark.parametrize("is_drained", [False, True])
def test_after_the_body_of_a_refused_request_a_connection_goes_on_unless_it_drains(is_drained: bool) -> None:
    application, pipe = ByHand(), Pipe()
    connection = Connection(application, ConnectionLimits(1000), Connections())
    connection.connection_made(pipe)
    application.begin = lambda exchange: exchange.reply(401, b"") if not pipe.written else None  # type: ignore[method-assign]
    connection.data_received(request()[:-5])
    assert b" 401 " in pipe.written and not pipe.is_closed
    if is_drained:
        connection.drain()
    connection.data_received(BODY[-5:] + HEALTH)
    assert pipe.is_closed is is_drained and len(application.waiting) == (not is_drained)


async def test_a_pipelined_request_whose_body_comes_later_is_answered(wire, dispatcher: ScriptedDispatcher) -> None:
    reader, writer = wire
    gate = asyncio.Event()
    dispatcher.script = lambda generation: [Wait(gate), *says("a")]
    writer.write(request() + request()[:-5])
    await until(lambda: len(dispatcher.started) == 1)
    gate.set()
    assert (await answer(reader))[0] == 200
    writer.write(BODY[-5:])
    assert (await answer(reader))[0] == 200


async def test_a_chunked_body_with_trailers_is_taken(wire) -> None:
    reader, writer = wire
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))
    writer.write(head + chunks + b"0\r\ncontent-type: text/plain\r\n\r\n" + HEALTH)
    assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("header", ["content-type: application/json", "content-type: text/plain"])
@pytest.mark.parametrize("start", [b"0\r\nx: ", b"5;x="])
async def test_what_a_chunked_body_has_beside_its_bytes_is_bounded_too(wire, header: str, start: bytes) -> None:
    """Trailers and extensions, of a request that waits for its body or has been answered without it."""
    reader, writer = wire
    writer.write(f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\n{header}\r\ntransfer-encoding: chunked\r\n\r\n".encode() + start)
    with contextlib.suppress(ConnectionError):  # it is cut while it still sends
        for _ in range(100):
            writer.write(b"a" * MAX_HEAD_BYTES)
            await writer.drain()
            await asyncio.sleep(0)
        raise AssertionError("100 heads' worth were taken")
    with contextlib.suppress(ConnectionError):
        assert (await answer(reader))[0] in (431, 415)


def chunked(data: bytes, header: str = "x: y") -> bytes:
    """Each byte in a chunk of its own."""
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\n{header}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"


async def test_a_body_of_very_many_parts_is_taken(wire, dispatcher: ScriptedDispatcher) -> None:
    reader, writer = wire
    dispatcher.max_len = 10_000
    writer.write(chunked(json.dumps({"model": MODEL, "prompt": "hello " * 500}).encode()))
    assert (await answer(reader))[0] == 200
    assert TEXT.decode(dispatcher.started[0].token_ids) == "hello " * 500


def test_of_a_body_no_more_is_kept_than_its_bytes_and_nothing_after_the_answer() -> None:
    application, pipe = ByHand(), Pipe()
    connection = Connection(application, ConnectionLimits(10_000), Connections())
    connection.connection_made(pipe)
    connection.data_received(chunked(b"a" * 5000))
    assert len(application.waiting[0].parts) < 300
    assert (
        application.waiting[0].take_body() == b"a" * 5000 and not application.waiting[0].parts
    )  # nor are they kept while it is answered
    application.waiting.pop().reply(200, b"")
    application.begin = lambda exchange: (kept.append(exchange), exchange.reply(401, b""))  # type: ignore[method-assign]
    kept: list[Exchange] = []
    connection.data_received(chunked(b"a" * 5000)[:-10])
    assert kept[0].body_bytes > 4000 and kept[0].parts == []


async def test_who_expects_100_continue_gets_it_or_the_error_before_the_body(dispatcher: ScriptedDispatcher) -> None:
    async with served(dispatcher, HttpSettings(max_body_bytes=1000)) as url:
        async with opened(url) as (reader, writer):
            writer.write(request(b"", "expect: 100-continue", length=len(BODY)))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            assert (await answer(reader))[0] == 200
        async with opened(url) as (reader, writer):
            writer.write(request(b"", "expect: 100-continue", length=1001))
            status, headers, _ = await answer(reader)
            assert status == 413 and headers["connection"] == "close" and await reader.read() == b""


@pytest.mark.parametrize("size", [1001, 8000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_is_too_large_is_read_and_dropped_so_that_the_answer_is_seen(
    dispatcher: ScriptedDispatcher, size: int, is_chunked: bool
) -> None:
    async with served(dispatcher, HttpSettings(max_body_bytes=1000)) as url, opened(url) as (reader, writer):
        if is_chunked:
            writer.write(f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size))
        else:
            writer.write(request(b"x" * size))
        assert (await answer(reader))[0] == 413
        assert dispatcher.started == []


async def test_a_body_far_too_large_ends_the_connection(dispatcher: ScriptedDispatcher) -> None:
    async with served(dispatcher, HttpSettings(max_body_bytes=1000)) as url, opened(url) as (reader, writer):
        writer.write(request(b"", length=8001))
        assert (await answer(reader))[0] == 413 and await reader.read() == b""


async def test_an_error_before_the_body_came_does_not_cost_the_connection(wire) -> None:
    reader, writer = wire
    writer.write(request(b"", "content-type: text/plain", length=len(BODY)))
    assert (await answer(reader))[0] == 415
    writer.write(BODY + HEALTH)
    assert (await answer(reader))[2] == HEALTHY


async def test_head_has_a_length_and_no_body(wire) -> None:
    reader, writer = wire
    writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n" + HEALTH)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(HEALTHY) in head
    assert (await answer(reader))[2] == HEALTHY


async def test_a_client_of_http_1_0_gets_its_stream_up_to_the_connections_end(wire) -> None:
    reader, writer = wire
    writer.write(request(json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode(), version="1.0"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"chunked" not in head and b"connection: close" in head
    assert (await reader.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("header", "stays"), [("connection: close", False), ("connection: keep-alive", True)])
async def test_a_client_decides_whether_its_connection_stays(wire, header: str, stays: bool) -> None:
    reader, writer = wire
    for _ in range(2):
        writer.write(request(BODY, header))
        status, headers, _ = await answer(reader)
        assert status == 200 and ("connection" not in headers) is stays
        if not stays:
            assert await reader.read() == b""
            return


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"not http at all\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES, 431),
    ],
)
async def test_bytes_that_are_no_request_are_refused_and_the_connection_ends(wire, data: bytes, status: int) -> None:
    reader, writer = wire
    writer.write(data)
    assert (await answer(reader))[0] == status and await reader.read() == b""


@pytest.mark.parametrize(
    "junk",
    [b"junk\r\n\r\n", b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\njunk\r\n", b"x: " + b"a" * MAX_HEAD_BYTES],
)
@pytest.mark.parametrize("is_at_once", [False, True])
async def test_what_came_before_junk_is_answered(
    wire, dispatcher: ScriptedDispatcher, junk: bytes, is_at_once: bool
) -> None:
    reader, writer = wire
    gate = asyncio.Event()
    dispatcher.script = lambda generation: [Wait(gate), *says("a")]
    writer.write(request() + HEALTH + junk * is_at_once)
    await until(lambda: len(dispatcher.started) == 1)
    if not is_at_once:
        writer.write(junk)
        await asyncio.sleep(0.02)
    gate.set()
    assert json.loads((await answer(reader))[2])["choices"][0]["text"] == "a"
    assert (await answer(reader))[2] == HEALTHY
    with contextlib.suppress(ConnectionError):
        await reader.read()
    assert dispatcher.cancelled == []


# As Java's client and `curl --http2` ask for HTTP/2.
UPGRADES = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAB")
FRAMINGS = (f"content-length: {len(BODY)}", "transfer-encoding: chunked")


async def test_an_upgrade_is_not_made_and_the_request_is_answered(wire) -> None:
    reader, writer = wire
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await answer(reader))[2] == HEALTHY


@pytest.mark.parametrize("size", [1, 50, 100_000])
async def test_a_request_that_would_rather_be_http_2_has_its_body_and_its_connection(
    wire, dispatcher: ScriptedDispatcher, size: int
) -> None:
    reader, writer = wire
    heads = [
        "\r\n".join([f"POST {PLAIN} HTTP/1.1", "host: x", "x-request-id: mine", *UPGRADES, framing, "", ""]).encode()
        for framing in FRAMINGS
    ]
    data = (
        heads[0] + BODY + heads[1] + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + request(BODY, "x-request-id: mine")
    )
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await asyncio.sleep(0)
    for _ in range(3):
        status, headers, _ = await answer(reader)
        assert status == 200 and headers["x-request-id"] == "mine" and "connection" not in headers
    assert len(dispatcher.started) == 3


async def test_many_wishes_for_another_protocol_in_one_read_are_as_many_requests(wire) -> None:
    reader, writer = wire
    writer.write("\r\n".join(["GET /health HTTP/1.1", "host: x", *UPGRADES, "", ""]).encode() * 2000)
    assert [(await answer(reader))[0] for _ in range(2000)] == [200] * 2000


async def test_a_tunnel_is_not_made_and_its_bytes_are_no_requests(wire) -> None:
    reader, writer = wire
    writer.write(b"CONNECT host:1 HTTP/1.1\r\nhost: host:1\r\n\r\n" + HEALTH)
    status, headers, _ = await answer(reader)
    assert status == 404 and headers["connection"] == "close" and await reader.read() == b""


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/health?x=1", 200), ("http://x/health", 200), ("HTTP://X/health?x=1", 200),
        ("/%68ealth", 404), ("/health#part", 404), ("//health", 404), ("/health/", 404), ("/./health", 404),
        ("/v1/../health", 404), ("/health%3Fx", 404), ("/Health", 404), ("ftp://x/health", 404), ("*", 404),
        ("/v1/models/tiny", 200), ("/v1/models/t%69ny", 200), ("/v1/models%2Ftiny", 404), ("/v1/models/../models/tiny", 404),
        ("/v1/models/t%2569ny", 404),
    ],
)  # fmt: skip
async def test_targets_name_their_path_as_they_came(wire, target: str, status: int) -> None:
    """A proxy that forbids a path has compared these bytes. Only a model's name is decoded, once."""
    reader, writer = wire
    writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert (await answer(reader))[0] == status


async def test_a_head_that_does_not_arrive_ends_the_connection(dispatcher: ScriptedDispatcher) -> None:
    async with served(dispatcher, HttpSettings(body_s=0.1)) as url, opened(url) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\n")
        assert await reader.read() == b""


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nx: " + b"a" * 1000, b"\r\n" * 500])
async def test_a_head_that_trickles_in_has_no_more_time_than_one_that_stays_away(
    dispatcher: ScriptedDispatcher, head: bytes
) -> None:
    async with served(dispatcher, HttpSettings(body_s=0.1)) as url, opened(url) as (reader, writer):
        writer.write(HEALTH)
        assert (await answer(reader))[0] == 200
        ended = asyncio.create_task(reader.read())
        for byte in head:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
            if ended.done():
                return
        raise AssertionError("it came in for 10 s")


def test_who_does_not_read_the_last_answer_is_not_waited_for_for_ever() -> None:
    application, pipe = ByHand(), Pipe()
    connection = Connection(application, ConnectionLimits(1000, stall_s=5.0), Connections())
    connection.connection_made(pipe)
    connection.data_received(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    application.waiting.pop().reply(200, b"so little that the transport never says it is full")
    assert pipe.is_closing() and connection.deadline < math.inf
    connection.pause_writing()
    connection.resume_writing()
    assert connection.deadline < math.inf
    connection.expire()
    assert pipe.is_cut


async def test_an_idle_connection_is_closed_when_its_time_is_over(
    dispatcher: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pdcluster_router.frontend.server.ConnectionLimits",
        lambda *given, **named: ConnectionLimits(*given, idle_s=0.1, **named),
    )
    async with served(dispatcher) as url, opened(url) as (reader, writer):
        writer.write(HEALTH)
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_a_drain_ends_idle_connections_soon_and_says_so_on_busy_ones(dispatcher: ScriptedDispatcher) -> None:
    gate = asyncio.Event()
    dispatcher.script = lambda _: [Wait(gate), *says("done")]
    server = served(dispatcher)
    url = await server.__aenter__()
    async with opened(url) as (idle, _), opened(url) as (busy, writer):
        writer.write(request())
        await until(lambda: len(dispatcher.started) == 1)
        leaving = asyncio.create_task(server.__aexit__(None, None, None))
        assert await idle.read() == b""
        gate.set()
        status, headers, _ = await answer(busy)
        assert status == 200 and headers["connection"] == "close"
        await leaving


async def test_what_was_sent_before_its_client_could_know_of_the_drain_is_answered(
    dispatcher: ScriptedDispatcher,
) -> None:
    dispatcher.script = lambda _: says("done")
    server = served(dispatcher)
    url = await server.__aenter__()
    async with opened(url) as (idle, writer):
        writer.write(HEALTH)
        assert (await answer(idle))[0] == 200
        leaving = asyncio.create_task(server.__aexit__(None, None, None))
        await asyncio.sleep(0.02)
        writer.write(request())
        async with opened(url) as (late, later_writer):
            later_writer.write(request())
            for reader in (idle, late):
                status, headers, _ = await answer(reader)
                assert status == 200 and headers["connection"] == "close"
                assert await reader.read() == b""
        await leaving


async def test_a_client_that_reads_again_gets_all_that_it_left_unread(dispatcher: ScriptedDispatcher) -> None:
    """Far more than sockets and transports hold, so that the answer had to wait for its client."""
    dispatcher.max_len = 2**20
    words = (says("word " * 100, "length") * 1000)[:50_000]
    dispatcher.script = lambda _: words
    async with served(dispatcher) as url, opened(url) as (reader, writer):
        writer.write(
            request(json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": len(words)}).encode())
        )
        await until(lambda: len(dispatcher.ended) == 1)
        num_events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = tail + await reader.read(1 << 16)
            num_events += data.count(b"finish_reason") - tail.count(b"finish_reason")
            tail = data[-40:]
        assert num_events >= len(words)


async def test_a_client_that_is_too_far_behind_is_given_up(
    dispatcher: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdcluster_router.frontend.response.MAX_UNREAD_BYTES", 100_000)
    dispatcher.max_len = 2**20
    words = says("word " * 100, "length") * 1000
    dispatcher.script = lambda _: words
    async with served(dispatcher) as url, opened(url) as (_, writer):
        writer.write(
            request(json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": len(words)}).encode())
        )
        await until(lambda: dispatcher.cancelled)
    assert len(dispatcher.cancelled) == 1 and not dispatcher.ended


class Late(Connection):
    """Past its deadline, once. is_broken: what it does then fails."""

    def __init__(self, connections: Connections, *, is_broken: bool) -> None:
        super().__init__(ScriptedDispatcher(), ConnectionLimits(1, 1.0, 1.0), connections)  # type: ignore[arg-type]
        self.is_broken, self.deadline = is_broken, 0.0
        self.ends: list[str] = []
        connections.add(self)

    def expire(self) -> None:
        self.deadline = math.inf
        if self.is_broken:
            raise RuntimeError("a bug")
        self.ends.append("expired")

    def abort(self) -> None:
        self.ends.append("cut")


async def test_a_deadline_that_fails_keeps_no_other_from_passing() -> None:
    connections = Connections()
    late = [Late(connections, is_broken=number % 2 == 0) for number in range(8)]
    sweeping = asyncio.create_task(sweep(connections))
    try:
        await until(lambda: all(each.ends for each in late) or sweeping.done())
        again = Late(connections, is_broken=False)
        await until(lambda: again.ends or sweeping.done())
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
    assert [each.ends for each in [*late, again]] == [["cut"], ["expired"]] * 4 + [["expired"]]

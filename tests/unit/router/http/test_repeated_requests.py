"""Requests that repeat on one connection, or on several: each is parsed, limited and counted like the first."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import pytest
from answer_by_hand import ByHand
from hypothesis import given
from hypothesis import strategies as st
from scripted_dispatcher import MODEL

from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import router_metrics
from pdcluster_router.http import connection as http_connection
from pdcluster_router.http.connection import Connection, ConnectionLimits, Connections
from pdcluster_router.http.exchange import Exchange

Heard = tuple[str, str, dict[bytes, bytes], bytes, bool]


class Echo:
    """Implements http_connection.Application: tells what it heard, and answers at once."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.num_over = 0

    def begin(self, exchange: Exchange) -> None:
        if exchange.path == "/refused":
            exchange.reply(404, b"{}")

    def complete(self, exchange: Exchange) -> None:
        headers = {name: value for name, value in exchange.headers.items() if name != b"content-length"}
        self.heard.append((exchange.method, exchange.path, headers, exchange.take_body(), exchange.is_too_large))
        exchange.reply(200, b"{}")

    def over(self, exchange: Exchange) -> None:
        self.num_over += 1

    late = crowded = stalled = gone = stopping = over


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


def said(
    body: bytes, *headers: str, path: str = "/v1/completions", length: str | None = None, method: str = "POST"
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        *headers,
        f"Content-Length: {len(body) if length is None else length}",
        "a: b",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def opened(open_ones: Connections | None = None, max_body_bytes: int = 1000) -> tuple[Connection, Wire, Echo]:
    echo, wire = Echo(), Wire()
    connection = Connection(echo, ConnectionLimits(max_body_bytes), Connections() if open_ones is None else open_ones)
    connection.connection_made(wire)
    return connection, wire, echo


def test_two_lengths_are_refused_however_often_they_are_said() -> None:
    open_ones = Connections()
    for _ in range(3):
        connection, wire, echo = opened(open_ones)
        for _ in range(3):
            connection.data_received(said(b"a", "content-length: 1"))
        assert not echo.heard and wire.written.startswith(b"HTTP/1.1 400")


def test_a_repeated_request_has_the_limits_of_any_other() -> None:
    connection, wire, echo = opened(max_body_bytes=10)
    for body in (b"a", b"a", b"a", b"a" * 11, b"a"):
        connection.data_received(said(body))
    assert [heard[4] for heard in echo.heard] == [False, False, False, True, False] and wire.written.count(
        b" 200 "
    ) == 5


def test_a_request_that_is_refused_by_its_head_is_answered_once() -> None:
    connection, wire, echo = opened()
    for _ in range(5):
        connection.data_received(said(b"a", path="/refused"))
    assert wire.written.count(b" 404 ") == 5 == echo.num_over and not echo.heard


def test_a_connection_that_drains_takes_only_what_is_on_its_way() -> None:
    connection, wire, echo = opened()
    for _ in range(3):
        connection.data_received(said(b"a"))
    connection.drain()
    assert not wire.is_closed and connection.deadline <= monotonic() + http_connection.PARTING_S
    connection.data_received(said(b"a"))
    assert len(echo.heard) == 4 and wire.is_closed
    connection, wire, _ = opened()
    connection.drain()
    connection.expire()
    assert wire.is_closed


def test_empty_lines_between_requests_add_up_to_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients end a body with one. All that came since the last request counts, however many there were."""
    monkeypatch.setattr(http_connection, "MAX_HEAD_BYTES", 100)
    connection, wire, echo = opened()
    for _ in range(60):
        connection.data_received(said(b"a" * 200))
        connection.data_received(b"\r\n")
    assert len(echo.heard) == 60 and not wire.is_closed


async def test_every_request_is_identified_and_takes_a_place() -> None:
    dispatcher, key = ByHand(), "sk-acme-0001"
    places = Places(10, Tenants({"acme": Entry(keys=[key], max_requests=1), "other": Entry(keys=["sk-other-0001"])}))
    app, open_ones = create_app(dispatcher, HttpSettings(), router_metrics(), places), Connections()
    wires = []

    def ask(body: bytes, key: str = key, kind: str = "application/json") -> bytes:
        """What is answered on a connection of its own."""
        connection, wire = Connection(app, ConnectionLimits(1 << 20), open_ones), Wire()
        connection.connection_made(wire)
        for _ in range(3):
            connection.data_received(said(b"{", f"authorization: Bearer {key}", f"content-type: {kind}"))
        wire.written = b""
        connection.data_received(said(body, f"authorization: Bearer {key}", f"content-type: {kind}"))
        wires.append(wire)
        return wire.written

    prompt = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()
    for _ in range(3):
        assert b" 401 " in ask(prompt, "sk-nobody-0001") and b" 415 " in ask(prompt, kind="text/html")
        assert b" 400 " in ask(b"{") and places.num_taken == 0
    assert ask(prompt) == b"" and places.num_taken == 1
    assert b" 429 " in ask(prompt) and b"1 requests of tenant acme" in wires[-1].written
    assert ask(prompt, "sk-other-0001") == b"" and places.num_taken == 2
    assert len(dispatcher.sinks) == 2


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["/v1/completions", "/tokenize?a=b", "/refused"]),
        st.sampled_from(
            [
                (),
                ("X-Request-ID: me",),
                ("authorization: Bearer k", "content-type: application/json"),
                ("connection: keep-alive",),
            ]
        ),
        st.binary(max_size=12),
        st.sampled_from(["POST", "POST", "GET"]),
    ),
    max_size=12,
)


@given(REQUESTS, st.lists(st.integers(1, 60), max_size=20))
def test_pieces_and_whole_requests_come_to_the_same(
    requests: list[tuple[str, tuple[str, ...], bytes, str]], cuts: list[int]
) -> None:
    whole, _, at_once = opened()
    pieces, _, by_parts = opened()
    told = [said(body, *headers, path=path, method=method) for path, headers, body, method in requests]
    for data in told:
        whole.data_received(data)
    stream = b"".join(told)
    for cut in cuts:
        pieces.data_received(stream[:cut])
        stream = stream[cut:]
    if stream:
        pieces.data_received(stream)
    assert at_once.heard == by_parts.heard and at_once.num_over == by_parts.num_over == len(requests)

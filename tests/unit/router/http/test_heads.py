"""Heads that are known by their bytes: the same as parsing them, for whoever says the same again, and nobody else."""

from __future__ import annotations

import asyncio
import json

import pytest
from answer_by_hand import ByHand
from hypothesis import given
from hypothesis import strategies as st
from scripted_dispatcher import MODEL

from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import _sweep, router_metrics
from pdcluster_router.http import connection as http_connection
from pdcluster_router.http.connection import Connection, Connections, LineLimits
from pdcluster_router.http.exchange import Exchange, ParsedHead
from pdcluster_router.http.heads import KEPT_S, MAX_BYTES, MAX_HEADS, Heads, Known, taken_apart

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

    late = stalled = gone = stopping = over


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
    connection = Connection(echo, LineLimits(max_body_bytes), Connections() if open_ones is None else open_ones)
    connection.connection_made(wire)
    return connection, wire, echo


def test_a_head_is_known_from_its_third_time_on_whatever_its_length() -> None:
    open_ones = Connections()
    connection, wire, echo = opened(open_ones)
    for body, num_known in ((b"a", 0), (b"bb", 1), (b"c" * 123, 1), (b"dd", 1)):
        connection.data_received(said(body))
        assert len(open_ones.heads) == num_known
    assert [heard[3] for heard in echo.heard] == [b"a", b"bb", b"c" * 123, b"dd"]
    assert len({str(heard[:3]) for heard in echo.heard}) == 1 and wire.written.count(b" 200 ") == 4 == echo.num_over
    other, _, there = opened(open_ones)
    other.data_received(said(b"e"))
    assert there.heard[0][2:4] == (echo.heard[0][2], b"e"), "what one connection learned holds for the others"


@pytest.mark.parametrize(
    "headers",
    [
        ("connection: close",),
        ("expect: 100-continue",),
        ("connection: upgrade", "upgrade: h2c"),
        ("transfer-encoding: chunked",),
    ],
    ids=lambda headers: headers[0],
)
def test_a_head_that_means_more_than_its_request_is_parsed_each_time(headers: tuple[str, ...]) -> None:
    open_ones = Connections()
    for _ in range(3):
        connection, _, _ = opened(open_ones)
        for _ in range(3):
            connection.data_received(said(b"a", *headers))
    assert not open_ones.heads


LIKE_IT = ParsedHead("POST", "/v1/completions", {b"content-length": b"1"}, True, False)
WRONG_LENGTHS = ("2", "0", "+1", "1 ", "0x1", "1, 1", "9999999999999", "", "\u0661", "0000000000001")


@pytest.mark.parametrize("length", WRONG_LENGTHS)
def test_a_length_that_is_not_the_bodys_is_left_to_the_parser(length: str) -> None:
    apart = taken_apart(said(b"a"))
    assert apart is not None
    assert taken_apart(said(b"a", length=length)) is None is Known(apart[0], LIKE_IT).body_of(said(b"a", length=length))


@given(
    of=st.tuples(st.sampled_from([(), ("x: 1",), ("x: 12",)]), st.binary(max_size=12)),
    headers=st.sampled_from([(), ("x: 1",), ("x: 12",), ("x: 1", "content-length: 1"), ("x: 1", "y:")]),
    body=st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"\r\n\r\n", b"\r\ncontent-length: 1\r\n\r\n"]),
        st.integers(0, 2000).map(bytes),
    ),
    length=st.one_of(st.none(), st.sampled_from(WRONG_LENGTHS), st.integers(0, 20).map(str)),
    cut=st.integers(0, 4),
)
def test_what_a_connection_said_last_is_found_as_anything_that_is_known(
    of: tuple[tuple[str, ...], bytes], headers: tuple[str, ...], body: bytes, length: str | None, cut: int
) -> None:
    known = taken_apart(said(of[1], *of[0]))
    assert known is not None
    data = said(body, *headers, length=length)
    data = data[: len(data) - cut]
    apart = taken_apart(data)
    assert Known(known[0], LIKE_IT).body_of(data) == (None if apart is None or apart[0] != known[0] else apart[1])


def test_two_lengths_are_refused_however_often_they_are_said() -> None:
    open_ones = Connections()
    for _ in range(3):
        connection, wire, echo = opened(open_ones)
        for _ in range(3):
            connection.data_received(said(b"a", "content-length: 1"))
        assert not echo.heard and wire.written.startswith(b"HTTP/1.1 400") and not open_ones.heads


def test_what_only_looks_like_a_length_is_no_length() -> None:
    heads = Heads()
    apart = taken_apart(said(b"a"))
    assert apart is not None
    heads.learn(apart[0], ParsedHead("POST", "/", {b"content-length": b"7"}, True, False), 1)
    heads.learn(apart[0], ParsedHead("POST", "/", {}, True, False), 1)
    heads.learn(apart[0], ParsedHead("GET", "/", {b"content-length": b"1"}, True, False), 1)
    heads.learn(apart[0], ParsedHead("POST", "/", {b"content-length": b"1"}, False, False), 1)
    heads.learn(apart[0], ParsedHead("POST", "/", {b"content-length": b"1"}, True, True), 1)
    assert not heads


def test_a_known_head_has_the_limits_of_any_other() -> None:
    connection, wire, echo = opened(max_body_bytes=10)
    for body in (b"a", b"a", b"a", b"a" * 11, b"a"):
        connection.data_received(said(body))
    assert [heard[4] for heard in echo.heard] == [False, False, False, True, False] and wire.written.count(
        b" 200 "
    ) == 5


def test_one_that_is_refused_by_its_head_is_answered_once() -> None:
    connection, wire, echo = opened()
    for _ in range(5):
        connection.data_received(said(b"a", path="/refused"))
    assert wire.written.count(b" 404 ") == 5 == echo.num_over and not echo.heard


def test_a_connection_that_drains_takes_no_known_head_either() -> None:
    connection, wire, _ = opened()
    for _ in range(3):
        connection.data_received(said(b"a"))
    connection.drain()
    assert wire.is_closed


def test_what_is_known_is_bounded() -> None:
    heads = Heads()
    for number in range(MAX_HEADS + 5):
        apart = taken_apart(said(b"a", f"x: {number}"))
        assert apart is not None
        heads.learn(apart[0], ParsedHead("POST", "/", {b"content-length": b"1"}, True, False), 1)
    assert len(heads) == 5
    assert taken_apart(said(b"a", "x: " + "y" * MAX_BYTES)) is None


def test_a_key_is_not_kept_long_after_its_client_left() -> None:
    open_ones = Connections()
    connection, _, echo = opened(open_ones)
    open_ones.heads.forget(now=100.0)
    for _ in range(3):
        connection.data_received(said(b"a", "authorization: Bearer key-of-acme"))
    open_ones.heads.forget(now=99.0 + KEPT_S)
    assert len(open_ones.heads) == 1
    connection.connection_lost(None)
    open_ones.heads.forget(now=100.0 + KEPT_S)
    assert not open_ones.heads and len(echo.heard) == 3


def test_a_connection_that_stays_learns_again_what_was_forgotten() -> None:
    open_ones = Connections()
    connection, wire, echo = opened(open_ones)
    open_ones.heads.forget(now=100.0)
    for _ in range(5):
        connection.data_received(said(b"a"))
    (first,) = open_ones.heads.values()
    open_ones.heads.forget(now=100.0 + KEPT_S)
    assert not first.is_kept
    for _ in range(2):
        connection.data_received(said(b"a"))
    (second,) = open_ones.heads.values()
    assert second is not first and second.is_kept and len(echo.heard) == 7 == wire.written.count(b" 200 ")


async def test_who_looks_at_deadlines_has_old_heads_forgotten() -> None:
    open_ones = Connections()
    connection, wire, _ = opened(open_ones)
    for _ in range(3):
        connection.data_received(said(b"a"))
    assert open_ones.heads
    sweeper = asyncio.create_task(_sweep(open_ones))
    async with asyncio.timeout(10):
        while open_ones.heads:
            await asyncio.sleep(0.01)
    sweeper.cancel()
    assert not wire.is_closed


def test_empty_lines_between_known_requests_add_up_to_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients end a body with one. All that came since the last request counts, however many there were."""
    monkeypatch.setattr(http_connection, "MAX_HEAD_BYTES", 100)
    connection, wire, echo = opened()
    for _ in range(60):
        connection.data_received(said(b"a" * 200))
        connection.data_received(b"\r\n")
    assert len(echo.heard) == 60 and not wire.is_closed


async def test_who_says_a_known_head_is_in_the_same_name_and_has_no_more_places_than_others() -> None:
    dispatcher, key = ByHand(), "sk-acme-0001"
    places = Places(10, Tenants({"acme": Entry(keys=[key], max_requests=1), "other": Entry(keys=["sk-other-0001"])}))
    app, open_ones = create_app(dispatcher, HttpSettings(), router_metrics(), places), Connections()
    wires = []

    def ask(body: bytes, key: str = key, kind: str = "application/json") -> bytes:
        """What is answered on a connection of its own."""
        connection, wire = Connection(app, LineLimits(1 << 20), open_ones), Wire()
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
        assert b" 400 " in ask(b"{") and places.num_taken == 0 and len(open_ones.heads) == 3
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
    """In pieces nothing is known by its bytes, mostly; whole, all that comes again is."""
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

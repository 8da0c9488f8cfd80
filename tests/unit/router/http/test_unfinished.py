"""Memory of requests that have not arrived whole: bounded over all and for each tenant, and given back."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from dataclasses import dataclass, field

import pytest
from answer_by_hand import ByHand

from pdcluster.core.errors import Overloaded
from pdcluster_router.core.tenants import Entry, Tenant, Tenants
from pdcluster_router.frontend.app import App, HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import router_metrics
from pdcluster_router.http.connection import Connection, ConnectionLimits, Connections
from pdcluster_router.http.exchange import Exchange
from pdcluster_router.http.unfinished import GRACE_S, HEADS_BYTES, UnfinishedRequests

LIMIT, BODY = 64 << 20, 8 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
NEXT = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Sent(asyncio.Transport):
    """To a client that reads everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


@dataclass
class Server:
    """Connections of one application, without sockets."""

    app: object
    now: float = 100.0
    is_shared: bool = False
    limit: int = LIMIT
    opened: list[tuple[Connection, Sent]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished = UnfinishedRequests(self.limit, is_shared=self.is_shared, clock=lambda: self.now)
        self.connections = Connections(self.unfinished)

    def connect(self) -> tuple[Connection, Sent]:
        connection, sent = Connection(self.app, ConnectionLimits(BODY), self.connections), Sent()  # type: ignore[arg-type]
        connection.connection_made(sent)
        self.opened.append((connection, sent))
        return connection, sent

    def send(self, data: bytes, size: int = 256 << 10) -> Sent:
        """What a client on a connection of its own sends and reads."""
        connection, sent = self.connect()
        for at in range(0, len(data), size):
            if not sent.is_closed:
                connection.data_received(data[at : at + size])
        return sent


class Keeper:
    """Implements connection.Application: keeps bodies."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def begin(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        name = exchange.headers.get(b"x-tenant")
        exchange.tenant = None if name is None else Tenant(name.decode())

    def complete(self, exchange: Exchange) -> None:
        exchange.take_body()
        exchange.reply(200, b"")

    def crowded(self, exchange: Exchange) -> None:
        exchange.reply(429, b"")

    def over(self, exchange: Exchange) -> None:
        pass

    late = stalled = gone = stopping = over

    @property
    def kept(self) -> int:
        return sum(len(part) for exchange in self.exchanges for part in exchange.parts)


def post(tenant: str, size: int = BODY) -> bytes:
    return HEAD + b"x-tenant: %b\r\ncontent-length: %d\r\n\r\n" % (tenant.encode(), size)


def test_bodies_a_byte_short_of_whole_are_bounded() -> None:
    keeper = Keeper()
    server = Server(keeper)
    sent = [server.send(post("a") + bytes(BODY - 1)) for _ in range(30)]
    assert keeper.kept <= LIMIT and server.unfinished.num_bytes <= LIMIT
    assert [b" 429 " in each.written for each in sent].count(False) == 7, "as many as there is room for"
    assert not any(each.is_closed for each in sent), "the rest of a refused body is dropped, so that its answer is read"


def test_a_body_that_stands_still_makes_room_for_one_that_comes() -> None:
    keeper = Keeper()
    server = Server(keeper)
    idle = [server.send(post("a") + bytes(BODY - 1)) for _ in range(7)]
    assert b" 429 " in server.send(post("a") + bytes(BODY)).written
    server.now += GRACE_S
    assert b" 200 " in server.send(post("a") + bytes(BODY)).written
    assert [b" 429 " in each.written for each in idle] == [True] + [False] * 6, "the oldest one"


def test_one_tenants_bodies_leave_room_for_anothers() -> None:
    keeper = Keeper()
    server = Server(keeper, is_shared=True)
    for _ in range(30):
        server.send(post("greedy") + bytes(BODY - 1))
    assert b" 200 " in server.send(post("modest") + bytes(BODY)).written


def test_unfinished_heads_are_bounded_and_take_no_room_from_bodies() -> None:
    server = Server(Keeper())
    for _ in range(600):
        server.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 60_000)
    assert server.unfinished.num_bytes <= HEADS_BYTES
    open_ones = [sent for _, sent in server.opened if not sent.is_closed]
    assert 30 < len(open_ones) < 100
    assert b" 200 " in server.send(post("a") + bytes(BODY)).written
    assert b" 200 " in server.send(NEXT).written
    refused = server.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 60_000)
    assert b" 503 " in refused.written and b"whole" in refused.written and refused.is_closed
    server.now += GRACE_S
    connection, late = server.connect()
    connection.data_received(NEXT[:20])
    connection.data_received(NEXT[20:])
    assert b" 200 " in late.written


def test_whole_heads_without_their_bodies_are_counted() -> None:
    server = Server(Keeper())
    for _ in range(300):
        server.send(HEAD + b"x: " + b"a" * 60_000 + b"\r\ncontent-length: 5\r\n\r\n")
    assert server.unfinished.num_bytes > HEADS_BYTES // 2
    assert len([sent for _, sent in server.opened if b" 429 " not in sent.written]) < 150


def test_whole_requests_are_not_counted_and_what_waits_is() -> None:
    keeper = Keeper()
    server = Server(keeper)
    server.send(post("a", 1000) + bytes(1000))
    assert server.unfinished.num_bytes == 0
    keeper.complete = lambda exchange: None  # type: ignore[method-assign]
    connection, _ = server.connect()
    connection.data_received(NEXT)
    assert server.unfinished.num_bytes == 0
    for _ in range(3):
        connection.data_received(NEXT * 2000)
    assert server.unfinished.num_bytes > 3 * 2000 * len(NEXT)
    connection.connection_lost(None)
    assert server.unfinished.num_bytes == 0


def num_exchanges() -> int:
    """That live."""
    gc.collect()
    return sum(type(each) is Exchange for each in gc.get_objects())


def test_requests_behind_one_that_runs_are_bounded_over_all_connections() -> None:
    """Small ones, which cost much more than their bytes once they are parsed."""
    keeper = Keeper()
    server = Server(keeper)
    keeper.complete = lambda exchange: None  # type: ignore[method-assign]
    for _ in range(100):
        connection, _ = server.connect()
        connection.data_received(NEXT)
        connection.data_received(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 600)
    assert server.unfinished.num_bytes <= HEADS_BYTES and 0 < num_exchanges() * 512 <= HEADS_BYTES


def test_requests_in_the_read_that_ends_a_body_are_counted_as_others() -> None:
    keeper = Keeper()
    server = Server(keeper)
    keeper.complete = lambda exchange: None  # type: ignore[method-assign]
    connection, _ = server.connect()
    connection.data_received(HEAD + b"content-length: 2\r\n\r\na")
    connection.data_received(b"a" + b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 9000)
    assert num_exchanges() < 1000 and server.unfinished.num_bytes >= 512 * num_exchanges()


@pytest.mark.parametrize("data", [NEXT[:-2] + b"x: " + b"a" * 60_000, post("a") + bytes(100_000), NEXT])
def test_a_connection_that_ended_is_gone_with_all_it_held(data: bytes) -> None:
    """Routers collect garbage seldom."""
    gc.disable()
    try:
        keeper = Keeper()
        server = Server(keeper)
        server.send(data)
        connection, _ = server.opened.pop()
        connection.connection_lost(None)
        keeper.exchanges.clear()
        ended = weakref.ref(connection)
        del connection
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(5))
def test_all_is_given_back(seed: int) -> None:
    generator, keeper = random.Random(seed), Keeper()
    server = Server(keeper, is_shared=True, limit=1 << 20)
    requests = [post(name, size) + bytes(size) for name in "ab" for size in (0, 10, 100_000)] + [NEXT]
    for _ in range(300):
        if generator.random() < 0.3 or not server.opened:
            server.connect()
        at = generator.randrange(len(server.opened))
        connection, sent = server.opened[at]
        data = generator.choice(requests)
        connection.data_received(data[: generator.randint(1, len(data))])
        server.now += generator.choice((0.0, 0.1, GRACE_S))
        if sent.is_closed or generator.random() < 0.1:
            del server.opened[at]
            connection.connection_lost(None)
        server.unfinished.check_integrity()
    for connection, _ in server.opened:
        connection.connection_lost(None)
    server.unfinished.check_integrity()
    assert server.unfinished.num_bytes == 0


def app_of(places: Places) -> App:
    return create_app(ByHand(), HttpSettings(), router_metrics(), places)


def test_slow_bodies_keep_no_place_from_a_whole_request() -> None:
    places = Places(2)
    server = Server(app_of(places))
    for _ in range(5):
        server.send(HEAD + b"content-length: 100\r\n\r\n{")
    assert places.num_taken == 0
    whole = server.send(HEAD + b"content-length: 1\r\n\r\n{")
    assert b" 400 " in whole.written, "it was read: it is no JSON"
    assert places.num_taken == 0


def test_the_key_is_checked_before_the_body_and_its_tenant_is_charged() -> None:
    places = Places(2, Tenants({name: Entry(keys=[f"sk-{name}-key"]) for name in ("acme", "other")}))
    server = Server(app_of(places), is_shared=True, limit=4 << 20)
    assert b" 401 " in server.send(HEAD + b"content-length: 100\r\n\r\n").written

    def keyed(name: str) -> Sent:
        head = HEAD + b"authorization: Bearer sk-%b-key\r\ncontent-length: 1000001\r\n\r\n" % name.encode()
        return server.send(head + bytes(1_000_000))

    told = [keyed("acme").written for _ in range(5)]
    assert told[0] == b"" and b" 429 " in told[4] and b"router.arriving_bytes" in told[4]
    assert keyed("other").written == b""


def test_a_refusal_for_want_of_room_is_one_of_load() -> None:
    error = Places(1).no_room_for_body(None)
    assert isinstance(error, Overloaded) and error.reason == "arriving"

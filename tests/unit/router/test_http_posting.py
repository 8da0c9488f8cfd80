"""Parts of a streamed answer share the writes of one turn of the loop."""

from __future__ import annotations

import asyncio

from pdcluster_router.http_connection import MOST_POSTED_BYTES, Application, Connection, Connections, LineLimits
from pdcluster_router.http_exchange import NO_BUFFERING, Exchange

ASKED = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"


class Wire:
    """A transport that keeps each write apart."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Streaming(Application):
    """Starts a stream for each request, and lets the test go on with it."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None

    def complete(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.start(200, NO_BUFFERING)
        exchange.write(b"first")

    def begin(self, exchange: Exchange) -> None:
        pass

    def over(self, exchange: Exchange) -> None:
        pass

    def gone(self, exchange: Exchange) -> None:
        pass


def opened() -> tuple[Connection, Wire, Exchange]:
    app, wire = Streaming(), Wire()
    connection = Connection(app, LineLimits(1 << 20), Connections())
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(ASKED)
    assert app.exchange is not None
    return connection, wire, app.exchange


async def turn() -> None:
    await asyncio.sleep(0)


async def test_the_head_goes_with_the_first_part() -> None:
    _, wire, _ = opened()
    assert wire.writes == []
    await turn()
    assert len(wire.writes) == 1 and wire.writes[0].startswith(b"HTTP/1.1 200") and wire.writes[0].endswith(b"5\r\nfirst\r\n")


async def test_parts_of_one_turn_are_one_write_and_those_of_the_next_another() -> None:
    _, wire, exchange = opened()
    await turn()
    exchange.write(b"a")
    exchange.write(b"b")
    await turn()
    exchange.write(b"c")
    await turn()
    assert wire.writes[1:] == [b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n"]


async def test_the_last_part_goes_at_once_behind_what_was_posted() -> None:
    _, wire, exchange = opened()
    exchange.write(b"z", last=True)
    assert len(wire.writes) == 1 and wire.writes[0].endswith(b"5\r\nfirst\r\n1\r\nz\r\n0\r\n\r\n")
    await turn()
    assert len(wire.writes) == 1


async def test_much_is_sent_at_once_so_that_the_transport_can_say_that_nobody_reads() -> None:
    _, wire, exchange = opened()
    exchange.write(bytes(MOST_POSTED_BYTES))
    assert len(wire.writes) == 1


async def test_what_was_posted_is_sent_before_the_connection_is_closed() -> None:
    connection, wire, _ = opened()
    connection.close()
    assert wire.is_closed and wire.writes[0].endswith(b"5\r\nfirst\r\n")
    await turn()
    assert len(wire.writes) == 1


async def test_nothing_is_written_to_a_connection_that_is_lost() -> None:
    connection, wire, exchange = opened()
    connection.connection_lost(None)
    exchange.write(b"more")
    await turn()
    assert wire.writes == []

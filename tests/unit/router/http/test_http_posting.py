"""Parts of a streamed answer share the writes of one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdcluster_router.http.connection import MOST_POSTED_BYTES, Application, Connection, ConnectionLimits, Connections
from pdcluster_router.http.exchange import NO_BUFFERING, Exchange

ASKED = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"


class Wire:
    """A transport that keeps each write apart. on_write: happens with the next one, before it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False
        self.on_write: Callable[[], object] | None = None

    def write(self, data: bytes) -> None:
        if self.on_write is not None:
            happens, self.on_write = self.on_write, None
            happens()
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


def opened(open_ones: Connections | None = None) -> tuple[Connection, Wire, Exchange]:
    app, wire = Streaming(), Wire()
    connection = Connection(app, ConnectionLimits(1 << 20), Connections() if open_ones is None else open_ones)
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
    assert (
        len(wire.writes) == 1
        and wire.writes[0].startswith(b"HTTP/1.1 200")
        and wire.writes[0].endswith(b"5\r\nfirst\r\n")
    )


async def test_parts_of_one_turn_are_one_write_and_those_of_the_next_another() -> None:
    _, wire, exchange = opened()
    await turn()
    exchange.write(b"a")
    exchange.write(b"b")
    await turn()
    exchange.write(b"c")
    await turn()
    assert wire.writes[1:] == [b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n"]


async def test_each_connection_sends_its_own_parts() -> None:
    open_ones = Connections()
    streams = [opened(open_ones) for _ in range(3)]
    await turn()
    for number, (_, _, exchange) in enumerate([*streams, *streams[:2]]):
        exchange.write(b"%d" % number)
    streams[1][0].connection_lost(None)
    await turn()
    assert [wire.writes[1:] for _, wire, _ in streams] == [[b"1\r\n0\r\n1\r\n3\r\n"], [], [b"1\r\n2\r\n"]]


async def test_what_is_said_while_another_writes_comes_behind_what_was_posted() -> None:
    open_ones = Connections()
    streams = [opened(open_ones) for _ in range(3)]
    await turn()
    for _, _, exchange in streams:
        exchange.write(b"a")
    streams[2][1].on_write = lambda: [exchange.write(b"b") for _, _, exchange in streams]
    await turn()
    await turn()
    assert [b"".join(wire.writes[1:]) for _, wire, _ in streams] == [b"1\r\na\r\n1\r\nb\r\n"] * 3


async def test_a_write_that_fails_keeps_nobody_elses_parts() -> None:
    def fail() -> None:
        raise RuntimeError("the handler is closed")

    open_ones = Connections()
    streams = [opened(open_ones) for _ in range(3)]
    await turn()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    failures: list[BaseException] = []
    streams[1][1].on_write = fail
    for _, _, exchange in streams:
        exchange.write(b"a")
    await turn()
    for _ in range(2):
        streams[0][2].write(b"b")
        await turn()
    assert len(failures) == 1
    assert streams[0][1].writes[1:] == [b"1\r\na\r\n1\r\nb\r\n", b"1\r\nb\r\n"]
    assert streams[2][1].writes[1:] == [b"1\r\na\r\n"]


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

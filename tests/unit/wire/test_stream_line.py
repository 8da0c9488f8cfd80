"""A line over the loop's own sockets, at whose other end is libzmq, or somebody who does not behave. What links say
over it: `test_links`."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from pdcluster.wire import stream_line
from pdcluster.wire.link_socket import DOWN, REFUSED
from pdcluster.wire.sockets import CLUSTER_KEY_BYTES, WireSettings, open_router
from pdcluster.wire.stream_line import COPIED_BYTES, MAX_WAITING_BYTES, StreamLine
from pdcluster.wire.zmtp import GREETING, framed

Context = zmq.Context[zmq.Socket[bytes]]
PEER_READY = framed(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER", 4)
SETTINGS = WireSettings(lease_s=20.0)


class Caller:
    """A line and all that it told."""

    def __init__(self, address: str, settings: WireSettings = SETTINGS) -> None:
        self.frames: list[bytes] = []
        self.events: list[str] = []
        self.takes = True
        self.line = StreamLine(address, settings, self.take, self.look)

    def take(self) -> None:
        while self.takes and (frame := self.line.take()) is not None:
            self.frames.append(frame)

    def look(self) -> None:
        self.events += self.line.happened()


async def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


class Zmq:
    """libzmq's end."""

    def __init__(self, context: Context, settings: WireSettings = SETTINGS) -> None:
        self.socket, self.address = open_router(context, "127.0.0.1:0", settings)
        self.identity = b""

    def heard(self) -> list[bytes]:
        found = []
        while self.socket.poll(0):
            self.identity, frame = self.socket.recv_multipart()
            found.append(frame)
        return found


@pytest.fixture
def far(context: Context) -> Iterator[Zmq]:
    far = Zmq(context)
    yield far
    far.socket.close(0)


@pytest.fixture
async def caller(far: Zmq) -> AsyncIterator[Caller]:
    caller = Caller(far.address)
    yield caller
    caller.line.close()


class Silent:
    """A listener of plain bytes."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.heard = bytearray()
        self.is_at_end = False
        self.address = ""

    @classmethod
    async def start(cls) -> "Silent":
        silent = cls()
        silent._server = await asyncio.start_server(silent._serve, "127.0.0.1", 0)
        silent.address = f"127.0.0.1:{silent._server.sockets[0].getsockname()[1]}"
        return silent

    _server: asyncio.Server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard += data
        self.is_at_end = True
        writer.close()

    async def close(self) -> None:
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        await self._server.wait_closed()


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    silent = await Silent.start()
    yield silent
    await silent.close()


@pytest.mark.parametrize("size", [0, 1, 255, 256, COPIED_BYTES, COPIED_BYTES + 1, 5 << 20])
async def test_frames_of_any_size_go_both_ways(far: Zmq, caller: Caller, size: int) -> None:
    frame = bytes(number % 251 for number in range(1000)) * (size // 1000 + 1)
    sent = [frame[:size], b"next"]
    assert all(caller.line.send(each) for each in sent)  # before there is a connection
    heard: list[bytes] = []
    await until(lambda: heard.extend(far.heard()) or len(heard) == 2)
    assert all(caller.line.send(each) for each in sent)
    await until(lambda: heard.extend(far.heard()) or len(heard) == 4)
    assert heard == sent * 2
    for each in sent:
        far.socket.send_multipart((far.identity, each))
    await until(lambda: len(caller.frames) == 2)
    assert caller.frames == sent and not caller.events


async def test_it_calls_again_until_somebody_listens(context: Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    caller = Caller(f"127.0.0.1:{port}")
    caller.line.send(b"said before")
    await until(lambda: caller.events)
    assert set(caller.events) == {REFUSED}
    late, _ = open_router(context, f"127.0.0.1:{port}", SETTINGS)
    await until(lambda: late.poll(0))
    assert late.recv_multipart()[1] == b"said before"
    caller.line.close()
    late.close(0)


async def test_the_end_of_the_connection_is_told_once(silent: Silent) -> None:
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY + framed(b"last words"))
    await silent.writers[0].drain()
    await until(lambda: caller.frames)
    silent.writers[0].transport.abort()
    await until(lambda: caller.events)
    await asyncio.sleep(0.1)  # two attempts would have fitted
    assert caller.events == [DOWN] and caller.frames == [b"last words"] and len(silent.writers) == 1
    assert caller.line.happened() == []
    caller.line.close()


async def test_nothing_is_told_after_it_was_closed(silent: Silent) -> None:
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    caller.line.close()
    caller.line.close()
    await until(lambda: silent.is_at_end)
    await asyncio.sleep(0.05)
    assert not caller.events and not caller.line.send(b"late") and caller.line.take() is None


async def test_what_was_said_last_leaves_before_the_end(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it than the kernel takes at once; and that nothing is left to do for it a while later."""
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: failures.append(report))
    monkeypatch.setattr(stream_line, "CLOSING_S", 0.2)
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY)
    await until(lambda: caller.line._is_open)
    caller.line.send(bytes(20 << 20))
    caller.line.close()
    await until(lambda: silent.is_at_end)
    assert len(silent.heard) > 20 << 20
    await asyncio.sleep(0.4)
    assert not failures


async def test_who_does_not_read_keeps_a_closed_connection_for_a_while_only(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_line, "CLOSING_S", 0.05)
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY)
    await until(lambda: caller.line._is_open)
    silent.writers[0].transport.pause_reading()  # type: ignore[attr-defined]
    caller.line.send(bytes(20 << 20))
    caller.line.close()
    await until(lambda: caller.line._transport is None)
    silent.writers[0].transport.resume_reading()  # type: ignore[attr-defined]
    await until(lambda: silent.is_at_end)
    assert len(silent.heard) < 20 << 20


async def test_calling_ends_with_the_line(silent: Silent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    callers = [Caller(silent.address), Caller(nobody), Caller(nobody)]
    await until(lambda: callers[2].events)
    for caller in callers:
        caller.line.close()
    await asyncio.sleep(0.02)
    assert all(caller.line._calling.done() for caller in callers)


async def test_an_attempt_takes_no_longer_than_a_lease() -> None:
    """Its connection is neither made nor refused: the queue of who listens is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        caller = Caller(f"127.0.0.1:{full.getsockname()[1]}", WireSettings(heartbeat_s=0.05, lease_s=0.2))
        await until(lambda: caller.events)
        assert set(caller.events) == {REFUSED} and "in time" in caller.line.why
        caller.line.close()
        for filler in fillers:
            filler.close()


async def test_what_its_owner_cannot_stand_costs_no_connection(far: Zmq) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: failures.append(report["exception"]))
    caller = Caller(far.address)

    def break_down() -> None:
        raise ValueError("not handled")

    caller.line._wake = break_down
    caller.line.send(b"hello")
    heard: list[bytes] = []
    await until(lambda: heard.extend(far.heard()) or heard)
    far.socket.send_multipart((far.identity, b"first"))
    await until(lambda: failures)
    caller.line._wake = caller.take
    far.socket.send_multipart((far.identity, b"second"))
    await until(lambda: len(caller.frames) == 2)
    assert [type(failure) for failure in failures] == [ValueError] and not caller.events
    caller.line.close()


async def test_what_went_wrong_once_is_not_told_of_the_next_connection(context: Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    caller = Caller(f"127.0.0.1:{port}")
    await until(lambda: caller.events)
    assert caller.line.why
    late, _ = open_router(context, f"127.0.0.1:{port}", SETTINGS)
    await until(lambda: caller.line._is_open)
    assert not caller.line.why
    caller.line.close()
    late.close(0)


async def test_a_peer_that_wants_encryption_is_told_of(context: Context) -> None:
    locked = Zmq(context, dataclasses.replace(SETTINGS, cluster_key=bytes(CLUSTER_KEY_BYTES)))
    caller = Caller(locked.address)
    await until(lambda: DOWN in caller.events)
    assert "cluster key" in caller.line.why
    caller.line.close()
    locked.socket.close(0)


async def test_who_does_not_speak_the_protocol_is_hung_up_on(silent: Silent) -> None:
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    silent.writers[0].write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await until(lambda: silent.is_at_end and caller.events)
    assert caller.events == [DOWN] and "does not speak ZMTP" in caller.line.why and not caller.frames
    caller.line.close()


async def test_who_no_longer_speaks_it_is_hung_up_on_and_told_of(
    silent: Silent, caplog: pytest.LogCaptureFixture
) -> None:
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY + framed(b"good") + framed(b"of two", 1))
    await until(lambda: silent.is_at_end and caller.events)
    assert caller.events == [DOWN] and caller.frames == [b"good"] and not caller.line.send(b"more")
    assert silent.address in caplog.text and "more than one part" in caplog.text
    caller.line.close()


async def test_a_peer_that_does_not_read_gets_no_more_than_a_bound(silent: Silent) -> None:
    caller = Caller(silent.address, dataclasses.replace(SETTINGS, high_water=4))
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY)
    caller.line.send(b"hello")
    await until(lambda: silent.heard.endswith(framed(b"hello")))
    silent.writers[0].transport.pause_reading()  # type: ignore[attr-defined]
    frame, sent = bytes(1 << 20), 0
    while caller.line.send(frame):
        sent += 1
        await asyncio.sleep(0)
        assert sent < 100  # the kernel keeps some
    silent.heard.clear()
    silent.writers[0].transport.resume_reading()  # type: ignore[attr-defined]
    await until(lambda: caller.line.send(b"again"))
    await until(lambda: silent.heard.endswith(framed(b"again")))
    assert len(silent.heard) == sent * len(framed(frame)) + len(framed(b"again"))
    caller.line.close()


async def test_a_peer_that_says_nothing_gets_no_more_than_a_bound(silent: Silent) -> None:
    caller = Caller(silent.address, dataclasses.replace(SETTINGS, high_water=10**9))
    frame, sent = bytes(4 << 20), 0
    while caller.line.send(frame):
        sent += 1
    assert sent == MAX_WAITING_BYTES // len(frame)
    caller.line.close()


async def test_what_is_not_taken_makes_the_other_end_wait(silent: Silent) -> None:
    caller = Caller(silent.address, dataclasses.replace(SETTINGS, high_water=4))
    caller.takes = False
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY)
    for _ in range(64):
        silent.writers[0].write(framed(bytes(1 << 20)))
    transport, left = silent.writers[0].transport, -1
    while transport.get_write_buffer_size() != left:
        left = transport.get_write_buffer_size()
        await asyncio.sleep(0.3)
    assert left > 16 << 20 and len(caller.line._frames) < 32
    caller.takes = True
    caller.take()
    await until(lambda: len(caller.frames) == 64)
    caller.line.close()


async def test_who_does_not_read_gets_no_answers_to_pings(silent: Silent) -> None:
    caller = Caller(silent.address, dataclasses.replace(SETTINGS, high_water=1))
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY)
    await until(lambda: caller.line._is_open)
    silent.writers[0].transport.pause_reading()  # type: ignore[attr-defined]
    while caller.line.send(bytes(1 << 20)):
        await asyncio.sleep(0)
    transport = caller.line._transport
    assert transport is not None
    waiting = transport.get_write_buffer_size()
    for _ in range(100):
        silent.writers[0].write(framed(b"\x04PING\0\0", 4) * 1000)
    silent.writers[0].write(framed(b"last"))
    await until(lambda: caller.frames)
    assert transport.get_write_buffer_size() <= waiting
    caller.line.close()


async def test_a_ping_of_the_protocol_is_answered(silent: Silent) -> None:
    caller = Caller(silent.address)
    await until(lambda: silent.writers)
    silent.writers[0].write(GREETING + PEER_READY + framed(b"\x04PING\0\x0ahere", 4))
    await until(lambda: silent.heard.endswith(framed(b"\x04PONGhere", 4)))
    assert not caller.frames
    caller.line.close()

"""A line over a TCP socket of the running event loop: what a router's links speak over where nothing is encrypted
(`zmtp` says the bytes).

libzmq's own sockets have a thread, and cost a busy router two wake-ups and a system call or two for each frame; here a
frame is what a read of the loop brought, and a write that the loop shares with all others of its turn. Nobody polls it:
`wake` is called in the loop when frames came, `on_connection` when something became of the connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from pdcluster.core.errors import ProtocolError
from pdcluster.wire.address import parse_address
from pdcluster.wire.batch import MAX_BATCH_BYTES
from pdcluster.wire.link_socket import DOWN, REFUSED
from pdcluster.wire.sockets import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, RECONNECT_S, WireSettings
from pdcluster.wire.zmtp import GREETING, Reader, head_of

logger = logging.getLogger(__name__)

# Of frames that the other end does not read, whatever `high_water` says.
MAX_WAITING_BYTES = 64 << 20
# A frame of up to that many is copied behind its head, which costs less than a write of its own.
COPIED_BYTES = 16 * 1024
# For what was said last to leave.
CLOSING_S = 1.0
OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
)


class StreamLine(asyncio.Protocol):
    """Belongs to the loop in which it was made. Calls again and again until there is a connection; after that one, no
    more."""

    def __init__(
        self, address: str, settings: WireSettings, wake: Callable[[], None], on_connection: Callable[[], None]
    ) -> None:
        self._host, self._port = parse_address(address)
        self._address, self._settings = address, settings
        self._wake, self._on_connection = wake, on_connection
        self.why = ""
        self._reader = Reader(settings.max_frame_bytes)
        self._frames = self._reader.frames
        self._transport: asyncio.Transport | None = None
        # What is said before there is a connection that is ready.
        self._waiting: list[bytes] = []
        self._room = self._most = min(settings.high_water * MAX_BATCH_BYTES, MAX_WAITING_BYTES)
        # is_open: what is sent goes straight to the transport.
        self._is_open = self._is_closed = False
        # More came than was taken; the other end waits.
        self._read_paused = False
        self._happened: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._calling = self._loop.create_task(self._call())

    # ------------------------------------------------------------ what the dialer calls

    def send(self, frame: bytes) -> bool:
        size = len(frame)
        if self._is_open:
            write = self._transport.write  # type: ignore[union-attr]  # one that is open has it
            if size <= COPIED_BYTES:
                write(head_of(size) + frame)
            else:
                write(head_of(size))
                write(frame)
            return True
        if (
            self._is_closed or self._reader.is_ready or self._room <= 0
        ):  # the other end reads too slowly, or there is none yet
            return False
        self._room -= size
        self._waiting += (head_of(size), frame)
        return True

    def take(self) -> bytes | None:
        if self._frames:
            return self._frames.popleft()
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()
        return None

    def happened(self) -> list[str]:
        if not self._happened:
            return []
        happened, self._happened = self._happened, []
        return happened

    def sockets(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        if self._is_closed:
            return
        was_open, self._is_open, self._is_closed = self._is_open, False, True
        self._waiting.clear()
        self._calling.cancel()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if was_open and transport.get_write_buffer_size():
            transport.close()  # behind what was written
            self._loop.call_later(CLOSING_S, self._abort)
        else:
            transport.abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ calling

    async def _call(self) -> None:
        least_s, most_s = RECONNECT_S
        while True:
            try:
                async with asyncio.timeout(self._settings.lease_s):
                    await self._loop.create_connection(lambda: self, self._host, self._port)
                return
            except (
                OSError,
                UnicodeError,
            ) as error:  # TimeoutError is one of the first, names that cannot be ones are the second
                self.why = str(error) or "no connection in time"
                self._happen(REFUSED)
            await asyncio.sleep(least_s)
            least_s = min(2 * least_s, most_s)

    def _happen(self, event: str) -> None:
        if not self._is_closed:
            self._happened.append(event)
            self._run(self._on_connection)

    def _run(self, told: Callable[[], None]) -> None:
        """A fault of the owner's is told to the loop, and ends neither the connection nor the calls for one."""
        try:
            told()
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"what came of the line to {self._address} was not handled", "exception": error}
            )

    # ------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = stream = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self.why = ""
        if self._is_closed:
            stream.abort()
            return
        stream.set_write_buffer_limits(high=self._most)
        connection = stream.get_extra_info("socket")
        if connection is not None:
            for level, option, value in OPTIONS:
                connection.setsockopt(level, option, value)
        stream.write(GREETING)

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        reader = self._reader
        was_ready = reader.is_ready
        try:
            reader.feed(data)
        except ProtocolError as error:
            self.why, self._is_open = str(error), False
            if reader.is_ready:
                logger.warning("the connection to %s ends: %s", self._address, error)
            self._abort()
        if reader.answers or reader.is_ready is not was_ready:
            self._answer(was_ready)
        if self._frames:
            if len(self._frames) > self._settings.high_water and self._transport is not None:
                self._read_paused = True
                self._transport.pause_reading()
            self._run(self._wake)

    def _answer(self, was_ready: bool) -> None:
        parts, self._reader.answers = self._reader.answers, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._reader.is_ready and not was_ready:
            self._is_open = True
            parts, self._waiting = parts + self._waiting, []
        elif was_ready and not self._is_open:
            return  # who does not read gets no PONG either: it may ask for as many as it likes
        transport.writelines(parts)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self._is_open = None, False
        if not self._reader.is_ready and not self.why:
            self.why = "it hung up before it was ready, as one does that has a cluster key when this process has none"
        self._happen(DOWN)

    def pause_writing(self) -> None:
        self._is_open = False

    def resume_writing(self) -> None:
        self._is_open = not self._is_closed

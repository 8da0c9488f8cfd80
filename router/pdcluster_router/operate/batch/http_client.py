"""A small HTTP/1.1 client on asyncio: whole requests and whole replies over kept connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import httptools

from pdcluster.core.address import parse_address
from pdcluster.core.errors import PdclusterError
from pdcluster.settings.tls_trust import TlsTrust, client_context

CONNECT_S = 10.0
# Embeddings of 2,048 inputs have so much.
MAX_REPLY_BYTES = 128 << 20
MAX_HEADERS = 256


class ConnectionBroken(PdclusterError):
    """The router did not answer, or not to the end. was_open: there was a connection."""

    code = "connection_broken"

    def __init__(self, message: str, *, was_open: bool = True) -> None:
        super().__init__(message)
        self.was_open = was_open


@dataclass(slots=True)
class Reply:
    """A whole reply. Names of headers are in lower case."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


class _Connection(asyncio.Protocol):
    """One request at a time. httptools calls the methods that begin with on_."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._reply = Reply()
        self.is_reusable = False

    # ------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclasses
        self.is_reusable = True

    def data_received(self, data: bytes) -> None:
        try:
            if self._answer is None:
                raise ConnectionBroken("it says something that nobody asked for")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ConnectionBroken) as error:
            self._break(f"its reply cannot be read: {error.__context__ or error}")

    def connection_lost(self, exception: Exception | None) -> None:
        self._break(f"the connection ended: {exception or 'closed'}")

    # ------------------------------------------------ of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._reply.headers) == MAX_HEADERS:
            raise ConnectionBroken(f"more than {MAX_HEADERS} headers")
        self._reply.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        if len(self._reply.body) + len(body) > MAX_REPLY_BYTES:
            raise ConnectionBroken(f"more than {MAX_REPLY_BYTES} bytes")
        self._reply.body += body

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        self._reply.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        answer.set_result(self._reply)

    # ------------------------------------------------ of the client

    async def ask(self, request: Sequence[bytes], within_s: float) -> Reply:
        """Raises ConnectionBroken. The connection ends with a request that is given up."""
        assert self._transport is not None and self._answer is None
        self._reply, self._parser = Reply(), httptools.HttpResponseParser(self)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.writelines(request)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            raise ConnectionBroken(f"no answer within {within_s:.0f} s") from None
        finally:
            if self._answer is answer:  # it is given up
                self._answer = None
                self.close()

    def _break(self, why: str) -> None:
        self.is_reusable = False
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionBroken(why))
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()


class RouterClient:
    """One router's HTTP API. Owned by an event loop.

    num_open: requests that it has not answered.
    """

    def __init__(self, address: str, host: str, head: bytes, trust: TlsTrust | None) -> None:
        """host: that it was found by. head: header lines of every request."""
        self.address = address
        self.num_open = 0
        self._host, self._port = parse_address(address)
        self._head = b"host: %b\r\n%b" % (host.encode(), head)
        self._context = client_context(trust.ca) if trust is not None else None
        self._name = None if trust is None else trust.name or host
        self._idle: list[_Connection] = []

    async def post(self, path: str, headers: bytes, body: bytes, within_s: float) -> Reply:
        """Raises ConnectionBroken."""
        head = b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (
            path.encode(), self._head, headers, len(body),
        )  # fmt: skip
        self.num_open += 1
        try:
            connection = self._kept() or await self._connect()
            try:
                return await connection.ask((head, body), within_s)
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
        finally:
            self.num_open -= 1

    def _kept(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port, ssl=self._context, server_hostname=self._name
                )
        except TimeoutError:
            raise ConnectionBroken(f"no connection within {CONNECT_S:.0f} s", was_open=False) from None
        except (OSError, ssl.SSLError) as error:
            raise ConnectionBroken(f"no connection: {error}", was_open=False) from error
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

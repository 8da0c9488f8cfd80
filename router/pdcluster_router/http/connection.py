"""HTTP/1.1 over one TCP connection: bytes into exchanges, answered one at a time, in order. `httptools` parses.

1. A request begins when its head is there and the one before has its answer. The application may answer before the body
   came.
2. A body is kept up to the application's limit. Beyond that it is read and dropped, up to DISCARD_FACTOR times the
   limit, so that the client sees its answer. A client that waits for 100-continue is answered before it sends.
3. What comes during an answer waits here: PARSED_BYTES of it parsed, and MAX_AHEAD_BYTES unparsed. It is read because
   only a reader sees that a client left.
4. One sweep of the server checks all deadlines (`deadline`): for a request to arrive, for the client to read, for the
   next one.
5. A client that asks for another protocol does not get it (Java's does, on every connection). Its head is parsed again
   without that wish, because the parser would take what follows for the other protocol.
6. A connection that was closed stays until its client has all that was sent, at most `stall_s`. Over TLS both say
   goodbye; a client that has all and does not answer that has GOODBYE_S.
7. What is held of a request that is not whole is counted over all connections (`unfinished`). Where room lacks, it is
   answered, or the connection ends.
8. When the server drains, a connection ends with its answer, or soon. A request that outlasts the drain is told so.
"""

from __future__ import annotations

import math
from asyncio import BaseTransport, Event, Protocol, Transport
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import ioctl
from socket import IPPROTO_TCP, TCP_INFO
from struct import Struct
from termios import TIOCOUTQ
from time import monotonic
from typing import Protocol as Seam
from typing import cast

import httptools

from pdcluster.api.openai.replies import error_body
from pdcluster.core.errors import BadRequest, PdclusterError, Unavailable
from pdcluster_router.http.exchange import JSON, STATUS_LINES, Exchange, ParsedHead
from pdcluster_router.http.head import MAX_HEAD_BYTES, MAX_HEADERS, ONCE, RefusedHead, check_head, path_of
from pdcluster_router.http.unfinished import BASE_BYTES, Held, UnfinishedRequests
from pdcluster_router.http.write_coalescing import WriteCoalescer

DISCARD_FACTOR = 8
MAX_AHEAD_BYTES = 64 * 1024
# A longer read is parsed in parts, and no further than to a request that has to wait.
PARSED_BYTES = 16 * 1024
# Of a parsed request that waits, the bytes of memory that one byte of it takes.
PARSED_FACTOR = 24
# Of an unparsed head.
HEAD_FACTOR = 2
FRAMING = (b"content-length", b"transfer-encoding", b"connection")
# What the kernel says of bytes that a socket has not got rid of.
QUEUED = Struct("i")
# In tcp_info, what the peer confirmed (Linux 4.1).
ACKED, ACKED_AT = Struct("Q"), 120
# Around each part of a body. More counts towards MAX_HEAD_BYTES: extensions of chunks.
MOST_CHUNK_FRAMING = 64
# More posted bytes are sent at once, so that the transport notices a client that does not read.
MOST_POSTED_BYTES = 16 * 1024
# For a client that has all to answer the goodbye of TLS. Clients with pools of connections do not look for it.
GOODBYE_S = 1.0
# How long a server that stops waits for requests that were sent before their clients could know.
PARTING_S = 0.25

CROWDED = "too many requests are on their way that have not arrived whole; send yours in one piece, or retry later"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a connection.

    request_s: for a request to arrive once it began.
    stall_s: for a client to read.
    idle_s: between two requests.
    id_prefix: begins request ids.
    """

    max_body_bytes: int
    request_s: float = 30.0
    stall_s: float = 60.0
    idle_s: float = 75.0
    id_prefix: str = ""


class Application(Seam):
    """What a connection calls. None of these may raise or wait."""

    def begin(self, exchange: Exchange) -> None:
        """A request's head is here. It may be answered now."""
        ...

    def complete(self, exchange: Exchange) -> None:
        """Its body is here, too, unless it is too large (`is_too_large`)."""
        ...

    def late(self, exchange: Exchange) -> None:
        """Its body did not arrive in time."""
        ...

    def crowded(self, exchange: Exchange) -> None:
        """There is no room for the part of its body that came."""
        ...

    def stalled(self, exchange: Exchange) -> None:
        """Its client reads nothing. The connection ends after this."""
        ...

    def gone(self, exchange: Exchange) -> None:
        """Its client left before the end of the answer."""
        ...

    def stopping(self, exchange: Exchange) -> None:
        """The server drained as long as it may. Answer now."""
        ...

    def over(self, exchange: Exchange) -> None:
        """Nothing more is sent. Called once per exchange."""
        ...


class Connections(set["Connection"]):
    """The open connections of one server."""

    def __init__(self, unfinished: UnfinishedRequests | None = None) -> None:
        super().__init__()
        self.unfinished = unfinished or UnfinishedRequests()
        # Whether new ones end soon, too.
        self.is_draining = False
        self._none: Event | None = None
        self.write_coalescer = WriteCoalescer()

    def ended(self, connection: Connection) -> None:
        self.discard(connection)
        if self._none is not None and not self:
            self._none.set()

    async def wait_until_none(self) -> None:
        if self:
            self._none = Event()
            await self._none.wait()


class Connection(Protocol):
    """Implements exchange.ClientConnection. Owned by the server's loop."""

    def __init__(self, application: Application, limits: ConnectionLimits, open_ones: Connections) -> None:
        self._application, self._limits, self._open_ones = application, limits, open_ones
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Transport | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        # Of a head, or around the chunks of a body beyond what they need. The parser keeps them.
        self._bare_bytes = 0
        self._trailer_bytes = 0
        self._parsing: Exchange | None = None
        self._current: Exchange | None = None
        self._early: deque[Exchange] = deque()
        # That the early exchanges came from.
        self._early_bytes = 0
        # Bytes behind the early exchanges, not parsed yet.
        self._ahead = bytearray()
        self.held: Held | None = None
        # The head asked for another protocol. It is read to its end, and then parsed again.
        self._is_wish = False
        self._ends_soon = self._read_paused = False
        # When it ends though its client has not all that was sent before it was closed.
        self._closes_by = math.inf
        # That the client's machine had confirmed when it was last looked at.
        self._acked_bytes = -1
        self._is_reading = True
        self._is_settling = False
        self.write_coalescer = open_ones.write_coalescer
        self._posted = open_ones.write_coalescer.parts
        self.write: Callable[[bytes], object] = nowhere
        self.is_paused = False
        self.deadline = math.inf

    # ------------------------------------------------------------ transport

    def connection_made(self, transport: BaseTransport) -> None:
        self._transport = cast(Transport, transport)  # uvloop's are no subclasses
        self.write = self._transport.write
        self._open_ones.add(self)
        self.deadline = monotonic() + self._limits.idle_s
        if self._open_ones.is_draining:
            self.drain()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.write = nowhere
        self._open_ones.ended(self)
        self._open_ones.unfinished.release(self)
        self._early.clear()
        self._ahead.clear()
        self._posted.pop(self, None)
        current = self._current
        if current is not None and not current.finished:
            self._application.gone(current)
        # Else they would live in a circle, with all that was sent, until the collector of garbage comes.
        self._current = self._parsing = None
        del self._parser

    def pause_writing(self) -> None:
        self.is_paused = True
        self.deadline = monotonic() + self._limits.stall_s

    def resume_writing(self) -> None:
        self.is_paused = False
        current = self._current
        if self._is_closing:
            return
        if current is None:
            self._settle()
            return
        self.deadline = math.inf if current.is_complete else monotonic() + self._limits.request_s
        if current.on_resume is not None:
            current.on_resume()

    def data_received(self, data: bytes) -> None:
        if self._read_paused:
            return
        if not self._early and not self._ahead:
            self._parse(data)
            return
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self._read(False)
        self._count()

    def _parse_ahead(self) -> None:
        """Parse what waited, once no exchange is early."""
        data, self._ahead = bytes(self._ahead), bytearray()
        self._parse(data)
        self._read(len(self._ahead) <= MAX_AHEAD_BYTES)

    def _parse(self, data: bytes) -> None:
        if self._parsing is None and self._current is None and not self._bare_bytes:
            self.deadline = monotonic() + self._limits.request_s  # for all of it: bytes that trickle in do not move it
        if len(data) <= PARSED_BYTES:
            self._feed(data)
        else:
            self._feed_in_parts(data)
        if self._early:
            self._early_bytes = min(len(data), PARSED_BYTES)
        if self._bare_bytes or self._parsing is not None or self._ahead or self._early or self.held is not None:
            self._count()

    def _feed_in_parts(self, data: bytes) -> None:
        for at in range(0, len(data), PARSED_BYTES):
            if self._early:
                self._ahead += data[at:]
                return
            self._feed(data[at : at + PARSED_BYTES])
            if self._read_paused:
                return

    def _feed(self, data: bytes) -> None:
        self._bare_bytes += len(data)
        while data:
            data = self._parse_some(data)
        if self._bare_bytes > MAX_HEAD_BYTES and not self._read_paused:
            what = "the request's head, or what is around its chunks,"
            self._refuse(431, BadRequest(f"{what} has more than {MAX_HEAD_BYTES} bytes"))

    def _parse_some(self, data: bytes) -> bytes:
        """Parse bytes. Returns what to parse next instead of the rest."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            if self._is_wish:
                return self._without_wish() + data[wish.args[0] :]
            self._read_paused = True  # CONNECT: what follows is no HTTP
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, RefusedHead):
                self._refuse(cause.status, BadRequest(str(cause)))
            else:
                self._refuse(400, BadRequest(f"invalid HTTP request: {error}"))
        return b""

    def _without_wish(self) -> bytes:
        """The head just read, with only what frames its request, for a fresh parser."""
        parser, self._parser = self._parser, httptools.HttpRequestParser(self)
        framing = [b"%b: %b\r\n" % (name, self._headers[name]) for name in FRAMING if name in self._headers]
        version = parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (parser.get_method(), self._url, version, b"".join(framing))

    # ------------------------------------------------------------ parser

    def on_url(self, url: bytes) -> None:
        if not self._is_wish:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_wish:
            return
        if self._parsing is not None:
            self._drop_trailer(name, value)
            return
        name, headers = name.lower(), self._headers
        if name in headers:
            if name in ONCE:
                raise RefusedHead(400, f"the request has more than one {name.decode()} header; send one")
            if name == b"connection":
                value = headers[name] + b", " + value
        elif len(headers) >= MAX_HEADERS:
            raise RefusedHead(431, f"the request has more than {MAX_HEADERS} headers; send fewer")
        headers[name] = value

    def _drop_trailer(self, name: bytes, value: bytes) -> None:
        """Trailers of a chunked body are of no use."""
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise RefusedHead(431, f"the request's trailer has more than {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method().decode("ascii")
        wants_other = parser.should_upgrade()
        self._is_wish = wants_other and method != "CONNECT"
        if self._is_wish:
            return
        version, url, headers = parser.get_http_version(), self._url, self._headers
        check_head(version, url, headers, self._bare_bytes)
        keeps_alive = parser.should_keep_alive() and not wants_other and not self._ends_soon
        head = ParsedHead(method, path_of(url), headers, keeps_alive, version == "1.0", url)
        exchange = Exchange(self, head, self._limits.id_prefix)
        self._parsing, self._url, self._headers = exchange, b"", {}
        self._bare_bytes = self._trailer_bytes = 0
        if self._current is None and not self.is_paused:
            self._begin(exchange)
        else:
            self._early.append(exchange)

    def on_body(self, data: bytes) -> None:
        exchange = self._parsing
        assert exchange is not None  # the parser gives bodies after heads
        self._bare_bytes = max(self._bare_bytes - len(data) - MOST_CHUNK_FRAMING, 0)
        exchange.body_bytes += len(data)
        limit = self._limits.max_body_bytes
        if exchange.body_bytes <= limit and not exchange.is_too_large:
            exchange.keep(data)
            return
        exchange.is_too_large = True
        exchange.parts.clear()
        if exchange.body_bytes > limit * DISCARD_FACTOR:
            if exchange is self._current and not exchange.finished:
                self._application.complete(exchange)
            self.close()

    def on_message_complete(self) -> None:
        exchange, self._parsing = self._parsing, None
        self._bare_bytes = 0
        if exchange is None:
            return
        exchange.is_complete = True
        if exchange is not self._current:
            return
        if not exchange.finished:
            self.deadline = math.inf
            self._application.complete(exchange)
        elif exchange.keeps_alive:
            self._settle()
        elif not self._is_closing:
            self.close()  # it was told to drain since

    # ------------------------------------------------------------ one after the other

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        self._application.begin(exchange)
        expects = exchange.headers.get(b"expect")
        if (
            expects is not None
            and expects.lower() == b"100-continue"
            and not exchange.head.is_http_1_0
            and not exchange.finished
            and not exchange.is_complete
        ):
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def end(self, exchange: Exchange) -> None:
        """Implements ClientConnection."""
        self._application.over(exchange)
        if not exchange.keeps_alive:
            self.close()
        elif exchange.is_complete:
            if self._early or self._ahead or self._is_settling:
                self._settle()
            else:
                self._rest()
        else:
            exchange.parts.clear()  # the rest of its body is dropped as it comes, within the time of a body

    def _settle(self) -> None:
        """The current request is over: go on with those that are here.

        Requests that are answered at once return here, so it is a loop and not a recursion.
        """
        self._current = None
        if self._is_settling:
            return
        self._is_settling = True
        while self._current is None and (self._early or self._ahead) and not self._is_closing and not self.is_paused:
            if self._early:
                self._next()
            else:
                self._parse_ahead()
        self._is_settling = False
        if self._current is None and not self._early and not self._ahead:
            self._rest()
        if self.held is not None:
            self._count()

    def _rest(self) -> None:
        """Idle until the client sends more."""
        self._current = None
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self.deadline = monotonic() + (self._limits.request_s if self._bare_bytes else self._limits.idle_s)

    def _next(self) -> None:
        exchange = self._early.popleft()
        exchange.keeps_alive = exchange.keeps_alive and not self._ends_soon
        self.deadline = math.inf if exchange.is_complete else monotonic() + self._limits.request_s
        self._begin(exchange)
        if not exchange.is_complete:
            self._parse_ahead()
        elif not exchange.finished:
            self._application.complete(exchange)

    def _count(self) -> None:
        """Count what is held of requests that are not whole, or wait."""
        owner, size, exchange = None, HEAD_FACTOR * self._bare_bytes + len(self._ahead), self._parsing
        if self._early:
            size += PARSED_FACTOR * self._early_bytes
        if exchange is not None:
            size += sum(len(name) + len(value) for name, value in exchange.headers.items())
            if not exchange.finished and not exchange.is_too_large:
                size += exchange.body_bytes
                owner = None if exchange.tenant is None else exchange.tenant.name
        unfinished = self._open_ones.unfinished
        if not size or self._transport is None:
            unfinished.release(self)
        elif not unfinished.hold(self, owner, size + BASE_BYTES):
            self.crowd_out()

    def crowd_out(self) -> None:
        """Implements unfinished.UnfinishedRequest."""
        exchange = self._parsing
        if exchange is not None and exchange is self._current and not exchange.finished:
            self._application.crowded(exchange)
            return
        self._ahead.clear()
        self._early.clear()  # none of them began
        if exchange is not self._current:
            self._parsing = None
        self._refuse(503, Unavailable(CROWDED))

    @property
    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _read(self, wanted: bool) -> None:
        if wanted is not self._is_reading and self._transport is not None and not self._is_closing:
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def send(self, data: bytes) -> None:
        """Implements ClientConnection."""
        if self in self._posted:
            data = self._posted.pop(self) + data
        self.write(data)

    def post(self, data: bytes) -> None:
        """Implements ClientConnection."""
        posted = self._posted
        if self in posted:
            data = posted[self] + data  # a turn has few parts
        posted[self] = data
        if len(data) > MOST_POSTED_BYTES:
            self._flush()
        elif not self.write_coalescer.is_due:
            self.write_coalescer.flush_soon()

    def _flush(self) -> None:
        """Send what was posted."""
        if self in self._posted:
            self.send(b"")

    def close(self) -> None:
        """Close behind what was sent, as far as the client reads it in time."""
        self._flush()
        now = monotonic()
        self.deadline, self._closes_by = now + GOODBYE_S / 2, min(self._closes_by, now + self._limits.stall_s)
        if self._transport is not None:
            self._transport.close()

    def _is_sending(self) -> bool:
        """Whether the client's machine lacks something that was sent, or got something since the last call: what the
        loop holds goes to the kernel in its next turn.
        """
        bound = None if self._transport is None else self._transport.get_extra_info("socket")
        if bound is None:
            return False
        try:
            (unsent,) = QUEUED.unpack(ioctl(bound.fileno(), TIOCOUTQ, bytes(QUEUED.size)))
            info = bound.getsockopt(IPPROTO_TCP, TCP_INFO, ACKED_AT + ACKED.size)
        except OSError:  # it is closed
            return False
        before, (self._acked_bytes,) = self._acked_bytes, ACKED.unpack_from(info, ACKED_AT)
        return bool(unsent) or before != self._acked_bytes

    # ------------------------------------------------------------ what the server asks

    def expire(self) -> None:
        """Its deadline passed."""
        now = monotonic()
        self.deadline = now + self._limits.stall_s
        current = self._current
        if self._is_closing:
            if now < self._closes_by and self._is_sending():
                self.deadline = now + GOODBYE_S / 2
            else:
                self.abort()  # the client does not even read the end, or has all
        elif current is None or current.finished:
            self.close()
        elif self.is_paused:
            self._application.stalled(current)
        elif not current.is_complete:
            self._application.late(current)

    def drain(self) -> None:
        """End with the request that is answered. Without one, with a request that is on its way already, or after
        PARTING_S.
        """
        self._ends_soon = True
        if self._current is None:
            self.deadline = min(self.deadline, monotonic() + PARTING_S)
        else:
            self._current.keeps_alive = False

    def stop(self) -> None:
        """Answer the current request now, and end the connection."""
        current = self._current
        if current is not None and not current.finished:
            self._application.stopping(current)
        self.close()

    def abort(self) -> None:
        """Implements ClientConnection."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, status: int, error: PdclusterError) -> None:
        """The bytes are no request, or there is no room for them. Earlier requests get their answers, and the
        connection ends with the last. Without any, this is the answer.
        """
        broken, self._parsing = self._parsing, None
        self._read_paused = True
        if broken is not None and broken is not self._current:
            self._early.remove(broken)
        before = self._early[-1] if self._early else self._current
        if before is not None and before is not broken:
            before.keeps_alive = False
            return
        if before is None or not before.started:
            body = error_body(error)
            line = STATUS_LINES[status]
            self.send(b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (line, JSON, len(body), body))
        self.close()


def nowhere(data: bytes, /) -> None:
    """The write of a closed connection."""

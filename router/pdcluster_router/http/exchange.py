"""One HTTP request and its answer, as the application sees them. Knows no endpoint and no parser.

Nothing here waits. Unread bytes stay in the transport's buffer; a caller that writes more than once checks `is_paused`.
Parts of an answer leave together at the end of the loop's turn, because a write is most of a token's cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from secrets import token_hex
from time import monotonic, time
from typing import TYPE_CHECKING, Protocol

import msgspec

from pdcluster.api.openai.replies import error_body
from pdcluster.core.errors import PdclusterError
from pdcluster_router.core.ids import ID_BYTES
from pdcluster_router.core.tenants import Tenant
from pdcluster_router.http.write_coalescing import WriteCoalescer

if TYPE_CHECKING:
    from pdcluster_router.core.tracing import RequestTrace

JSON = b"content-type: application/json\r\n"
# Header lines of event streams: nothing on the way may buffer them.
NO_BUFFERING = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"

# Parts of a body, as they came.
MAX_PARTS = 256

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus} | {
    499: b"HTTP/1.1 499 \r\n",
    529: b"HTTP/1.1 529 Overloaded\r\n",
}


class ErrorShape(Protocol):
    """Errors in the words of an API. trace: the request's id for its client."""

    def status(self, error: PdclusterError) -> int: ...

    def body(self, error: PdclusterError, trace: str) -> bytes: ...


class OpenAIErrors:
    def status(self, error: PdclusterError) -> int:
        return error.http_status

    def body(self, error: PdclusterError, trace: str) -> bytes:
        return error_body(error)


class ClientConnection(Protocol):
    """The connection under an exchange."""

    is_paused: bool
    write_coalescer: WriteCoalescer

    def write(self, data: bytes, /) -> object:
        """Write now, where nothing was posted."""
        ...

    def send(self, data: bytes) -> None:
        """Write now, behind what was posted."""
        ...

    def post(self, data: bytes) -> None:
        """Write before the loop's turn ends, together with other posts."""
        ...

    def end(self, exchange: Exchange) -> None:
        """Its last byte was sent, or it gets no answer."""
        ...

    def abort(self) -> None:
        """Cut the connection, whatever its client has not read."""
        ...


class ParsedHead(msgspec.Struct, eq=False):
    """The head of one request.

    headers: names in lower case; of equal names the last one.
    target: as it came, with the query.
    """

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    keeps_alive: bool
    is_http_1_0: bool
    target: bytes = b""


class ChunkFraming(dict[int, bytes]):
    """Bytes before a chunk's middle, by the middle's size, made on first use. Texts of tokens have few sizes.

    around: bytes of a chunk beside its middle.
    """

    __slots__ = ("_around", "_before")

    def __init__(self, before: bytes, around: int) -> None:
        self._before, self._around = before, around

    def __missing__(self, size: int) -> bytes:
        self[size] = before = b"%x\r\n%b" % (self._around + size, self._before)
        return before


class Exchange:
    """Owned by its connection, in the server's loop.

    tenant: who sent it; None before that is known.
    has_place: it holds one in that name.
    on_gone: called with the error when it ends early.
    on_resume: called when the client reads again.
    extra: header lines of any answer.
    errors: how its API says that something failed.
    failure: makes the last event of a stream that fails; None: as `errors` does.
    request_trace: None where it is not traced.
    """

    # Defaults that most requests keep, so that none of them costs a store.
    tenant: Tenant | None = None
    request_trace: RequestTrace | None = None
    extra = b""
    status = body_bytes = 0
    started = finished = is_complete = is_too_large = has_place = _is_chunked = _is_named = False
    on_gone: Callable[[PdclusterError], object] | None = None
    on_resume: Callable[[], None] | None = None
    errors: ErrorShape = OpenAIErrors()
    failure: Callable[[PdclusterError], bytes] | None = None

    def __init__(self, line: ClientConnection, head: ParsedHead, id_prefix: str) -> None:
        self.line, self.head = line, head
        self.method = head.method
        self.path, self.headers, self.keeps_alive = head.path, head.headers, head.keeps_alive
        self.arrived = monotonic()
        self.id = id_prefix + token_hex(ID_BYTES)
        given = self.headers.get(b"x-request-id")
        self.trace = self.id.encode() if given is None else self._trace_of(given)
        self.parts: list[bytes | bytearray] = []

    def header(self, name: bytes) -> str | None:
        """A header by its lower-case name."""
        found = self.headers.get(name)
        return None if found is None else found.decode("latin-1")

    @property
    def client_id(self) -> str:
        """The client's name for this request, "" without one."""
        return self.trace.decode("ascii") if self._is_named else ""

    def _trace_of(self, given: bytes) -> bytes:
        """The x-request-id: the client's own when it is short and plain, else ours. It is echoed, and explained by;
        inside, `id` names the request.
        """
        own = self.id.encode()
        if given and len(given) <= 128 and given.isascii() and given.decode("ascii").isprintable():
            self._is_named = given != own
            return given
        return own

    def keep(self, data: bytes) -> None:
        """Keep a part of the body, unless the answer is complete. Many parts are joined: a client may send a byte per
        chunk.
        """
        if self.finished:
            return
        if len(self.parts) <= MAX_PARTS:
            self.parts.append(data if len(self.parts) < MAX_PARTS else bytearray(data))
        else:
            self.parts[-1] += data

    def take_body(self) -> bytes:
        """The body, once. A stream may last for minutes and needs it no more."""
        parts, self.parts = self.parts, []
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    @property
    def is_paused(self) -> bool:
        """Whether the client has more to read than it takes."""
        return self.line.is_paused

    # ------------------------------------------------ answering

    def reply(self, status: int, body: bytes, headers: bytes = JSON, then: Callable[[], object] | None = None) -> None:
        """The whole answer in one write.

        then: runs behind it, but before the connection's next request begins.
        """
        line, request = self.line, self.head
        self.status, self.started, self.finished = status, True, True
        end = b"\r\n" if self.keeps_alive and not request.is_http_1_0 else self._ending()
        shown = b"" if request.method == "HEAD" else body
        head = STATUS_LINES[status], _date.line(), len(body), self.trace, headers, self.extra, end, shown
        line.send(b"%b%bcontent-length: %d\r\nx-request-id: %b\r\n%b%b%b%b" % head)
        if then is not None:
            then()
        line.end(self)

    def start(self, status: int, headers: bytes) -> None:
        """The head of an answer of unknown length. For HTTP/1.0, the connection's end ends it."""
        if self.head.is_http_1_0:
            self.keeps_alive = False
        else:
            self._is_chunked = True
        self.status, self.started = status, True
        framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        head = STATUS_LINES[status], _date.line(), framing, self.trace, headers, self.extra, self._ending()
        self.line.post(b"%b%b%bx-request-id: %b\r\n%b%b%b" % head)

    def write(self, data: bytes, *, last: bool = False) -> None:
        if self._is_chunked:
            data = b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if last else b"")
        if not last:
            self.line.post(data)
            return
        self.line.send(data)
        self.finished = True
        self.line.end(self)

    def framing(self, before: bytes, after: bytes) -> tuple[Mapping[int, bytes], bytes]:
        """What to post around a token's text: bytes before it by its size, and after it. The answer has started."""
        if not self._is_chunked:
            return defaultdict(lambda: before), after
        return ChunkFraming(before, len(before) + len(after)), after + b"\r\n"

    def abandon(self) -> None:
        """No one is left to answer or to read."""
        if not self.finished:
            self.finished = True
            self.keeps_alive = False
            self.line.end(self)
            self.line.abort()

    def _ending(self) -> bytes:
        """The last lines of a head."""
        if not self.keeps_alive:
            return b"connection: close\r\n\r\n"
        return b"connection: keep-alive\r\n\r\n" if self.head.is_http_1_0 else b"\r\n"


class _Date:
    """The date header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        now = time()
        if not self._second <= now < self._second + 1:  # the clock may be set back
            self._second = int(now)
            self._line = b"date: " + formatdate(self._second, usegmt=True).encode() + b"\r\n"
        return self._line


_date = _Date()

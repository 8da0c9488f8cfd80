"""One HTTP exchange over raw ASGI: reading a bounded body, answering once, noticing that the client left. Knows no endpoint."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from time import monotonic
from types import TracebackType
from typing import Any

from pdcluster.api import sse
from pdcluster.api.replies import error_body
from pdcluster.errors import BadRequest, Cancelled, Overloaded, PdclusterError, RequestTooLarge, Unauthorized

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON: Header = (b"content-type", b"application/json")
NO_BUFFERING: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""For event streams: nothing between us and the client may collect them."""

ABORT = "pdcluster.abort"
"""The extension of a scope by which a connection is closed at once, whatever its client has not read."""

DISCARD_FACTOR = 8
"""A body up to this many times the limit is read and dropped, so that the client sees our answer instead of a broken connection."""


class UnsupportedMediaType(BadRequest):
    code = "unsupported_media_type"
    http_status = 415


class NotFound(BadRequest):
    code = "not_found"
    http_status = 404


class MethodNotAllowed(BadRequest):
    code = "method_not_allowed"
    http_status = 405


class SlowRequest(BadRequest):
    code = "request_timeout"
    http_status = 408


class ClientLeft(Cancelled):
    """There is nobody to answer any more; others may be cancelled, too, and are told."""


class Exchange:
    """One request and its answer. Owned by the task that the server runs it in."""

    __slots__ = (
        "_abort",
        "_headers",
        "_receive",
        "_send",
        "_stall",
        "_stall_s",
        "arrived",
        "finished",
        "id",
        "method",
        "path",
        "started",
        "status",
        "trace",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float, id_prefix: str = "") -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._send = send
        self._abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT, {}).get("call")
        self._stall_s = stall_s
        self._stall: _Stall | None = None
        self.arrived = monotonic()
        self.id = id_prefix + secrets.token_hex(12)
        self.trace = self._trace_id()
        self.status = 0
        self.started = False
        self.finished = False

    def header(self, name: bytes) -> str | None:
        """name: lower case. The last one wins."""
        found = None
        for key, value in self._headers:
            if key == name:
                found = value
        return None if found is None else found.decode("latin-1")

    @property
    def client_id(self) -> str:
        """What the client calls this request, "" when it did not say."""
        return self.trace if self.trace != self.id else ""

    def _trace_id(self) -> str:
        """x-request-id: the client's own when it is short and plain, else ours. Echoed, and explained by; inside, `id` names the request."""
        given = self.header(b"x-request-id")
        return given if given and len(given) <= 128 and given.isascii() and given.isprintable() else self.id

    # ------------------------------------------------ reading

    async def read_json(self, limit: int, timeout_s: float) -> bytes:
        """The whole body, at most `limit` bytes of it, sent as JSON."""
        self._check_media_type()
        await self._refuse_declared_length(limit, timeout_s)
        event = await self._event(timeout_s)
        body: bytes = event.get("body", b"")
        if not event.get("more_body", False):
            return self._bounded(body, limit)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._rest(body, limit)
        except TimeoutError:
            raise SlowRequest(f"the body did not arrive within {timeout_s:g} s; send it faster") from None

    async def _rest(self, first: bytes, limit: int) -> bytes:
        parts, size, more = [first], len(first), True
        while more:
            event = await self._event(None)
            part = event.get("body", b"")
            more = event.get("more_body", False)
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > limit * DISCARD_FACTOR:
                break
        if size > limit:
            raise _too_large(size, limit)
        return b"".join(parts)

    def _bounded(self, body: bytes, limit: int) -> bytes:
        if len(body) > limit:
            raise _too_large(len(body), limit)
        return body

    async def _event(self, timeout_s: float | None) -> Event:
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._receive()
        except TimeoutError:
            raise SlowRequest(f"the body did not arrive within {timeout_s:g} s; send it faster") from None
        if event["type"] == "http.disconnect":
            raise ClientLeft("the client closed the connection before its request was complete")
        return event

    def _check_media_type(self) -> None:
        given = self.header(b"content-type")
        if given is not None and given.partition(";")[0].strip().lower() not in ("application/json", ""):
            raise UnsupportedMediaType(f"content-type is {given[:100]}; send JSON with content-type: application/json")
        encoding = self.header(b"content-encoding")
        if encoding not in (None, "", "identity"):
            raise UnsupportedMediaType(f"content-encoding {encoding[:100]} is not supported; send the body uncompressed")

    async def _refuse_declared_length(self, limit: int, timeout_s: float) -> None:
        """A client that waits for 100-continue, or declares far too much, is answered before it sends the body."""
        declared = self.header(b"content-length")
        if declared is None or not declared.isdigit() or int(declared) <= limit:
            return
        if self.header(b"expect") is None and int(declared) <= limit * DISCARD_FACTOR:
            await self._discard(timeout_s)
        raise _too_large(int(declared), limit)

    async def _discard(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while (await self._event(None)).get("more_body", False):
                    pass
        except TimeoutError:
            return  # answered with 413 all the same

    # ------------------------------------------------ answering

    async def reply(self, status: int, body: bytes, headers: Iterable[Header] = (JSON,)) -> None:
        await self.start(status, (*headers, (b"content-length", b"%d" % len(body))))
        await self.write(body, last=True)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        self.started = True
        head = [*headers, (b"x-request-id", self.trace.encode())]
        await self._guarded({"type": "http.response.start", "status": status, "headers": head})

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Waits while the client does not read; a client that stalls for too long counts as gone."""
        self.finished = self.finished or last
        await self._guarded({"type": "http.response.body", "body": body, "more_body": not last})

    async def _guarded(self, event: Event) -> None:
        """One timer watches all writes of the exchange: a timeout of its own for each would cost as much as the write."""
        if self._stall is None:
            self._stall = _Stall(self._stall_s)
        with self._stall:
            await self._send(event)

    def close(self) -> None:
        """The exchange is over, however it ended."""
        if self._stall is not None:
            self._stall.close()

    def hang_up(self) -> None:
        """The request is over, and its client does not read: a write that waits for it ends with ClientLeft."""
        if self._stall is not None:
            self._stall.expire()

    def drop(self) -> None:
        """Nobody reads what was written: the connection is closed without waiting for that. Does nothing under a server that cannot."""
        if self._abort is not None:
            self._abort()

    async def fail(self, error: PdclusterError) -> None:
        """An error as the answer: a status before the first byte, the last event of the stream after it."""
        if self.finished:
            return
        if self.started:
            await self.write(sse.error_event(error_body(error)), last=True)
            return
        headers = [JSON]
        if error.http_status in (429, 503):
            wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        if isinstance(error, Overloaded):
            headers.append((b"x-pdcluster-predicted-wait-s", b"%.3f" % error.retry_after_s))
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, RequestTooLarge | SlowRequest):
            headers.append((b"connection", b"close"))
        await self.reply(error.http_status, error_body(error), headers)

    def watching(self) -> Watch:
        """`async with exchange.watching():` cancels what runs inside as soon as the client leaves, and raises ClientLeft."""
        return Watch(self, self._receive)


class _Stall:
    """`with stall:` around each write. A write that takes stall_s, or up to a quarter more, is cancelled and raises ClientLeft."""

    __slots__ = ("_began", "_cancelling", "_is_late", "_loop", "_stall_s", "_task", "_timer")

    def __init__(self, stall_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._stall_s = stall_s
        self._began: float | None = None
        self._is_late = False
        self._cancelling = task.cancelling()
        self._timer = self._loop.call_later(stall_s / 4, self._look)

    def __enter__(self) -> None:
        self._began = self._loop.time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._began = None
        if self._is_late and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft("the client did not read what it was sent") from None

    def _look(self) -> None:
        if self._began is not None and self._loop.time() - self._began >= self._stall_s:
            self.expire()
            return
        self._timer = self._loop.call_later(self._stall_s / 4, self._look)

    def expire(self) -> None:
        """A write that waits has waited long enough."""
        if self._began is not None and not self._is_late:
            self._is_late = True
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()


def _too_large(size: int, limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {size} bytes or more, at most {limit} are taken; send a shorter prompt or raise --max-body-bytes")


class Watch:
    """Turns `http.disconnect` into cancellation of the task that entered it. Only after the body was read: both use `receive`."""

    __slots__ = ("_cancelling", "_exchange", "_gone", "_receive", "_task", "_watcher")

    def __init__(self, exchange: Exchange, receive: Receive) -> None:
        self._exchange = exchange
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self._exchange.id}")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watcher.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft("the client closed the connection") from error

    async def _watch(self) -> None:
        event = await self._receive()
        # The server also says "disconnect" once the answer is complete: then there is nothing to cancel.
        if event["type"] == "http.disconnect" and not self._exchange.finished:
            self._gone = True
            self._task.cancel()

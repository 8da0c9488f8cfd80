"""The console's HTTP application: the page, what it shows as JSON and server-sent events, and what it changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote

import msgspec

from pdcluster.core.errors import BadRequest, Overloaded, PdclusterError, Unavailable, UnknownName
from pdcluster.processes.tasks import watched
from pdcluster.settings.tls_trust import TlsTrust
from pdcluster.telemetry import timeline
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.console.access import ConsoleAccess
from pdcluster_router.console.chat import ChatRefused, ChatRelay, streaming
from pdcluster_router.console.feed import ClusterFeed
from pdcluster_router.frontend.app import HttpSettings
from pdcluster_router.http.errors import ClientLeft, MethodNotAllowed, SlowRequest, fail, too_large
from pdcluster_router.http.exchange import NO_BUFFERING, Exchange
from pdcluster_router.operate import changing, reading
from pdcluster_router.operate.clients import AdminClients

T = TypeVar("T")
OpenClients = Callable[[Callable[[str], None]], AdminClients]

API_KEY = b"x-api-key"
SAFE = (
    b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\ncache-control: no-store\r\n"
    b"cross-origin-resource-policy: same-origin\r\ncross-origin-opener-policy: same-origin\r\n"
)
FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/console.css": ("console.css", b"text/css; charset=utf-8"),
    "/console.js": ("console.js", b"text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", b"image/svg+xml"),
}
# Paths with a name behind them.
NAMING = ("/api/explain/", "/api/node/")
MAX_BODY_BYTES = 1 << 20
LONGEST_DRAIN_S = 86_400.0
# Pages that watch, and chats, at a time.
MAX_STREAMS = 32
# Questions to the routers at a time: each has a thread and connections. Pages on loopback ask without a token.
MAX_QUESTIONS = 8
# Lines that clients of server-sent events pass over.
OPENING, END = b": here\n\n", b": the end\n\n"


class CordonChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    cordoned: bool


class DrainChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_DRAIN_S)] = 600.0


class RoleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    role: Literal["prefill", "decode", "mixed"]


class CancelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: str
    reason: str = ""


class PolicyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """live, shadow: None leaves it; shadow none removes it."""

    live: str | None = None
    shadow: str | None = None
    dry_run: bool = False


class ConsoleApp:
    """Implements connection.Application. Runs in the console's event loop; Admin services are asked in threads.

    api: HOST:PORT of a router's HTTP API, for chats.
    trust: None: that API is plain HTTP.
    """

    def __init__(
        self,
        access: ConsoleAccess,
        open_clients: OpenClients,
        feed: ClusterFeed,
        api: str,
        metrics: RouterMetrics,
        trust: TlsTrust | None = None,
    ) -> None:
        self.settings = HttpSettings(max_body_bytes=MAX_BODY_BYTES)
        self.metrics = metrics
        self._access, self._open_clients, self._feed, self._api = access, open_clients, feed, api
        self._trust = trust
        self._tasks: set[asyncio.Task[None]] = set()
        # Live pages, drains and chats. Each of the latter two has a thread.
        self._streams: set[Exchange] = set()
        self._num_questions = 0
        self._threads = ThreadPoolExecutor(MAX_STREAMS, "console stream")
        folder = resources.files("pdcluster_router.console") / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._get: Mapping[str, Callable[[Exchange], None]] = {
            "/api/session": self._session,
            "/api/live": self._live,
            "/api/explain/": self._explain,
            "/api/node/": self._node,
        }
        self._post: Mapping[str, Callable[[Exchange], None]] = {
            "/api/cordon": self._cordon,
            "/api/drain": self._drain,
            "/api/role": self._role,
            "/api/cancel": self._cancel,
            "/api/policy": self._policy,
            "/api/chat": self._chat,
        }

    # ------------------------------------------------ what connections tell

    def begin(self, exchange: Exchange) -> None:
        exchange.extra = SAFE
        try:
            self._access.check_page(exchange)
            path = self._pattern_of(exchange)
            methods = self._methods(path)
            if exchange.method not in methods:
                raise MethodNotAllowed(f"{path} takes {' or '.join(methods)}", methods)
            if path not in self._files and path != "/api/session":
                self._access.check_reading(exchange)
            if path in self._post:
                if exchange.header(b"content-type") != "application/json":
                    raise BadRequest("send JSON with content-type: application/json")
                if path != "/api/chat":
                    self._access.check_changing(exchange)
        except Exception as error:  # the top of a request
            fail(exchange, error, self.metrics)

    def complete(self, exchange: Exchange) -> None:
        try:
            if exchange.is_too_large:
                raise too_large(exchange.body_bytes, MAX_BODY_BYTES)
            path = self._pattern_of(exchange)
            if path in self._files:
                content, kind = self._files[path]
                exchange.reply(200, content, b"content-type: %b\r\n" % kind)
            else:
                (self._get.get(path) or self._post[path])(exchange)
        except Exception as error:  # the top of a request
            fail(exchange, error, self.metrics)

    def late(self, exchange: Exchange) -> None:
        fail(exchange, SlowRequest("the body did not arrive in time; send it faster"), self.metrics)

    def crowded(self, exchange: Exchange) -> None:
        fail(exchange, Overloaded("too many bodies are on their way to the console; retry later"), self.metrics)

    def stalled(self, exchange: Exchange) -> None:
        self._end(exchange, ClientLeft("the page read nothing for too long"))

    def gone(self, exchange: Exchange) -> None:
        self._end(exchange, ClientLeft("the page closed the connection"))

    def stopping(self, exchange: Exchange) -> None:
        self._end(exchange, Unavailable("the console stops"))

    def over(self, exchange: Exchange) -> None:
        self._streams.discard(exchange)

    def close(self) -> None:
        """Threads that still relay end with their exchanges."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, exchange: Exchange, error: PdclusterError) -> None:
        if exchange.on_gone is not None:
            exchange.on_gone(error)
        if not exchange.finished:
            fail(exchange, error, self.metrics)

    # ------------------------------------------------ reading

    def _session(self, exchange: Exchange) -> None:
        """What this page may do."""
        access = self._access
        told = {"may_change": access.may_change(exchange), "has_token": access.has_token}
        try:
            access.check_reading(exchange)
        except PdclusterError:
            told["wants_token"] = True
        exchange.reply(200, msgspec.json.encode(told))

    def _live(self, exchange: Exchange) -> None:
        self._enter_stream(exchange)
        exchange.start(200, NO_BUFFERING)

        def tell(look: bytes) -> None:
            if not exchange.is_paused and not exchange.finished:  # a page that does not read misses looks
                exchange.write(b"data: %b\n\n" % look)

        exchange.on_gone = lambda error: self._feed.leave(tell)
        exchange.write(OPENING)
        self._feed.watch(tell)

    def _explain(self, exchange: Exchange) -> None:
        request = _last_part(exchange)

        def look(clients: AdminClients) -> dict[str, Any]:
            found = reading.explanations(clients, request)
            return {
                "records": [{**record, "spans": _spans(record)} for record, _ in found],
                "text": "\n\n".join(text for _, text in found if text),
            }

        self._answer(exchange, look)

    def _node(self, exchange: Exchange) -> None:
        name = _last_part(exchange)
        self._answer(exchange, lambda clients: reading.describe(clients, name))

    # ------------------------------------------------ changing

    def _cordon(self, exchange: Exchange) -> None:
        change = _decoded(exchange, CordonChange)
        self._change(exchange, lambda clients: changing.cordon(clients, change.node, cordoned=change.cordoned))

    def _role(self, exchange: Exchange) -> None:
        change = _decoded(exchange, RoleChange)
        self._change(exchange, lambda clients: changing.set_role(clients, change.node, change.role))

    def _cancel(self, exchange: Exchange) -> None:
        change = _decoded(exchange, CancelChange)
        reason = change.reason or "by the console"
        self._change(exchange, lambda clients: changing.cancel(clients, change.request, reason))

    def _policy(self, exchange: Exchange) -> None:
        change = _decoded(exchange, PolicyChange)
        self._change(
            exchange,
            lambda clients: changing.set_policy(clients, change.live, change.shadow, dry_run=change.dry_run),
        )

    def _change(self, exchange: Exchange, work: Callable[[AdminClients], str]) -> None:
        self._answer(exchange, lambda clients: {"message": work(clients)})

    def _drain(self, exchange: Exchange) -> None:
        """Server-sent events: what is left, again and again, and how it ended."""
        change = _decoded(exchange, DrainChange)
        self._enter_stream(exchange)
        is_left = threading.Event()
        exchange.on_gone = lambda error: is_left.set()
        loop = asyncio.get_running_loop()

        def work() -> None:
            clients = self._open_clients(lambda line: None)
            drained = changing.drain(clients, change.node, change.timeout_s)
            try:
                while not is_left.is_set():
                    line = changing.progress_line(change.node, next(drained))
                    loop.call_soon_threadsafe(_emit, exchange, {"progress": line})
            except StopIteration as ended:
                loop.call_soon_threadsafe(_emit, exchange, {"message": ended.value})
            finally:
                drained.close()
                clients.close()

        exchange.start(200, NO_BUFFERING)
        self._later(exchange, self._streamed(exchange, work))

    def _chat(self, exchange: Exchange) -> None:
        body, api_key = streaming(exchange.take_body()), exchange.header(API_KEY)
        self._enter_stream(exchange)
        loop = asyncio.get_running_loop()

        def emit(line: bytes) -> None:
            loop.call_soon_threadsafe(_pass_on, exchange, line)

        relay = ChatRelay(self._api, emit, lambda: exchange.is_paused, self._trust)

        exchange.on_gone = lambda error: relay.cancel()
        self._later(exchange, self._streamed(exchange, partial(relay.run, body, api_key)))

    async def _streamed(self, exchange: Exchange, work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, work)
            if not exchange.finished:
                exchange.write(END, last=True)
        except ChatRefused as error:
            if not exchange.finished:
                exchange.reply(error.status, error.body)

    # ------------------------------------------------ inside

    def _answer(self, exchange: Exchange, work: Callable[[AdminClients], Any]) -> None:
        """Ask the routers in a thread, and answer with what that returns. Raises Overloaded."""
        if self._num_questions >= MAX_QUESTIONS:
            raise Overloaded(f"the console asks the routers {MAX_QUESTIONS} questions already; retry later")
        self._num_questions += 1

        def ask() -> bytes:
            clients = self._open_clients(lambda line: None)
            try:
                return msgspec.json.encode(work(clients))
            finally:
                clients.close()

        async def reply() -> None:
            try:
                body = await asyncio.to_thread(ask)
            finally:
                self._num_questions -= 1
            if not exchange.finished:
                exchange.reply(200, body)

        self._later(exchange, reply())

    def _later(self, exchange: Exchange, work: Any) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # the top of a task
                if not exchange.finished:
                    fail(exchange, error, self.metrics)

        task = watched(run(), f"console {exchange.path}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enter_stream(self, exchange: Exchange) -> None:
        """Until it is over. Raises Overloaded."""
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{len(self._streams)} pages watch or chat already; close one")
        self._streams.add(exchange)

    def _methods(self, path: str) -> tuple[str, ...]:
        if path in self._files:
            return "GET", "HEAD"
        if path in self._get or path in self._post:
            return ("GET",) if path in self._get else ("POST",)
        raise UnknownName(f"the console has no {path[:200] or 'such path without a name'}")

    def _pattern_of(self, exchange: Exchange) -> str:
        """The path without what it names; "" for one that names nothing and should."""
        path = exchange.path
        pattern = next((each for each in NAMING if path.startswith(each)), path)
        return "" if pattern in NAMING and pattern == path else pattern


def _last_part(exchange: Exchange) -> str:
    """What the path names, behind /api/KIND/."""
    return unquote(exchange.path.split("/", 3)[3])


def _decoded(exchange: Exchange, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(exchange.take_body(), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"the body does not fit: {error}") from error


def _spans(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its timeline as values to draw; empty while it runs."""
    if record.get("outcome") is None:
        return []
    return [
        {"name": span.name, "start": span.start, "end": span.end, "note": span.note, "faint": span.faint}
        for span in timeline.spans_of(reading.usage_of(record))
    ]


def _emit(exchange: Exchange, value: dict[str, Any]) -> None:
    if not exchange.finished:
        exchange.write(b"data: %b\n\n" % msgspec.json.encode(value))


def _pass_on(exchange: Exchange, line: bytes) -> None:
    if exchange.finished:
        return
    if not exchange.started:
        exchange.start(200, NO_BUFFERING)
    exchange.write(line)

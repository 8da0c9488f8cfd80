"""The HTTP side of calls by trainers: who may, which path, and answers as JSON. What calls do is in `calls`.

A caller that leaves cancels its call. Errors have OpenAI's shape with SGLang's `success` and `message` beside it.
"""

from __future__ import annotations

import asyncio

import msgspec

from pdcluster.core.errors import Overloaded, PdclusterError, RequestTooLarge, Unavailable, UnknownName
from pdcluster.processes.tasks import watched
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.control.access import ControlAccess
from pdcluster_router.control.calls import CALLS, Call, TrainerCalls
from pdcluster_router.control.parameters import Unsupported, checked, given
from pdcluster_router.control.refused import REFUSED
from pdcluster_router.frontend.app import HttpSettings
from pdcluster_router.http.errors import ClientLeft, MethodNotAllowed, SlowRequest, fail
from pdcluster_router.http.exchange import Exchange, OpenAIErrors

MAX_BODY_BYTES = 1 << 16
# Calls at a time, as many as Admin takes over gRPC.
MAX_CALLS = 64
# For calls that were cancelled to take back what they began.
CANCEL_S = 10.0


class ControlApp:
    """Implements connection.Application. Runs in the event loop of a router or of its supervisor."""

    def __init__(self, calls: TrainerCalls, access: ControlAccess, metrics: RouterMetrics) -> None:
        self.settings = HttpSettings(max_body_bytes=MAX_BODY_BYTES)
        self.metrics = metrics
        self._calls, self._access = calls, access
        self._errors = ControlErrors()
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    # ------------------------------------------------ what connections tell

    def begin(self, exchange: Exchange) -> None:
        exchange.errors = self._errors
        try:
            self._access.check(exchange)
            path = exchange.path
            if path in REFUSED:  # before a body comes, which may have all tensors
                raise Unsupported(f"{path} is refused: {REFUSED[path]}")
            call = _call_of(path)
            if exchange.method not in call.methods:
                raise MethodNotAllowed(f"{path} takes {' or '.join(call.methods)}", call.methods)
        except Exception as error:  # the top of a request
            self._fail(exchange, error)

    def complete(self, exchange: Exchange) -> None:
        try:
            if exchange.is_too_large:
                raise RequestTooLarge(f"a body has at most {MAX_BODY_BYTES} bytes here; it names weights and has none")
            if len(self._tasks) >= MAX_CALLS:
                raise Overloaded(f"{MAX_CALLS} calls are open already; retry later")
            call, query = _call_of(exchange.path), exchange.head.target.partition(b"?")[2]
            said = checked(given(query, exchange.take_body()), call.parameters, exchange.path)
        except Exception as error:  # the top of a request
            self._fail(exchange, error)
            return

        async def run() -> None:
            try:
                answer = await call.run(self._calls, said)
            except Exception as error:  # the top of a task
                if not exchange.finished:
                    self._fail(exchange, error)
                return
            if not exchange.finished:
                exchange.reply(200, msgspec.json.encode(answer))

        self._tasks[exchange] = watched(run(), f"call of a trainer to {exchange.path}")

    def late(self, exchange: Exchange) -> None:
        self._fail(exchange, SlowRequest("the body did not arrive in time; send it faster"))

    def crowded(self, exchange: Exchange) -> None:
        self._fail(exchange, Overloaded("too many bodies are on their way; retry later"))

    def stalled(self, exchange: Exchange) -> None:
        self._end(exchange, ClientLeft("the trainer read nothing for too long"))

    def gone(self, exchange: Exchange) -> None:
        self._end(exchange, ClientLeft("the trainer closed the connection"))

    def stopping(self, exchange: Exchange) -> None:
        self._end(exchange, Unavailable("the router stops"))

    def over(self, exchange: Exchange) -> None:
        self._tasks.pop(exchange, None)

    async def close(self) -> None:
        """Wait until calls that were cancelled have ended, at most CANCEL_S."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=CANCEL_S)

    # ------------------------------------------------ inside

    def _end(self, exchange: Exchange, error: PdclusterError) -> None:
        if (task := self._tasks.get(exchange)) is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()
        if not exchange.finished:
            self._fail(exchange, error)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        fail(exchange, error, self.metrics)


class ControlErrors(OpenAIErrors):
    """As trainers of vLLM and of SGLang look for them."""

    def body(self, error: PdclusterError, trace: str) -> bytes:
        told = msgspec.json.decode(super().body(error, trace))
        return msgspec.json.encode({"success": False, "message": str(error), **told})


def _call_of(path: str) -> Call:
    if (call := CALLS.get(path)) is None:
        raise UnknownName(f"trainers have no call {path[:200]!r}; there are {', '.join(CALLS)}")
    return call

"""HTTP's own errors, and how any error becomes an answer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from pdcluster.api import sse
from pdcluster.core.errors import (
    BadRequest,
    Cancelled,
    ContextTooLong,
    Overloaded,
    PdclusterError,
    RequestStopped,
    RequestTooLarge,
    Unauthorized,
)
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.http.exchange import JSON, NO_BUFFERING, Exchange

log = logging.getLogger(__name__)


class UnsupportedMediaType(BadRequest):
    code = "unsupported_media_type"
    http_status = 415


class MethodNotAllowed(BadRequest):
    """Another method than the path takes.

    methods: that it takes.
    """

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, message: str, methods: Sequence[str]) -> None:
        super().__init__(message)
        self.methods = methods


class SlowRequest(BadRequest):
    code = "request_timeout"
    http_status = 408


class ClientLeft(Cancelled):
    """The client left. Siblings may be cancelled with it."""


def fail(
    exchange: Exchange,
    error: Exception,
    metrics: RouterMetrics,
) -> None:
    """Answer with the error, once, and count it. Bugs are not shown to the client."""
    if isinstance(error, ClientLeft):
        exchange.status = error.http_status
        metrics.disconnects.inc()
        log.info("request %s: %s", exchange.id, error)
        exchange.abandon()
        return
    if not isinstance(error, PdclusterError):
        log.error("request %s to %s failed", exchange.id, exchange.path, exc_info=error)
        error = PdclusterError(f"internal error; the server's log has it under request {exchange.id}")
    metrics.errors.labels(error.code).inc()
    if exchange.started:
        if not exchange.finished:
            exchange.status = error.http_status  # of what is counted: the client has read a 200
        log.warning("request %s failed after its first byte: %s", exchange.id, error)
    answer_error(exchange, error)


def answer_error(exchange: Exchange, error: PdclusterError) -> None:
    """A status before the first byte, the last event of a stream after it, nothing behind a complete answer."""
    if exchange.finished:
        return
    if exchange.failure is not None and (exchange.started or isinstance(error, ContextTooLong)):
        if not exchange.started:  # clients of such streams shorten their prompt only where an event asks for it
            exchange.start(200, NO_BUFFERING)
            exchange.status = error.http_status
        exchange.write(exchange.failure(error), last=True)
        return
    shape = exchange.errors
    body = shape.body(error, exchange.trace.decode())
    if exchange.started:
        exchange.write(sse.error_event(body), last=True)
    else:
        if isinstance(error, RequestTooLarge | SlowRequest):
            exchange.keeps_alive = False
        exchange.reply(shape.status(error), body, JSON + _headers(error))


def too_large(size: int, limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body has {size} bytes or more, at most {limit} are taken; send a shorter prompt or raise --max-body-bytes"
    )


def allow(methods: Sequence[str]) -> bytes:
    """The header line that lists a path's methods."""
    return b"allow: %b\r\n" % ", ".join(methods).encode()


def _headers(error: PdclusterError) -> bytes:
    headers = b""
    if error.http_status in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        headers += b"retry-after: %d\r\n" % max(1, math.ceil(wait_s))
    if isinstance(error, Overloaded):
        headers += b"x-pdcluster-predicted-wait-s: %.3f\r\n" % error.retry_after_s
    if isinstance(error, RequestStopped):
        headers += b"x-should-retry: false\r\n"  # the clients of OpenAI and Anthropic heed it
    if isinstance(error, Unauthorized):
        headers += b"www-authenticate: Bearer\r\n"
    if isinstance(error, MethodNotAllowed):
        headers += allow(error.methods)
    return headers

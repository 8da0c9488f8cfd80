"""Probes and metrics of a process over HTTP: /livez, /readyz, /metrics.

Threads of their own serve them, so a main loop or an engine that is stuck cannot stop the answer. No prompt, key or
token is on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Info, ProcessCollector, generate_latest

from pdcluster.core.address import format_address, parse_address
from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.core.messages import PROTOCOL_VERSION
from pdcluster.core.version import VERSION
from pdcluster.processes.listening import listening_place
from pdcluster.telemetry.log import register_lost_lines

logger = logging.getLogger(__name__)

# A loop turns at least every second. One that has not turned for so long is stuck.
LATE_S = 10.0
# How often an asyncio loop says that it turns.
BEAT_S = 0.5
# For a client to send its request, and to read the answer.
CLIENT_S = 5.0
MAX_CLIENTS = 16
# For answers that are under way when the port closes.
LAST_S = 1.0


class Pulse:
    """When a loop last turned. One thread beats, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at = clock()

    def beat(self) -> None:
        self._beat_at = self._clock()

    @property
    def age_s(self) -> float:
        return self._clock() - self._beat_at

    def problems(self) -> list[str]:
        age_s = self.age_s
        return [f"the main loop made no turn for {age_s:.1f} s"] if age_s > LATE_S else []


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a probe.

    status: one word.
    reasons: why it is not good; empty when all is well.
    facts: what else an operator wants to know, as JSON values.
    """

    is_good: bool
    status: str
    reasons: list[str] = field(default_factory=list)
    facts: Mapping[str, object] = field(default_factory=dict)

    def body(self) -> bytes:
        """JSON, with the version of this process."""
        shown = {"status": self.status, "reasons": self.reasons, **self.facts}
        return msgspec.json.encode({**shown, "version": VERSION, "protocol": PROTOCOL_VERSION})

    @property
    def code(self) -> int:
        """The HTTP status."""
        return 200 if self.is_good else 503


def alive(problems: list[str], **facts: object) -> Verdict:
    """The verdict of /livez."""
    return Verdict(not problems, "failed" if problems else "alive", problems, facts)


@dataclass(frozen=True, slots=True)
class Probes:
    """What a process answers. Called in threads of the server.

    metrics: the text of a scrape. Raises PdclusterError when it cannot be had.
    """

    live: Callable[[], Verdict]
    ready: Callable[[], Verdict]
    metrics: Callable[[], bytes]


def process_registry() -> CollectorRegistry:
    """A registry with this process's memory, CPU and descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    register_build(registry)
    return registry


def register_build(registry: CollectorRegistry) -> None:
    """Say the version of this process, and what of its log was lost."""
    register_lost_lines(registry)
    build = Info("pdcluster_build", "Versions of pdcluster and of its protocol.", registry=registry)
    build.info({"version": VERSION, "protocol": str(PROTOCOL_VERSION)})


def exposition_of(registry: CollectorRegistry) -> Callable[[], bytes]:
    return lambda: generate_latest(registry)


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0: each reply ends its connection, so that no idle client holds a place.
    server: _HealthServer
    timeout = CLIENT_S

    def do_GET(self) -> None:
        probes, path = self.server.probes, self.path.partition("?")[0]
        try:
            if path == "/metrics":
                self._reply(200, probes.metrics(), CONTENT_TYPE_LATEST)
            elif path in ("/livez", "/readyz"):
                verdict = probes.live() if path == "/livez" else probes.ready()
                self._reply(verdict.code, verdict.body(), "application/json")
            else:
                self._reply(404, b"this port has /livez, /readyz and /metrics\n", "text/plain")
        except PdclusterError as error:
            self._reply(503, f"{error}\n".encode(), "text/plain")
        except OSError:
            logger.debug("a client of the health port left")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _reply(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _HealthServer(ThreadingHTTPServer):
    """At most MAX_CLIENTS connections at a time; more are closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], probes: Probes) -> None:
        self.address_family, place = listening_place(*address)
        self.probes = probes
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of a name for the host that the base class makes."""
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # a restarted process takes its port again at once
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()  # no thread began that would
            raise

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def wait_for_clients(self) -> None:
        """At most LAST_S."""
        until = time.monotonic() + LAST_S
        for _ in range(MAX_CLIENTS):
            self._places.acquire(timeout=max(until - time.monotonic(), 0.0))

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        logger.debug("a client of the health port failed", exc_info=True)


@contextmanager
def health_port(where: str | None, probes: Probes) -> Iterator[str | None]:
    """Serve probes at HOST:PORT while the block runs. Yields the address with the real port; None without one.

    Raises ConfigError when it cannot be listened on.
    """
    if where is None:
        yield None
        return
    host, port = parse_address(where)
    try:
        server = _HealthServer((host, port), probes)
    except OSError as error:
        raise ConfigError(
            f"the health port cannot listen on {where}: {error.strerror}; choose another address with --health"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="health", daemon=True)
    thread.start()
    try:
        yield format_address(host, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        server.wait_for_clients()

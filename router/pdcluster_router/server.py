"""Runs the HTTP application under uvicorn in the caller's event loop. Signals and flags are the caller's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdcluster.config import RouterConfig
from pdcluster.errors import ConfigError
from pdcluster.metrics import RouterMetrics
from pdcluster_router.app import App, HttpSettings
from pdcluster_router.asgi import ABORT

BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to whoever owns the process, and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """Lets the application close a connection whose client does not read: uvicorn's own way waits until it has read everything."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}


def http_settings(config: RouterConfig) -> HttpSettings:
    return HttpSettings(max_requests=config.max_requests, max_body_bytes=config.max_body_bytes, deadline_s=config.deadline_s)


def router_metrics() -> RouterMetrics:
    """On a registry of their own, with this process's memory, CPU and file descriptors beside them."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return RouterMetrics(registry)


@asynccontextmanager
async def listening(app: App, address: str, *, drain_s: float, is_port_shared: bool = False) -> AsyncIterator[str]:
    """Serves while the block runs and gives HOST:PORT (the real port, when 0 was asked for). Leaving it takes no new connections, lets open
    requests finish for at most drain_s, then cancels them. is_port_shared: other workers of this router listen there, too."""
    bound = _bind(address, is_port_shared=is_port_shared)
    config = uvicorn.Config(
        app,
        loop="none",
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[bound]), name="http")
    try:
        await server.up.wait()
        host, port = bound.getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        server.should_exit = True
        await task
        bound.close()


def _bind(address: str, *, is_port_shared: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the socket says TCP; with it, head and body of every answer are 40 ms apart.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_port_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, int(port)))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; choose another address with --http") from error
    bound.setblocking(False)
    return bound

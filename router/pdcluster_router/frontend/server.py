"""Listens for HTTP in the caller's event loop, checks deadlines of connections, and drains them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Protocol

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from pdcluster.core.address import format_address, is_loopback, parse_address
from pdcluster.core.errors import ConfigError
from pdcluster.processes.listening import listening_place
from pdcluster.processes.tasks import running
from pdcluster.settings.config import RouterConfig
from pdcluster.telemetry.health import register_build
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.frontend.app import HttpSettings
from pdcluster_router.http.acceptor import AcceptLimits, Acceptor, limits_of_process
from pdcluster_router.http.connection import PARTING_S, Application, Connection, ConnectionLimits, Connections
from pdcluster_router.http.hosts import HostRule
from pdcluster_router.http.tls import ServerTls
from pdcluster_router.http.unfinished import UnfinishedRequests

logger = logging.getLogger(__name__)

BACKLOG = 2048
# How late a passed deadline may be seen.
SWEEP_S = 0.1
# A client whose machine is gone is probed after 20 s of silence and given up 15 s later, which ends its generation.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
# Time for clients to read that the router stops.
LAST_WORD_S = 1.0


def http_settings(config: RouterConfig) -> HttpSettings:
    host, _ = parse_address(config.http)
    is_guarded = is_loopback(host) and config.tenants is None
    hosts = HostRule(host, config.http_hosts, what="the API of this machine", setting="router.http_hosts")
    return HttpSettings(
        max_requests=config.max_requests,
        max_body_bytes=config.max_body_bytes,
        deadline_s=config.deadline_s,
        arriving_bytes=config.most_arriving_bytes,
        cors_origins=config.cors_origins,
        hosts=hosts if is_guarded else None,
    )


def router_metrics() -> RouterMetrics:
    """The router's metrics in a registry of their own, with this process's memory, CPU and descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    register_build(registry)
    return RouterMetrics(registry)


class ListenedApp(Application, Protocol):
    """What the server needs of an application besides its answers."""

    settings: HttpSettings
    metrics: RouterMetrics


@asynccontextmanager
async def listening(
    app: ListenedApp,
    address: str,
    *,
    drain_s: float,
    is_port_shared: bool = False,
    accept_limits: AcceptLimits | None = None,
    bound: socket.socket | None = None,
    tls: ServerTls | None = None,
) -> AsyncIterator[str]:
    """Serve while the block runs; yields HOST:PORT, with the real port for 0.

    Leaving it takes no new connections, lets open requests finish within drain_s, then cancels them and tells their
    clients. is_port_shared: other workers listen there, too. accept_limits: None: by the limit of open files. bound: a
    socket that listens already. tls: None: connections are plain.
    """
    bound = bound or bind(address, is_port_shared=is_port_shared)
    own = app.settings
    limits = ConnectionLimits(own.max_body_bytes, own.body_s, own.stall_s, id_prefix=own.id_prefix)
    connections = Connections(UnfinishedRequests(own.arriving_bytes, is_shared=own.is_shared))
    acceptor = Acceptor(
        bound,
        lambda: Connection(app, limits, connections),
        limits_of_process() if accept_limits is None else accept_limits,
        app.metrics.connections_refused.inc,
        tls,
    )
    async with running(partial(sweep, connections), "http deadlines", SWEEP_S):
        try:
            yield format_address(*bound.getsockname()[:2])
        finally:
            await _part(connections)
            await acceptor.close()
            await _drain(connections, drain_s)


async def sweep(connections: Connections) -> None:
    """Look at the deadlines of connections until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        now = monotonic()
        for connection in [connection for connection in connections if connection.deadline <= now]:
            _expire(connection)


def _expire(connection: Connection) -> None:
    try:
        connection.expire()
    except Exception:  # those behind it have deadlines, too
        logger.exception("a connection past its deadline failed and is cut")
        connection.abort()


async def _part(connections: Connections) -> None:
    """Answer what clients sent before they could know that the router stops, also on connections that wait to be
    accepted: closing their listener would reset them.
    """
    connections.is_draining = True
    for connection in list(connections):
        connection.drain()
    await asyncio.sleep(PARTING_S)


async def _drain(connections: Connections, drain_s: float) -> None:
    for connection in list(connections):
        connection.drain()
    if not await _are_over(connections, drain_s):
        for connection in list(connections):
            connection.stop()
        if not await _are_over(connections, LAST_WORD_S):
            for connection in list(connections):
                connection.abort()
            await connections.wait_until_none()  # the loop closes them in its next turn


async def _are_over(connections: Connections, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await connections.wait_until_none()
    except TimeoutError:
        return False
    return True


def bind(address: str, *, is_port_shared: bool = False, flag: str = "--http") -> socket.socket:
    """A listening socket. Accepted ones inherit its options. Raises ConfigError that names the flag."""
    try:
        family, where = listening_place(*parse_address(address))
    except OSError as error:
        raise ConfigError(f"{address} is no address of this machine: {error.strerror}; check {flag}") from error
    # asyncio switches Nagle's algorithm off only where the socket says TCP. With it, events may be 40 ms apart.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        bound.setsockopt(socket.IPPROTO_TCP, option, value)
    if is_port_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(where)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; choose another address with {flag}"
        ) from error
    bound.setblocking(False)
    return bound

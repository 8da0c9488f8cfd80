"""Serves calls of trainers over HTTP, where Admin is served: in a router, or in the supervisor of its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdcluster.core.address import is_loopback, parse_address
from pdcluster.settings.config import RouterConfig
from pdcluster_router.admin.operations import Operations
from pdcluster_router.control.access import ControlAccess
from pdcluster_router.control.app import ControlApp
from pdcluster_router.control.calls import TrainerCalls
from pdcluster_router.frontend.server import bind, listening, router_metrics
from pdcluster_router.http.hosts import HostRule
from pdcluster_router.http.tls import ServerTls

# For calls that are open at the end. A rollout that lasts longer stops.
DRAIN_S = 1.0


@asynccontextmanager
async def control_surface(
    operations: Operations, config: RouterConfig, tls: ServerTls | None
) -> AsyncIterator[str | None]:
    """Serve while the block runs; yields its HOST:PORT, None without one. tls: the router's. Raises ConfigError."""
    if config.control is None:
        yield None
        return
    token = config.admin_token()
    host, _ = parse_address(config.control)
    is_guarded = token is None and is_loopback(host)
    hosts = HostRule(host, config.http_hosts, what="the control of this machine", setting="router.http_hosts")
    app = ControlApp(TrainerCalls(operations), ControlAccess(token, hosts if is_guarded else None), router_metrics())
    bound = bind(config.control, flag="--control")
    try:
        async with listening(app, config.control, drain_s=DRAIN_S, bound=bound, tls=tls) as address:
            yield address
    finally:
        await app.close()

"""The console's process: `pdctl console`. A router that has router.console starts it as a child."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdcluster.core.address import is_loopback, parse_address
from pdcluster.processes.tasks import running
from pdcluster.settings.surfaces import SECRET_OF, Exposure, check_exposures
from pdcluster.settings.tls_trust import TlsTrust
from pdcluster_router.console.access import ConsoleAccess
from pdcluster_router.console.app import ConsoleApp
from pdcluster_router.console.feed import ClusterFeed
from pdcluster_router.frontend.file_changes import FileChanges
from pdcluster_router.frontend.server import bind, listening, router_metrics
from pdcluster_router.http.hosts import HostRule
from pdcluster_router.http.tls import server_tls
from pdcluster_router.operate.clients import AdminClients, token_of

# For answers that are under way at the end.
DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """listen_fd: a listening socket that the parent has made; its end of stdin is closed when the parent ends.
    insecure: surfaces that may be open.
    trust: None: routers speak no TLS.
    tls: the page's certificate and key; None: it is plain HTTP.
    """

    listen: str
    admin: str
    token_file: Path | None
    api: str
    hosts: tuple[str, ...] = ()
    listen_fd: int | None = None
    insecure: tuple[str, ...] = ()
    trust: TlsTrust | None = None
    tls: tuple[Path, Path] | None = None


def run(options: ConsoleOptions) -> None:
    """Serve until a signal, or until the parent ends. Raises ConfigError."""
    host, _ = parse_address(options.listen)
    token = token_of(options.token_file)
    exposure = Exposure("console", "--listen", options.listen, token is not None)
    check_exposures([exposure], options.insecure, {SECRET_OF["console"]: "--token-file"})
    hosts = HostRule(host, options.hosts, what="the console", setting="router.console_hosts (pdctl console --host)")
    access = ConsoleAccess(hosts, token, is_open=is_loopback(host) or exposure.is_open)
    asyncio.run(_serve(options, access))


async def _serve(options: ConsoleOptions, access: ConsoleAccess) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tls = server_tls(options.tls)

    def open_clients(warn: Callable[[str], None]) -> AdminClients:
        return AdminClients(options.admin, options.token_file, warn, options.trust)

    feed = ClusterFeed(open_clients)
    app = ConsoleApp(access, open_clients, feed, options.api, router_metrics(), options.trust)
    if options.listen_fd is None:
        bound = bind(options.listen, flag="--listen")
    else:
        bound = socket.socket(fileno=options.listen_fd)
        bound.setblocking(False)
        threading.Thread(target=_watch_parent, args=(loop, stop), daemon=True).start()
    async with AsyncExitStack() as stack:
        if tls is not None:
            follow = partial(FileChanges().follow, "tls", tls.files, tls.use)
            await stack.enter_async_context(running(follow, "changes of certificates"))
        await stack.enter_async_context(feed.running())
        address = await stack.enter_async_context(listening(app, options.listen, drain_s=DRAIN_S, bound=bound, tls=tls))
        if options.listen_fd is None:
            scheme = "http" if tls is None else "https"
            print(f"console at {scheme}://{address}/ for routers at {options.admin}", flush=True)
        await stop.wait()
    app.close()


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    sys.stdin.buffer.read()
    loop.call_soon_threadsafe(stop.set)

"""The console as a child of a router or of its supervisor. A crash of it touches no request.

The parent listens, so the address is known at once and stays the same when the child is started again.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdcluster.core.address import format_address, is_wildcard, loopback_like, parse_address
from pdcluster.settings.config import RouterConfig
from pdcluster_router.frontend.server import bind
from pdcluster_router.http.tls import ServerTls

log = logging.getLogger(__name__)

LOOK_S = 0.5
# Before it is started again, doubled with each failure.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
END_S = 3.0


@asynccontextmanager
async def console(
    config: RouterConfig, admin: str | None, api: str, tls: ServerTls | None
) -> AsyncIterator[str | None]:
    """Run the console while the block runs; yields its HOST:PORT, None without one. Raises ConfigError.

    admin, api: where the router listens.
    tls: its certificate, which the console shows, too, and trusts when it dials the router.
    """
    if config.console is None or admin is None:
        yield None
        return
    with bind(config.console, flag="--console") as bound:
        plain = _argv(config, reached(admin), reached(api), bound.fileno())

        def argv() -> list[str]:
            """By which name it reaches the router follows the certificate, which may change."""
            if tls is None or config.tls_files is None:
                return plain
            cert, key = map(str, config.tls_files)
            return [*plain, "--tls-cert", cert, "--tls-key", key, "--ca", cert, "--tls-name", tls.certificate.name]

        stop = threading.Event()
        keeper = threading.Thread(target=_keep, args=(argv, bound.fileno(), stop), name="console", daemon=True)
        keeper.start()
        try:
            yield format_address(*bound.getsockname()[:2])
        finally:
            stop.set()
            await asyncio.to_thread(keeper.join)


def reached(address: str) -> str:
    """Where this machine reaches what listens at an address."""
    host, port = parse_address(address)
    return format_address(loopback_like(host), port) if is_wildcard(host) else address


def _argv(config: RouterConfig, admin: str, api: str, descriptor: int) -> list[str]:
    argv = [sys.executable, "-m", "pdcluster_router.pdctl", "console", "--admin", admin, "--api", api]
    argv += ["--listen", str(config.console), "--listen-fd", str(descriptor)]
    if config.admin_token_file is not None:
        argv += ["--token-file", str(config.admin_token_file)]
    if config.insecure:
        argv += ["--insecure", ",".join(config.insecure)]
    for host in config.console_hosts:
        argv += ["--host", host]
    return argv


def _keep(argv_now: Callable[[], list[str]], descriptor: int, stop: threading.Event) -> None:
    """Run the child until `stop` is set, and anew where its command line is another one now."""
    pause_s = FIRST_PAUSE_S
    while not stop.is_set():
        argv = argv_now()
        # subprocess does not fork here, which gRPC and uvloop would not expect. The child leaves when its stdin ends.
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(descriptor,), start_new_session=True)
        while child.poll() is None and argv_now() == argv and not stop.wait(LOOK_S):
            pass
        has_changed = child.poll() is None
        _end(child)
        if not stop.is_set() and not has_changed:
            log.error("the console ended with %s and is started again in %g s", child.returncode, pause_s)
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()

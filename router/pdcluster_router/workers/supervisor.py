"""The supervisor of a router's workers: holds ports, starts and restarts workers, serves Admin, drains.

It is on no request's path. Each worker is a whole router; they share only the ports and this process. When the
supervisor dies, its workers die with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from pdcluster.core.errors import ConfigError
from pdcluster.processes.ready import announce
from pdcluster.processes.supervisor import Facts, Spec, Supervisor
from pdcluster.processes.tasks import running
from pdcluster.settings.config import LoadedSection, RouterConfig, set_library_environment
from pdcluster.telemetry.health import health_port
from pdcluster.telemetry.log import resolve_format, writer_of
from pdcluster_router.console.child import console
from pdcluster_router.control.serve import control_surface
from pdcluster_router.frontend.file_changes import FileChanges
from pdcluster_router.frontend.health import RouterHealth
from pdcluster_router.http.tls import ServerTls, server_tls
from pdcluster_router.workers import ports
from pdcluster_router.workers.fleet import Fleet
from pdcluster_router.workers.worker import WorkerIdentity

# The program of a worker, whether started afresh or from the spare.
PROGRAM = "pdcluster_router.cli"
SPARE = "pdcluster_router.spare"

logger = logging.getLogger(__name__)

READY_S = 60.0
# Extra time beyond its own drain before a worker is killed.
GRACE_S = 1.0

# Crashes of one worker within a minute; after more the router ends.
RESTARTS = 5

# Pause before a dead worker is restarted, doubled with each crash. Short, because the others carry its load.
FIRST_DELAY_S = 0.02

SOCKET_NAME = "control"


def run(loaded: LoadedSection[RouterConfig]) -> int:
    """Serve until a signal. Returns 0 after a drain, 1 when a worker was killed or crashed too often."""
    return asyncio.run(_serve(loaded))


async def _serve(loaded: LoadedSection[RouterConfig]) -> int:
    config = loaded.config
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    name = config.name or f"router-{secrets.token_hex(3)}"
    fleet, tls = Fleet(config.workers, time.monotonic), server_tls(config.tls_files)
    supervisor = Supervisor(logger.warning, _forward, READY_S, RESTARTS, FIRST_DELAY_S)
    async with AsyncExitStack() as stack:
        http, grpc = await _hold_ports(config, stack)
        control = await stack.enter_async_context(_control(fleet))
        health = RouterHealth(fleet.readiness, fleet.exposition, tuple(config.warnings()))
        if tls is not None:
            follow = partial(FileChanges(events=fleet.log).follow, "tls", tls.files, tls.use)
            await stack.enter_async_context(running(follow, "changes of certificates"))
        admin = await _serve_admin(config, fleet, name, health, stack, tls)
        console_address = await stack.enter_async_context(console(config, admin, http, tls))
        control_address = await stack.enter_async_context(control_surface(fleet, config, tls))
        health_address = stack.enter_context(health_port(config.health, health.probes))
        await stack.enter_async_context(running(health.keep, "health"))
        specs = [
            worker_spec(loaded, f"{name}-{i}", WorkerIdentity(i, config.workers, control), http, grpc)
            for i in range(config.workers)
        ]
        stack.push_async_callback(supervisor.stop, [[spec.name for spec in specs]])
        started = asyncio.ensure_future(_all_started([supervisor.start(spec) for spec in specs]))
        code = await _until(stop, started)
        if code is not None:
            announce(
                config.ready_fd, http, name=name, grpc=grpc, admin=admin, workers=config.workers, health=health_address,
                console=console_address, control=control_address, tls=tls is not None,
            )  # fmt: skip
            scheme = "http" if tls is None else "https"
            logger.info("router %s serves %s://%s with %d workers", name, scheme, http, config.workers)
            if config.spare:
                await supervisor.keep_spare((sys.executable, "-m", SPARE))
            code = await _until(stop, asyncio.ensure_future(_crashes(supervisor)))
        logger.info("draining %d workers", config.workers)
    return 1 if supervisor.killed else code or 0


async def _until(stop: asyncio.Event, work: asyncio.Future[int]) -> int | None:
    """Run the work until `stop` is set; None then. Raises what the work raised."""
    stopped = asyncio.create_task(stop.wait())
    work.add_done_callback(lambda _: stopped.cancel())
    try:
        await asyncio.gather(stopped, return_exceptions=True)
        return work.result() if work.done() else None
    finally:
        stopped.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _all_started(starts: list[Coroutine[None, None, Facts]]) -> int:
    async with asyncio.TaskGroup() as group:
        for start in starts:
            group.create_task(start)
    return 0


async def _crashes(supervisor: Supervisor) -> int:
    logger.error("the router ends: %s", await supervisor.failed())
    return 1


async def _hold_ports(config: RouterConfig, stack: AsyncExitStack) -> tuple[str, str | None]:
    held, http = ports.hold(config.http, "--http")
    stack.callback(held.close)
    if config.grpc is None:
        return http, None
    held, grpc = ports.hold(config.grpc, "--grpc")
    stack.callback(held.close)
    return http, grpc


@asynccontextmanager
async def _control(fleet: Fleet) -> AsyncIterator[Path]:
    """The socket that workers connect to, in a directory that only this user can enter."""
    with tempfile.TemporaryDirectory(prefix="pdcluster-") as folder:
        path = Path(folder) / SOCKET_NAME
        try:
            server = await asyncio.start_unix_server(fleet.serve, str(path))
        except OSError as error:
            raise ConfigError(
                f"the control socket {path} cannot be made: {error}; set TMPDIR to a shorter path on a local disk"
            ) from error
        try:
            yield path
        finally:
            server.close()
            fleet.close()


async def _serve_admin(
    config: RouterConfig, fleet: Fleet, name: str, health: RouterHealth, stack: AsyncExitStack, tls: ServerTls | None
) -> str | None:
    if config.admin is None:
        return None
    set_library_environment(
        {"GRPC_ENABLE_FORK_SUPPORT": "0"}
    )  # workers are forked right after, and nothing of gRPC is used in between
    from pdcluster_router.admin import grpc as admin_api  # brings grpc

    token = config.admin_token()
    return await stack.enter_async_context(admin_api.listening(fleet, config.admin, token, name, health, tls=tls))


def worker_spec(
    loaded: LoadedSection[RouterConfig], name: str, worker: WorkerIdentity, http: str, grpc: str | None
) -> Spec:
    """A worker's command: this process's options with its own changes."""
    own: dict[str, object] = {
        "router.name": name,
        "router.worker": worker,
        "router.http": http,
        "router.grpc": grpc or "none",
        "router.admin": "none",
        "router.console": "none",
        "router.control": "none",
        "router.health": "none",
        "router.scaler": loaded.config.scaler if worker.number == 0 and loaded.config.scaler else "none",
        "router.auto_roles": loaded.config.auto_roles and worker.number == 0,
        "router.log.format": resolve_format(loaded.config.log.format, sys.stderr),
    }
    given = {path: value for path, value in loaded.flags.items() if path != "router.ready_fd"} | own
    argv = [sys.executable, "-m", PROGRAM]
    if loaded.file is not None:
        argv += ["--config", str(loaded.file)]
    argv += ["--name", name]
    for path, value in given.items():
        if path != "router.name":
            argv += ["--set", f"{path}={value}"]
    return Spec(name, tuple(argv), loaded.config.drain_s + GRACE_S)


def _forward(name: str, line: str) -> None:
    """Forward a line. Workers' lines carry their names already."""
    writer = writer_of(sys.stderr)
    if writer is not None:
        writer.write(line)

"""The router process: bootstrap, links, dispatch, HTTP and gRPC, served until SIGTERM or SIGINT, then drained."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import uvloop
import zmq
from prometheus_client import generate_latest

from pdcluster.api.structured import library
from pdcluster.bootstrap.agent import watch
from pdcluster.bootstrap.credentials import BootstrapCredentials, Identity, bootstrap_credentials
from pdcluster.bootstrap.demand_client import DemandExchange
from pdcluster.core.errors import PdclusterError
from pdcluster.processes.garbage import collect_seldom
from pdcluster.processes.ready import announce
from pdcluster.processes.tasks import beside, running
from pdcluster.settings.changed_files import ChangedFiles
from pdcluster.settings.config import RouterConfig, cache_directory
from pdcluster.telemetry.health import Verdict, health_port
from pdcluster.telemetry.metrics import (
    ExplainMetrics,
    FileMetrics,
    HoldMetrics,
    RouterMetrics,
    TlsMetrics,
    WorkerMetrics,
)
from pdcluster.telemetry.tracing import open_tracer
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.admin.roles import RoleController, RoleSettings
from pdcluster_router.admin.service import LOOK_S, Admin
from pdcluster_router.cluster.events import EventLog
from pdcluster_router.cluster.metrics import IndexCollector, NodeCollector
from pdcluster_router.cluster.models import ModelRegistry
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.console.child import console
from pdcluster_router.control.serve import control_surface
from pdcluster_router.core.kept_heap import keep_heap
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.core.tenants import Tenants, read_tenants
from pdcluster_router.core.tracing import Tracing
from pdcluster_router.explain.recorder import Explainer
from pdcluster_router.frontend.app import Exposition, create_app
from pdcluster_router.frontend.file_changes import FileChanges
from pdcluster_router.frontend.grammar_pool import shared_pool
from pdcluster_router.frontend.health import RouterHealth, readiness_of
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import http_settings, listening, router_metrics
from pdcluster_router.http.tls import ServerTls, server_tls
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.pull import PullRule
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.demand import PoolLevels
from pdcluster_router.queueing.headroom import Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.queueing.pool_metrics import PoolCollector
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings
from pdcluster_router.workers.endpoint import WorkerEndpoint
from pdcluster_router.workers.worker import WorkerIdentity, show

logger = logging.getLogger(__name__)

COMPILE_LOOK_S = 0.1
# For the process that compiles policies: part of a minute, perhaps behind another one (`kernel_cache.WAIT_S`).
COMPILE_S = 360.0

WARM_S = 2.0
WARM_LOOK_S = 0.01


def run(config: RouterConfig) -> int:
    """Serve until a signal. Returns 0 after a drain, 1 when a part of the router failed."""
    keep_heap()
    return uvloop.run(_serve(config))


async def _serve(config: RouterConfig) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    worker = WorkerIdentity.parse(config.worker) if config.worker is not None else None
    config = config if worker is None else worker.share(config)
    me = Peer(config.name or f"router-{secrets.token_hex(3)}", secrets.token_hex(8))
    if worker is not None:
        show(me.node)
    async with AsyncExitStack() as stack:
        parts = assemble(config, me, worker, stack)
        tasks = Tasks(stop, stack)
        cluster, models, dispatch = parts.cluster, parts.models, parts.front.dispatch
        health = health_of(parts.front, tuple(config.warnings()))
        health_address = stack.enter_context(health_port(config.health, health.probes))
        await tasks.run(health.keep())
        await _follow_files(parts, stack)
        for work in (
            cluster.follow(watch(config.bootstrap, parts.credentials)),
            models.keep_loaded(),
            dispatch.waiting.follow(cluster),
            parts.demands.keep(),
            compile_choices(),
        ):
            await tasks.run(work)
        front = parts.front if worker is None else await _join(worker, me, parts, tasks, health)
        address, grpc_address = await stack.enter_async_context(_open(front, config, health))
        scaler_address = await _serve_scaler(parts.pools, config, stack)
        admin_address = await _serve_admin(parts, me.node, health, config, stack)
        console_address = await stack.enter_async_context(console(config, admin_address, address, parts.front.tls))
        surface = control_surface(parts.admin, config, parts.front.tls)
        control_address = await stack.enter_async_context(surface)
        if config.auto_roles:
            await tasks.run(keep_roles(parts.admin, RoleController(RoleSettings())))
        collect_seldom()
        announce(
            config.ready_fd, address, name=me.node, grpc=grpc_address, admin=admin_address, health=health_address,
            console=console_address, control=control_address, scaler=scaler_address,
            tls=parts.front.tls is not None,
        )  # fmt: skip
        scheme = "http" if parts.front.tls is None else "https"
        also = f" and grpc://{grpc_address}" if grpc_address else ""
        logger.info("router %s serves %s://%s%s", me.node, scheme, address, also)
        await stop.wait()
        health.is_draining = True
        has_failed = tasks.has_failed
        logger.info("draining: %d requests are open", cluster.ledger.num_requests())
    return 1 if has_failed else 0


@dataclass(frozen=True, slots=True)
class RouterComponents:
    """The parts of a router before it runs."""

    cluster: NodeTable
    models: ModelRegistry
    admin: Admin
    settings: DispatchSettings
    front: FrontDoors
    demands: DemandExchange
    pools: PoolCollector
    credentials: BootstrapCredentials | None
    tenants_file: ChangedFiles[Tenants] | None


def assemble(config: RouterConfig, me: Peer, worker: WorkerIdentity | None, stack: AsyncExitStack) -> RouterComponents:
    """Build them.

    stack: closes what must be closed.
    """
    events = EventLog()
    cluster = _cluster(config, me, events, stack)
    models = ModelRegistry(cluster, config.tokenizer, config.tool_format, config.reasoning, config.user_control_tokens)
    selector = _selector(config, cluster)
    tenants_file = _tenants_file(config, worker)
    tenants = Tenants() if tenants_file is None else tenants_file.first
    metrics = router_metrics()
    hold_metrics = HoldMetrics(metrics.registry)
    metrics.registry.register(NodeCollector(cluster))
    metrics.registry.register(IndexCollector(cluster.caches))
    settings = dispatch_settings(config, is_shared=tenants.is_configured)
    explainer = Explainer(ExplainMetrics(metrics.registry), time.time)
    dispatch = Dispatch(cluster, models, selector, settings, metrics=hold_metrics, explainer=explainer)
    admin = Admin(cluster, dispatch, selector.holder, events, explainer, time.monotonic)
    credentials = bootstrap_credentials(config.security.cluster_keys(), Identity("router", me.node))
    demands = DemandExchange(config.bootstrap, lambda: dispatch.demand(me.incarnation), credentials=credentials)
    pools = PoolCollector(cluster.view, demands.all, PoolLevels(config.itl_s or 0.0))
    metrics.registry.register(pools)
    places = Places(config.max_requests, tenants, hold_metrics)
    files = FileChanges(FileMetrics(metrics.registry), events)
    tls = None if config.tls_files is None else server_tls(config.tls_files, TlsMetrics(metrics.registry))
    front = FrontDoors(dispatch, metrics, places, tracing=_tracing(config, me, stack), files=files, tls=tls)
    return RouterComponents(cluster, models, admin, settings, front, demands, pools, credentials, tenants_file)


async def _follow_files(parts: RouterComponents, stack: AsyncExitStack) -> None:
    """Read again what changes, until the stack ends."""
    front, tenants = parts.front, parts.tenants_file
    if tenants is not None:
        follow = partial(front.files.follow, "tenants", tenants, front.places.use)
        await stack.enter_async_context(running(follow, "changes of tenants"))
    if front.tls is not None:
        follow_tls = partial(front.files.follow, "tls", front.tls.files, front.tls.use)
        await stack.enter_async_context(running(follow_tls, "changes of certificates"))


def _tenants_file(config: RouterConfig, worker: WorkerIdentity | None) -> ChangedFiles[Tenants] | None:
    if config.tenants is None:
        return None
    num_workers = worker.count if worker is not None else 1
    read = partial(read_tenants, config.tenants, num_workers, config.security.cluster_keys())
    return ChangedFiles([config.tenants], read)


def _tracing(config: RouterConfig, me: Peer, stack: AsyncExitStack) -> Tracing | None:
    tracer = open_tracer(config.tracing, "router", me.node, time.monotonic, time.time)
    if tracer is None:
        return None
    stack.push_async_callback(asyncio.to_thread, tracer.close)
    return Tracing(tracer, config.tracing.sample_percent / 100)


def _cluster(config: RouterConfig, me: Peer, events: EventLog, stack: AsyncExitStack) -> NodeTable:
    wire = wire_settings(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, 0)
    cluster = NodeTable(me, context=context, settings=wire, events=events, index_blocks=config.index_blocks)
    stack.callback(cluster.close)
    return cluster


def _selector(config: RouterConfig, cluster: NodeTable) -> PolicySelector:
    return PolicySelector(
        _policies(config),
        cluster.glance,
        cluster.held,
        force=config.mode,
        fallback=config.fallback,
        itl_s=config.itl_s or 0.0,
        expected=cluster.expected,
    )


async def compile_choices() -> None:
    """Compile policies in another process, which holds no lock of ours. Requests are routed meanwhile, more slowly. The
    process has its own session, so Ctrl-C reaches this router only.
    """
    cache_dir = cache_directory()
    if not await asyncio.to_thread(compiled.is_kept, cache_dir):
        compiling, until = _compiling(), time.monotonic() + COMPILE_S
        try:
            status = compiling.poll()
            while status is None and time.monotonic() < until:
                await asyncio.sleep(COMPILE_LOOK_S)
                status = compiling.poll()
        finally:
            compiling.kill()
            compiling.wait()
        if status != 0:
            ended = f"did not end within {COMPILE_S:g} s" if status is None else f"ended with {status}"
            logger.warning(
                "choices of nodes are weighed in plain Python, which is slower: the process that compiles them %s",
                ended,
            )
            return
    await asyncio.to_thread(compiled.load, cache_dir)


def _compiling() -> subprocess.Popen[bytes]:
    """Not asyncio's: uvloop forks, and gRPC kills some children at a fork. This one starts without a fork."""
    return subprocess.Popen([sys.executable, "-m", compiled.__name__], start_new_session=True)


async def _join(
    worker: WorkerIdentity, me: Peer, parts: RouterComponents, tasks: Tasks, health: RouterHealth
) -> FrontDoors:
    """Join a group of workers: answer the supervisor, and know the cluster before listening."""
    front = parts.front
    endpoint = WorkerEndpoint(parts.admin, front.metrics.registry, health.readiness)
    await tasks.run(endpoint.serve(worker, me.incarnation))
    WorkerMetrics(front.metrics.registry).warm_seconds.set(await warm(parts.cluster, front.dispatch))
    return replace(front, worker=worker, exposition=endpoint.exposition)


async def _serve_admin(
    parts: RouterComponents, name: str, health: RouterHealth, config: RouterConfig, stack: AsyncExitStack
) -> str | None:
    if config.admin is None:
        return None
    from pdcluster_router.admin import grpc  # brings grpc, as the gRPC front door does

    token, tls = config.admin_token(), parts.front.tls
    return await stack.enter_async_context(grpc.listening(parts.admin, config.admin, token, name, health, tls=tls))


async def _serve_scaler(pools: PoolCollector, config: RouterConfig, stack: AsyncExitStack) -> str | None:
    if config.scaler is None:
        return None
    from pdcluster_router.admin import scaler  # brings grpc

    return await stack.enter_async_context(scaler.listening(pools.signals, config.scaler, config.scaler_token()))


@dataclass(frozen=True, slots=True)
class FrontDoors:
    """HTTP and gRPC.

    worker: None: the only one.
    exposition: None: of this process.
    tracing: None: no request is traced.
    files: what became of changes of files that are read while it runs.
    tls: None: connections are plain.
    """

    dispatch: Dispatch
    metrics: RouterMetrics
    places: Places
    worker: WorkerIdentity | None = None
    exposition: Exposition | None = None
    tracing: Tracing | None = None
    files: FileChanges = field(default_factory=FileChanges)
    tls: ServerTls | None = None

    def readiness(self, *, is_draining: bool) -> Verdict:
        return readiness_of(self.dispatch, is_draining=is_draining, warnings=self.files.warnings())


def health_of(front: FrontDoors, warnings: tuple[str, ...] = ()) -> RouterHealth:
    """Probes of this process alone. warnings: of its settings."""

    async def readiness() -> Verdict:
        return front.readiness(is_draining=health.is_draining)

    async def exposition() -> bytes:
        return generate_latest(front.metrics.registry)

    health = RouterHealth(readiness, exposition, warnings)
    return health


async def warm(cluster: NodeTable, dispatch: Dispatch) -> float:
    """Wait until the nodes and their caches are known, at most WARM_S, and return the seconds.

    So no client meets a worker that knows nothing while others serve. There may be no nodes yet.
    """
    began = time.monotonic()
    while (taken := time.monotonic() - began) < WARM_S:
        if dispatch.readiness().can_serve and all(
            cluster.caches.is_exact(card.incarnation) for card in cluster.listed()
        ):
            break
        await asyncio.sleep(WARM_LOOK_S)
    return taken


@asynccontextmanager
async def _open(front: FrontDoors, config: RouterConfig, health: RouterHealth) -> AsyncIterator[tuple[str, str | None]]:
    """Serve HTTP and gRPC while the block runs. Both drain at the same time."""
    dispatch, metrics, places, worker = front.dispatch, front.metrics, front.places, front.worker
    id_prefix, is_shared = (worker.id_prefix, True) if worker is not None else ("", False)
    settings = replace(http_settings(config), id_prefix=id_prefix, is_shared=places.is_shared)
    app = create_app(
        dispatch, settings, metrics, places, front.exposition,
        lambda: front.readiness(is_draining=health.is_draining), front.tracing,
    )  # fmt: skip
    doors = [AsyncExitStack()]
    if not library.is_missing():  # else each request for structured output is told so
        shared_pool().start()
    try:
        address = await doors[0].enter_async_context(
            listening(app, config.http, drain_s=config.drain_s, is_port_shared=is_shared, tls=front.tls)
        )
        grpc_address = None
        if config.grpc is not None:
            from pdcluster_router.frontend import grpc  # half of the router's start, and not everyone wants it

            doors.append(AsyncExitStack())
            grpc_settings = grpc.GrpcSettings(
                max_message_bytes=config.max_body_bytes,
                arriving_bytes=config.most_arriving_bytes,
                deadline_s=config.deadline_s,
                id_prefix=id_prefix,
                is_port_shared=is_shared,
            )
            servicer = grpc.Inference(dispatch, grpc_settings, metrics, places, front.tracing)
            grpc_address = await doors[1].enter_async_context(
                grpc.listening(servicer, dispatch, config.grpc, grpc_settings, drain_s=config.drain_s, tls=front.tls)
            )
        yield address, grpc_address
    finally:
        await asyncio.gather(*(door.aclose() for door in doors))


async def keep_roles(admin: Admin, controller: RoleController) -> None:
    """Look every second and carry out the controller's flips."""
    while True:
        await asyncio.sleep(LOOK_S)
        flip = controller.decide(time.monotonic(), admin.cluster.view())
        if flip is None:
            continue
        admin.log.add("auto-role", flip.node.name, f"{flip.node.role} should become {flip.role}: {flip.why}")
        try:
            await admin.set_role(flip.node.endpoint.incarnation, flip.role, flip.why)
        except PdclusterError as error:
            logger.warning("node %s keeps its role: %s", flip.node.name, error)


def _policies(config: RouterConfig) -> PolicyHolder:
    shadow = config.shadow_policy
    return PolicyHolder(
        make_policy(config.policy),
        make_policy(shadow) if shadow is not None else None,
        PullRule(config.pull, config.pull_min_tokens),
    )


def wire_settings(config: RouterConfig) -> WireSettings:
    return WireSettings(
        heartbeat_s=config.heartbeat_s, lease_s=config.lease_s, cluster_keys=config.security.cluster_keys()
    )


def dispatch_settings(config: RouterConfig, *, is_shared: bool = False) -> DispatchSettings:
    own = config.stages
    stages = StageDeadlines(
        queue_s=own.queue_s, liveness_s=own.liveness_s, handshake_s=own.handshake_s, transfer_s=own.transfer_s
    )
    hold, slo = config.hold, config.slo
    return DispatchSettings(
        retries=config.retry_budget,
        hold_s=config.stages.queue_s,
        stages=stages,
        hold=HoldLimits(
            count=hold.requests,
            size_bytes=hold.memory_bytes,
            age_s=hold.age_s,
            patience_s=hold.patience_s,
            floor=hold.floor_percent / 100,
            is_shared=is_shared,
        ),
        headroom=Headroom(backlog_s=hold.backlog_s if slo.ttft_s is None else min(hold.backlog_s, slo.ttft_s / 4)),
        slo=Slo(ttft_s=slo.ttft_s, margin=slo.margin_percent / 100),
        from_zero=config.from_zero,
        weights_change=config.weights_change,
    )


class Tasks:
    """Tasks that must not end before the router. If one fails, it is logged and the process stops.

    stack: ends them, the latest first.
    """

    def __init__(self, stop: asyncio.Event, stack: AsyncExitStack) -> None:
        self._stop = stop
        self._stack = stack
        self.has_failed = False

    async def run(self, work: Coroutine[None, None, None]) -> None:
        await self._stack.enter_async_context(beside(work, getattr(work, "__qualname__", "a task"), self._failed))

    def _failed(self, error: BaseException) -> None:
        self.has_failed = True
        logger.error("the router stops, as a task of it failed: %s", error)
        self._stop.set()

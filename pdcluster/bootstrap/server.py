"""The bootstrap service: the store behind gRPC, with health and reflection. One asyncio loop owns the store.

Nothing is kept on disk. After a restart, every node registers again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdcluster.bootstrap.card_messages import adapters_from_proto, card_from_proto, role_from_proto, snapshot_to_proto
from pdcluster.bootstrap.credentials import BootstrapCredentials, Identity, Kind, bootstrap_credentials, caller_of
from pdcluster.bootstrap.demand import DemandStore, demand_from_proto, demand_to_proto
from pdcluster.bootstrap.health import BootstrapHealth
from pdcluster.bootstrap.store import NodeStore, StoreSettings
from pdcluster.core.address import format_address, parse_address
from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.processes.ready import announce
from pdcluster.processes.tasks import running
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs
from pdcluster.rpc.server_options import server_options
from pdcluster.rpc.status import retry_metadata, status_of
from pdcluster.settings.config import BootstrapConfig
from pdcluster.telemetry.health import BEAT_S, health_port
from pdcluster.transfer.backends.base import Peer

SERVICE = pb.DESCRIPTOR.services_by_name["Bootstrap"].full_name
STOP_GRACE_S = 1.0
# Looks at the leases while one lasts.
LOOKS = 20
MAX_CARD_BYTES = 256 << 10
MAX_CONCURRENT_RPCS = 20_000
_OPTIONS = (
    *server_options(num_connections=MAX_CONCURRENT_RPCS),
    ("grpc.max_receive_message_length", MAX_CARD_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
log = logging.getLogger(__name__)


class Servicer(stubs.BootstrapServicer):
    """Translates calls to the store, and tells watchers when its version moved."""

    def __init__(self, store: NodeStore, beat: Callable[[], None], *, is_secured: bool = False) -> None:
        """beat: called in every turn. is_secured: callers have certificates, and may say what these allow."""
        self._store, self._beat, self._is_secured = store, beat, is_secured
        self._demands = DemandStore(store.lease_s)
        self._told = store.version
        self._changed = asyncio.Event()
        self._stopping = False

    async def _require(self, context: grpc.aio.ServicerContext, kind: Kind, name: str | None = None) -> None:
        """Abort a call of another process than that."""
        caller = caller_of(context.auth_context()) if self._is_secured else None
        if not self._is_secured or (caller is not None and caller.kind == kind and name in (None, caller.name)):
            return
        who = "no process of pdcluster" if caller is None else f"{caller.kind} {caller.name}"
        wanted = f"a {kind}" if name is None else f"{kind} {name}"
        why = f"this certificate is of {who:.200}; only {wanted:.200} may say that"
        log.warning("refused a call: %s", why)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext) -> pb.RegisterReply:
        await self._require(context, "node", request.card.node)
        try:
            card = card_from_proto(request.card)
            self._store.register(card, again=request.again)
        except PdclusterError as error:
            log.warning("refused node %.128r: %s", request.card.node, error)
            await context.abort(status_of(error), str(error), retry_metadata(error))
        self.notify()
        log.info("node %s (%s) registered at %s, boot %s", card.node, card.role, card.address, card.incarnation)
        return pb.RegisterReply(lease_s=self._store.lease_s)

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: grpc.aio.ServicerContext) -> pb.KeepAliveReply:
        await self._require(context, "node", request.node)
        try:
            peer = Peer(request.node, request.incarnation)
            known = self._store.keep_alive(
                peer,
                role=role_from_proto(request.role),
                draining=request.draining,
                adapters=adapters_from_proto(request.adapters),
                weights_share=request.weights_share if request.HasField("weights_share") else None,
            )
        except PdclusterError as error:
            await context.abort(status_of(error), str(error))
        self.notify()
        return pb.KeepAliveReply(known=known, lease_s=self._store.lease_s)

    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveReply:
        await self._require(context, "node", request.node)
        self._store.leave(Peer(request.node, request.incarnation))
        self.notify()
        log.info("node %.128s left", request.node)
        return pb.LeaveReply()

    async def ShareDemand(
        self, request: pb.ShareDemandRequest, context: grpc.aio.ServicerContext
    ) -> pb.ShareDemandReply:
        await self._require(context, "router")
        try:
            others = self._demands.share(demand_from_proto(request.demand))
        except PdclusterError as error:
            await context.abort(status_of(error), str(error))
        return pb.ShareDemandReply(others=map(demand_to_proto, others))

    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Snapshot]:
        seen = None
        while not self._stopping:
            if seen != self._store.version:
                seen = self._store.version
                yield snapshot_to_proto(self._store.snapshot())
            else:
                await self._changed.wait()

    async def expire_forever(self) -> None:
        """Notice leases that end."""
        while True:
            for peer in self._store.expire():
                log.warning("node %s, boot %s, is silent: its lease ended", peer.node, peer.incarnation)
            self.notify()
            self._beat()
            await asyncio.sleep(min(self._store.lease_s / LOOKS, BEAT_S))

    def stop(self) -> None:
        """End the watches."""
        self._stopping = True
        self._changed.set()

    def notify(self) -> None:
        """Wake the watchers when the version moved."""
        if self._told != self._store.version:
            self._told = self._store.version
            self._changed.set()
            self._changed = asyncio.Event()


@asynccontextmanager
async def serving(
    listen: str,
    settings: StoreSettings,
    health: BootstrapHealth | None = None,
    credentials: BootstrapCredentials | None = None,
) -> AsyncIterator[str]:
    """Serve while the block runs. Yields the address with the bound port. credentials: None: to everybody."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
    store = NodeStore(settings, AwakeClock(settings.lease_s / LOOKS * 2))
    health = health or BootstrapHealth()
    servicer = Servicer(store, health.pulse.beat, is_secured=credentials is not None)
    stubs.add_BootstrapServicer_to_server(servicer, server)
    health_servicer = grpc_health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bind(server, listen, credentials)
    await server.start()
    for service in ("", SERVICE):
        await health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health.store = store
    try:
        async with running(servicer.expire_forever, "bootstrap leases"):
            try:
                yield address
            finally:
                await health_servicer.enter_graceful_shutdown()
    finally:
        servicer.stop()
        await server.stop(STOP_GRACE_S)


async def serve(config: BootstrapConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Announces the bound address."""
    settings = StoreSettings(lease_s=config.lease_s, max_nodes=config.max_nodes)
    health = BootstrapHealth()
    credentials = bootstrap_credentials(config.security.cluster_keys(), Identity("bootstrap", config.listen))
    with health_port(config.health, health.probes) as health_address:
        async with serving(config.listen, settings, health, credentials) as address:
            announce(config.ready_fd, address, name="bootstrap", health=health_address)
            log.info("bootstrap serves %s", address)
            await stop.wait()
            health.store = None


def run(config: BootstrapConfig) -> int:
    """The process: serve until SIGTERM or SIGINT. Returns exit code 0."""
    return asyncio.run(_run(config))


async def _run(config: BootstrapConfig) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop)
    return 0


def _bind(server: grpc.aio.Server, listen: str, credentials: BootstrapCredentials | None) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials.of_server())
    except RuntimeError as error:
        raise ConfigError(
            f"the bootstrap cannot listen on {listen}: {error}; choose another --listen address"
        ) from error
    return format_address(parse_address(listen)[0], port)

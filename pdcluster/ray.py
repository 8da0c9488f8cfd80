"""pdcluster on Ray Serve, for `serve run pdcluster.ray:build_pd_app`, `serve deploy` with a YAML, and RayService.

Ray places, restarts and scales; what is placed are this project's own processes. A replica is a thin supervisor: it
starts one process, is healthy while the process runs and is alive, and lets it drain when the replica goes. KV and
tokens never pass through Ray. Clients reach the router through Ray's proxy or at its own address (`/-/pdcluster`).

Children are started by the loop that runs a replica's code, never in another thread: the kernel ends a child with the
thread that started it, and that loop's thread lives as long as the actor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, ClassVar

import aiohttp
import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pdcluster.core.address import format_address
from pdcluster.core.errors import ConfigError, PdclusterError, Unavailable
from pdcluster.core.messages import Role
from pdcluster.launch.ray_args import (
    GRACE_S,
    ActorOptions,
    PdArgs,
    PoolArgs,
    bootstrap_command,
    key_environment,
    node_command,
    parse_args,
    read_args,
    router_command,
)
from pdcluster.launch.ray_process import HEALTH_S, KILL_GRACE_S, LOOK_S, LOOK_WITHIN_S, ServedProcess
from pdcluster.launch.ray_weights import RENEW_S, RolloutArgs, WeightsRoller, read_rollout, rollout_command
from pdcluster.launch.targets import Target, reachable, target_of
from pdcluster.processes.listening import listening_place
from pdcluster.processes.supervisor import Facts
from pdcluster.rpc.scaling import wanted_nodes

log = logging.getLogger("ray.serve")

BOOTSTRAP, ROUTER = "Bootstrap", "Router"
NAMES: dict[Role, str] = {"prefill": "Prefill", "decode": "Decode", "mixed": "Mixed"}
HEAD = "node:__internal_head__"
# What replicas ask Ray for unless told: together they fit a machine of two cores.
NUM_CPUS, HEAD_CPUS = 0.5, 0.1
LOOKS: dict[str, Any] = {"health_check_period_s": HEALTH_S, "health_check_timeout_s": LOOK_WITHIN_S}
# How often replicas tell the wanted number, and how long Ray looks back; the second must be longer.
METRICS_S, LOOK_BACK_S = 2.0, 10.0
SETTLE_S = 300.0
# Replies keep neither these nor what Ray's proxy writes itself.
NOT_PASSED_ON = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "upgrade",
        "te",
        "trailer",
        "host",
        "date",
        "server",
        "x-request-id",
    )
)
NOT_SENT_ON = NOT_PASSED_ON - {"x-request-id"}
# Of Ray's own store, where the application's key is.
KEPT_IN = b"pdcluster"
# A replica that rolls out weights and is gone holds others up so long.
TURN_S = 5 * RENEW_S
# Where Prometheus finds all processes, and a client the routers' own addresses, in labels that begin so.
ADDRESSES, META = "/-/pdcluster", "__meta_pdcluster_"


def _host() -> str:
    """This machine's address in the Ray cluster."""
    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)


def _bootstrap_address(port: int) -> str:
    """The registry is on the head node. Raises Unavailable while Ray names none."""
    for node in ray.nodes():
        if node["Alive"] and HEAD in node["Resources"]:
            return format_address(str(node["NodeManagerAddress"]), port)
    raise Unavailable("Ray has no head node now; the replica tries again")


def _cluster_key(application: str) -> str:
    """Of an application, for as long as the Ray cluster lives. The first replica makes it.

    It stands in no argument: so a redeploy starts only what changed, and Ray's dashboard does not show it.
    """
    name = f"{application}/cluster-key".encode()
    internal_kv._internal_kv_put(name, secrets.token_hex(32).encode(), overwrite=False, namespace=KEPT_IN)
    found = internal_kv._internal_kv_get(name, namespace=KEPT_IN)
    if found is None:
        raise Unavailable("Ray does not tell the cluster's key now; the replica tries again")
    return str(found.decode())


def _take_turn(name: bytes, replica: bytes) -> bool:
    """Whether no other replica has it. One that ends leaves it to those that look TURN_S later."""
    own = replica + f" {time.time():.0f}".encode()
    if not internal_kv._internal_kv_put(name, own, overwrite=False, namespace=KEPT_IN):
        return True
    found = internal_kv._internal_kv_get(name, namespace=KEPT_IN) or own
    holder, _, since = found.partition(b" ")
    if holder != replica and time.time() - float(since) < TURN_S:
        return False
    internal_kv._internal_kv_put(name, own, overwrite=True, namespace=KEPT_IN)
    return True


def _end_turn(name: bytes, replica: bytes) -> None:
    """Another replica's turn stays."""
    found = internal_kv._internal_kv_get(name, namespace=KEPT_IN) or b""
    if found.partition(b" ")[0] == replica:
        internal_kv._internal_kv_del(name, namespace=KEPT_IN)


class ReplicaOfProcess:
    """What all replicas share: the process's life is the replica's.

    Ray calls `reconfigure` before the first request, and again when user_config changed: then the process drains and
    comes back with the new settings, one replica after another, and nothing else of the application is touched.
    """

    component: ClassVar[str]
    # What user_config may have.
    changeable: ClassVar[frozenset[str]] = frozenset(("settings",))
    # Labels for clients, by the fact of each.
    shown: ClassVar[Mapping[str, str]] = {}

    def __init__(self, args: dict[str, Any]) -> None:
        self.args, self.replica, self.host = parse_args(args), serve.get_replica_context(), _host()
        self.process: ServedProcess | None = None
        self._settings: dict[str, Any] | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        if user_config.keys() - self.changeable:
            allowed = " and ".join(sorted(self.changeable))
            raise ConfigError(f"user_config has {', '.join(user_config)}; only {allowed} can be changed by it")
        settings = user_config.get("settings") or {}
        if settings == self._settings:
            return
        before, self.process = self.process, None  # nobody misses it while it drains
        if before is not None:
            await before.stop()
        self.process = await self.begin(settings)
        self._settings = settings

    async def begin(self, settings: dict[str, Any]) -> ServedProcess:
        """Start the process.

        settings: of user_config, which count more than those of the arguments.
        """
        raise NotImplementedError

    async def key(self) -> dict[str, str]:
        """Variables that give the process the cluster's key."""
        return await asyncio.to_thread(key_environment, self.args, partial(_cluster_key, self.replica.app_name))

    async def check_health(self) -> None:
        if self.process is not None:
            await self.process.probe()

    async def target(self) -> Target | None:
        """Where Prometheus finds the process, also while it is down; None before its first start."""
        if self.process is None:
            return None
        facts = reachable(self.process.last_facts, format_address(self.host, 0))
        more = {f"{META}{name}": str(facts[fact]) for name, fact in self.shown.items() if facts.get(fact)}
        return target_of(facts, self.replica.app_name, self.process.name, self.component, more)

    async def __del__(self) -> None:
        """Ray calls and awaits it once when the replica goes: the process drains."""
        roller: WeightsRoller | None = self.__dict__.get("_roller")
        if roller is not None:
            await roller.stop()
        process: ServedProcess | None = self.__dict__.get("process")
        if process is not None:
            await process.stop()


class Bootstrap(ReplicaOfProcess):
    """The registry."""

    component = "bootstrap"

    async def begin(self, settings: dict[str, Any]) -> ServedProcess:
        process = ServedProcess("bootstrap", self.args.ready_s)
        await _until_free(self.host, self.args.bootstrap.port, GRACE_S)
        await process.start(bootstrap_command(self.args, self.host, settings), 1.0, await self.key())
        return process


class PoolNode(ReplicaOfProcess):
    """A node. Its name is its role and the replica's id, so Ray's dashboard and pdctl name the same."""

    component = "node"

    def __init__(self, args: dict[str, Any], role: Role) -> None:
        super().__init__(args)
        self._role, self._router = role, serve.get_deployment_handle(ROUTER, self.replica.app_name)

    async def begin(self, settings: dict[str, Any]) -> ServedProcess:
        process = ServedProcess(f"{self._role}-{self.replica.replica_id.unique_id}", self.args.ready_s)
        bootstrap = _bootstrap_address(self.args.bootstrap.port)
        command = node_command(self.args, self._role, process.name, (self.host, bootstrap), settings)
        await process.start(command, self.args.pools()[self._role].drain_s, await self.key())
        return process

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the router wants; Ray's policy gets it. Nothing while no router answers."""
        try:
            return {"wanted": float(await self._router.wanted.remote(self._role))}
        except (PdclusterError, ray.exceptions.RayError) as error:
            log.info("the router does not say how many %s nodes it wants: %s", self._role, error)
            return {}


class RouterReplica(ReplicaOfProcess):
    """A router, and the way to it through Ray's proxy.

    bootstrap, pools: the other deployments, which are part of the application by that.
    """

    component = "router"
    changeable = frozenset(("settings", "weights"))
    shown: ClassVar[Mapping[str, str]] = {"http": "address", "admin": "admin"}

    def __init__(self, args: dict[str, Any], bootstrap: Any, pools: dict[Role, Any]) -> None:
        super().__init__(args)
        own = serve.get_deployment_handle(ROUTER, self.replica.app_name)
        self._deployments = {ROUTER: own, BOOTSTRAP: bootstrap} | {NAMES[role]: pool for role, pool in pools.items()}
        self._client: aiohttp.ClientSession | None = None
        name, turn = self.replica.replica_id.unique_id.encode(), f"{self.replica.app_name}/weights".encode()
        self._roller = WeightsRoller(
            self._rollout_of, partial(asyncio.to_thread, _take_turn, turn, name),
            partial(asyncio.to_thread, _end_turn, turn, name),
        )  # fmt: skip

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        wanted = read_rollout(user_config.get("weights"))
        await super().reconfigure(user_config)
        await self._roller.want(wanted)

    def _rollout_of(self, wanted: RolloutArgs) -> tuple[str, ...] | None:
        """The command that rolls weights out by this router; None while it has no address."""
        facts = {} if self.process is None else self.process.last_facts
        token_file = self.args.router.settings.get("router.admin_token_file")
        if not facts.get("admin"):
            return None
        return rollout_command(wanted, str(facts["admin"]), None if token_file is None else str(token_file))

    async def begin(self, settings: dict[str, Any]) -> ServedProcess:
        process = ServedProcess(f"router-{self.replica.replica_id.unique_id}", self.args.ready_s)
        router = self.args.router
        await _until_free(router.host or self.host, router.port, router.drain_s + GRACE_S)
        bootstrap = _bootstrap_address(self.args.bootstrap.port)
        command = router_command(self.args, process.name, (self.host, bootstrap), settings)
        await process.start(command, router.drain_s, await self.key())
        if self._client is None:
            self._client = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=HEALTH_S),
                auto_decompress=False, trust_env=False, connector=aiohttp.TCPConnector(limit=0),
            )  # fmt: skip
        return process

    @property
    def _facts(self) -> Facts:
        assert self.process is not None  # Ray sends requests after `reconfigure`
        return self.process.facts

    async def wanted(self, role: Role) -> int:
        """Nodes of a role that the work of all routers needs."""
        facts = self._facts
        if not facts:
            raise Unavailable("the router is being started again")
        return await wanted_nodes(str(facts["scaler"]), role)

    async def targets(self) -> list[Target]:
        """All processes of the application. Raises Unavailable when a deployment does not answer."""
        found = await asyncio.gather(*(_targets(name, handle) for name, handle in self._deployments.items()))
        return sorted(itertools.chain.from_iterable(found), key=str)

    async def __call__(self, request: Request) -> Response:
        """The router's own reply, as it comes. When the client leaves, so does this request."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path == ADDRESSES:
            try:
                return JSONResponse(await self.targets())
            except Unavailable as error:
                return _unavailable(str(error))
        facts, client = self._facts, self._client
        assert client is not None
        if not facts:
            return _unavailable("it is being started again")
        headers = [(name, value) for name, value in request.headers.items() if name not in NOT_SENT_ON]
        query = f"?{request.url.query}" if request.url.query else ""
        try:
            reply = await client.request(
                request.method, f"http://{facts['address']}{path}{query}", headers=headers,
                data=await request.body(), allow_redirects=False,
            )  # fmt: skip
        except aiohttp.ClientError as error:
            return _unavailable(str(error))
        passed = {name: value for name, value in reply.headers.items() if name.lower() not in NOT_PASSED_ON}
        return StreamingResponse(_pieces(reply), reply.status, passed)


async def _targets(name: str, deployment: Any) -> list[Target]:
    """What the running replicas of a deployment say; one that fails meanwhile is left out."""
    try:
        said = await deployment.broadcast("target").results_async(timeout_s=HEALTH_S, return_exceptions=True)
    except DeploymentUnavailableError:
        log.info("%s has no replica that runs", name)
        return []
    except TimeoutError as error:
        raise Unavailable(f"a replica of {name} did not say within {HEALTH_S:g} s where its process is") from error
    for problem in said:
        if isinstance(problem, Exception):
            log.warning("a replica of %s does not say where its process is: %s", name, problem)
    return [each for each in said if isinstance(each, dict)]


def _unavailable(why: str) -> Response:
    message = f"the router does not answer now; retry: {why}"
    return JSONResponse({"error": {"message": message, "type": "unavailable"}}, 503, headers={"retry-after": "1"})


async def _pieces(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in reply.content.iter_any():
            yield piece
    finally:
        reply.close()


async def _until_free(host: str, port: int, within_s: float) -> None:
    """Wait until an earlier replica gave the port back. Where nobody does, the start that follows fails."""
    until = asyncio.get_running_loop().time() + within_s
    while port and asyncio.get_running_loop().time() < until:
        family, where = listening_place(host, port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                return
            except OSError:
                await asyncio.sleep(LOOK_S)


def follow_router(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy of a pool: as many nodes as the router's last word says. One goes at a time, and drains.

    Ray counts requests in its own handles, of which nodes get none; so its default policy would only shrink a pool.
    """
    told = [
        (series[-1].timestamp, series[-1].value)
        for series in (context.raw_metrics or {}).get("wanted", {}).values()
        if series
    ]
    if not told:
        return context.target_num_replicas, {}
    wanted = round(max(told)[1])
    return max(wanted, context.target_num_replicas - 1), {}


def build_pd_app(args: dict[str, Any]) -> serve.Application:
    """The application. args: see `pdcluster.launch.ray_args.PdArgs`. Raises ConfigError for what is wrong in them."""
    found = read_args(args)
    bootstrap = serve.deployment(
        Bootstrap, name=BOOTSTRAP, num_replicas=1, user_config={}, graceful_shutdown_timeout_s=GRACE_S,
        **LOOKS, ray_actor_options=_at_head(found.bootstrap.ray_actor_options),
    )  # fmt: skip
    pools = {role: _pool(found, role, pool).bind(_of_pool(args, role), role) for role, pool in found.pools().items()}
    router = serve.deployment(
        RouterReplica, name=ROUTER, num_replicas=found.router.num_replicas, user_config={},
        max_ongoing_requests=1 << 16, max_replicas_per_node=1,
        graceful_shutdown_timeout_s=found.router.drain_s + GRACE_S,
        **LOOKS, ray_actor_options=found.router.ray_actor_options.of_ranks(1, NUM_CPUS),
    )  # fmt: skip
    own = {name: value for name, value in args.items() if name not in NAMES}
    return router.bind(own, bootstrap.bind(_of_bootstrap(args)), pools)


def _pool(args: PdArgs, role: Role, pool: PoolArgs) -> serve.Deployment:
    options: dict[str, Any] = {"num_replicas": pool.num_replicas or 1}
    if pool.autoscaling_config is not None:
        given: dict[str, Any] = {
            "metrics_interval_s": METRICS_S, "look_back_period_s": LOOK_BACK_S, "upscale_delay_s": 0.0,
            "downscale_delay_s": SETTLE_S, "policy": AutoscalingPolicy(policy_function=follow_router),
        }  # fmt: skip
        options = {"autoscaling_config": AutoscalingConfig(**(given | pool.autoscaling_config))}
    actor = pool.ray_actor_options.of_ranks(pool.tp, NUM_CPUS)
    return serve.deployment(
        PoolNode, name=NAMES[role], user_config={}, ray_actor_options=actor, **LOOKS,
        graceful_shutdown_timeout_s=pool.drain_s + KILL_GRACE_S + GRACE_S, **options,
    )  # fmt: skip


def _of_pool(args: dict[str, Any], role: Role) -> dict[str, Any]:
    """What the nodes of one role depend on: other changes do not start them again."""
    kept = ("model", "served_model_name", "ready_s", "cluster_key_file", "bootstrap", role)
    return {name: args[name] for name in kept if name in args} | {role: args.get(role) or {}}


def _of_bootstrap(args: dict[str, Any]) -> dict[str, Any]:
    return {name: args[name] for name in ("ready_s", "cluster_key_file", "bootstrap") if name in args}


def _at_head(options: ActorOptions) -> dict[str, Any]:
    found = options.of_ranks(1, HEAD_CPUS)
    return {**found, "resources": {HEAD: 0.001, **found.get("resources", {})}}

"""Arguments of `pdcluster.ray:build_pd_app`, and the commands that they stand for. It does not need Ray."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pdcluster.core.address import format_address, loopback_like
from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import Role
from pdcluster.settings.config import BootstrapConfig, NodeConfig, RouterConfig, load
from pdcluster.settings.keys import variable_of

Setting = str | int | float | bool
NOTHING: Mapping[str, Setting] = {}
POOLS: tuple[Role, ...] = ("prefill", "decode", "mixed")
# What Ray sets for its own workers: a node computes with its own threads, and tokens of Ray are not its business.
RAYS_OWN = ("RAY_", "OMP_NUM_THREADS")
# Ray ends a replica that is not gone this long after its process should be.
GRACE_S = 15.0


# Settings of a node that follow from other arguments here, and which those are.
ENGINE_SETTINGS = {"node.engine": "write engine, for all nodes", "node.vllm.args": "write vllm_args"}
# vLLM's names for what a pool calls tp.
TENSOR_PARALLEL = frozenset(("--tensor-parallel-size", "-tp"))
TLS_SETTINGS = frozenset(("router.tls_cert", "router.tls_key"))

Amount = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class ActorOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """What a replica asks Ray for, by Ray's own names. One of a pool with tp asks for tp times the amounts."""

    num_cpus: Amount | None = None
    num_gpus: Amount | None = None
    # Bytes that Ray reserves; it limits nothing.
    memory: Amount | None = None
    # Of the cluster's own, by name.
    resources: dict[Name, Amount] = {}
    # A GPU's kind as Ray names it, such as A100 or H100.
    accelerator_type: Name | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: list[dict[str, Any]] | None = None
    # Variables, packages and an image of the replica, and of the process that it starts.
    runtime_env: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for name, argument in (("CPU", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory")):
            if name in self.resources:
                raise ValueError(f"resources has {name}; write {argument}: {self.resources[name]:g} beside it")
        for name, value in self._variables().items():
            if not isinstance(value, str):
                raise ValueError(f"runtime_env.env_vars.{name} is {value!r}, not text; write it in quotes")

    def _variables(self) -> Mapping[str, object]:
        found = self.runtime_env.get("env_vars", {})
        if not isinstance(found, dict):
            raise ValueError(f"runtime_env.env_vars is {found!r}; write NAME: 'value' for each variable")
        return found

    def of_ranks(self, ranks: int, num_cpus: float) -> dict[str, Any]:
        """As Ray takes them, for a replica whose process has so many ranks.

        One actor asks for all, since the ranks are children of its one process: Ray shows an actor the GPUs that it
        asked for itself, and no others. num_cpus: of a rank, unless told.
        """
        found: dict[str, Any] = {"num_cpus": num_cpus, **msgspec.to_builtins(self)}
        for name in ("num_cpus", "num_gpus", "memory"):
            if name in found:
                found[name] *= ranks
        if self.resources:
            found["resources"] = {name: amount * ranks for name, amount in self.resources.items()}
        return found


class BootstrapArgs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The registry, on the head node.

    port: fixed, so that the others find one that was started again.
    """

    port: int = 8998
    settings: dict[str, Setting] = {}
    ray_actor_options: ActorOptions = ActorOptions()


class RouterArgs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Routers, at most one on a machine.

    port: of HTTP for clients that do not go through Ray's proxy; 0: a free one.
    host: the address that it listens on; empty: the machine's in Ray.
    """

    num_replicas: int = 1
    port: int = 8080
    host: str = ""
    drain_s: float = 30.0
    settings: dict[str, Setting] = {}
    ray_actor_options: ActorOptions = ActorOptions()


class PoolArgs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Nodes of one role. Give num_replicas or autoscaling_config (as Ray's, with min_replicas and max_replicas).

    tp: ranks of a node, on one machine; each gets the amounts of `ray_actor_options`. vLLM gets it as its own argument.
    vllm_args: vLLM's own arguments, with that engine.
    drain_s: for running requests when a node goes; then they move to others.
    """

    num_replicas: int | None = None
    autoscaling_config: dict[str, Any] | None = None
    tp: int = 1
    vllm_args: list[str | int | float] = []
    drain_s: float = 30.0
    settings: dict[str, Setting] = {}
    ray_actor_options: ActorOptions = ActorOptions()


class PdArgs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A cluster.

    model: a directory, a GGUF file or ORG/NAME; None: the bundled one.
    engine: of all nodes.
    ready_s: for a process to be ready; the first node of a machine may download and compile.
    cluster_key_file: a file of keys on every machine; None: the application makes a key and keeps it in Ray.
    """

    model: str | None = None
    engine: Literal["native", "vllm"] = "native"
    served_model_name: str | None = None
    ready_s: float = 900.0
    cluster_key_file: str | None = None
    bootstrap: BootstrapArgs = BootstrapArgs()
    router: RouterArgs = RouterArgs()
    prefill: PoolArgs | None = None
    decode: PoolArgs | None = None
    mixed: PoolArgs | None = None

    def pools(self) -> dict[Role, PoolArgs]:
        return {role: pool for role in POOLS if (pool := getattr(self, role)) is not None}


def parse_args(args: Mapping[str, Any]) -> PdArgs:
    """A part of a cluster's arguments. Raises ConfigError that names the argument."""
    try:
        return msgspec.convert(dict(args), PdArgs)
    except msgspec.ValidationError as error:
        known = f"; it takes {', '.join(ActorOptions.__struct_fields__)}" if _is_unknown_option(error) else ""
        raise ConfigError(f"args of build_pd_app: {error}{known}") from error


def _is_unknown_option(error: msgspec.ValidationError) -> bool:
    return "unknown field" in str(error) and str(error).endswith(".ray_actor_options`")


def read_args(args: Mapping[str, Any]) -> PdArgs:
    """Arguments of a whole cluster: a prefill and a decode node where they name no pool. Raises ConfigError."""
    found = parse_args(args)
    pools = found.pools()
    if not pools:
        found = msgspec.structs.replace(found, prefill=PoolArgs(), decode=PoolArgs())
    elif "mixed" not in pools and len(pools) < 2:
        raise ConfigError(
            f"args of build_pd_app: there are only {next(iter(pools))} nodes; add the other role, or mixed"
        )
    for role, pool in found.pools().items():
        if pool.num_replicas is not None and pool.autoscaling_config is not None:
            raise ConfigError(f"args of build_pd_app: {role} has num_replicas and autoscaling_config; keep one of them")
        if pool.autoscaling_config is not None and pool.autoscaling_config.get("min_replicas", 1) == 0:
            why = "no replica would be left to tell Ray that one is wanted; set 1"
            raise ConfigError(f"args of build_pd_app: {role}.autoscaling_config.min_replicas is 0: {why}")
        if pool.tp < 1:
            raise ConfigError(f"args of build_pd_app: {role}.tp is {pool.tp}; a node has at least one rank")
        if pool.vllm_args and found.engine != "vllm":
            raise ConfigError(f"args of build_pd_app: {role}.vllm_args need engine: vllm")
        for setting, way_out in ENGINE_SETTINGS.items():
            if setting in pool.settings:
                raise ConfigError(f"args of build_pd_app: {role}.settings have {setting}; {way_out}")
        flags = {str(word).partition("=")[0].replace("_", "-") for word in pool.vllm_args}
        for flag in TENSOR_PARALLEL & flags:
            raise ConfigError(f"args of build_pd_app: {role}.vllm_args have {flag}; write tp: it asks for GPUs, too")
    if any(pool.autoscaling_config is not None for pool in found.pools().values()) and _is_on(
        found.router.settings.get("router.auto_roles")
    ):
        raise ConfigError("args of build_pd_app: pools scale, and router.auto_roles changes roles; keep one of them")
    _check_keys(found)
    for setting in TLS_SETTINGS & found.router.settings.keys():
        raise ConfigError(
            f"args of build_pd_app: router.settings have {setting}, and Ray's proxy asks routers over plain HTTP; give "
            "Ray's own proxy the certificate"
        )
    _check(found)
    return found


def _check_keys(args: PdArgs) -> None:
    """All processes have the same key, so no part of the application has one of its own."""
    parts = {name: part.settings for name, part in args.pools().items()}
    for name, settings in (("bootstrap", args.bootstrap.settings), ("router", args.router.settings), *parts.items()):
        for setting in settings:
            if setting.endswith((".security.cluster_key", ".security.cluster_key_file")):
                raise ConfigError(
                    f"args of build_pd_app: {name}.settings have {setting}; write cluster_key_file, for all processes"
                )


def key_environment(args: PdArgs, made: Callable[[], str]) -> dict[str, str]:
    """Variables by which a process gets the cluster's key. Others see a process's arguments, and not its variables.

    made: the application's own key, where the arguments name no file.
    """
    name, value = (
        ("cluster_key", made()) if args.cluster_key_file is None else ("cluster_key_file", args.cluster_key_file)
    )
    paths = (f"{section}.security.{name}" for section in ("bootstrap", "node", "router"))
    return {variable_of(path): value for path in paths}


def _is_on(value: Setting | None) -> bool:
    return str(value).lower() == "true"


def _check(args: PdArgs) -> None:
    """Read every setting as its process would, so that a wrong one fails before anything starts."""
    load(BootstrapConfig, _values(bootstrap_command(args, "127.0.0.1")), environ={})
    load(RouterConfig, _values(router_command(args, "r", ("127.0.0.1", "127.0.0.1:1"))), environ={})
    for role in args.pools():
        load(NodeConfig, _values(node_command(args, role, "n", ("127.0.0.1", "127.0.0.1:1"))), environ={})


def _values(command: tuple[str, ...]) -> dict[str, str]:
    return dict(word.removeprefix("--set=").split("=", 1) for word in command if word.startswith("--set="))


def bootstrap_command(args: PdArgs, host: str, more: Mapping[str, Setting] = NOTHING) -> tuple[str, ...]:
    """more: settings that count more than those of the arguments, as in the other commands."""
    own = {"bootstrap.listen": format_address(host, args.bootstrap.port), "bootstrap.health": format_address(host, 0)}
    return (sys.executable, "-m", "pdcluster.cli", "bootstrap", *_sets({**own, **args.bootstrap.settings, **more}))


def router_command(
    args: PdArgs, name: str, places: tuple[str, str], more: Mapping[str, Setting] = NOTHING
) -> tuple[str, ...]:
    """places: the host of this machine, and the bootstrap's address."""
    router, (host, bootstrap) = args.router, places
    inner = format_address(loopback_like(host), 0)
    own: dict[str, Setting] = {
        "router.name": name,
        "router.bootstrap": bootstrap,
        "router.http": format_address(router.host or host, router.port),
        "router.grpc": "none",
        "router.admin": inner,
        "router.scaler": inner,
        "router.health": format_address(host, 0),
        "router.drain_s": router.drain_s,
    }
    return (sys.executable, "-m", "pdcluster_router.cli", *_sets({**own, **router.settings, **more}))


def node_command(
    args: PdArgs, role: Role, name: str, places: tuple[str, str], more: Mapping[str, Setting] = NOTHING
) -> tuple[str, ...]:
    """places: the host of this machine, and the bootstrap's address."""
    pool, (host, bootstrap) = args.pools()[role], places
    own: dict[str, Setting] = {
        "node.role": role,
        "node.name": name,
        "node.bootstrap": bootstrap,
        "node.listen": format_address(host, 0),
        "node.health": format_address(host, 0),
        "node.drain_s": pool.drain_s,
        **_engine_settings(args, pool),
    }
    if args.model is not None:
        own["node.model"] = args.model
    if args.served_model_name is not None:
        own["node.served_model_name"] = args.served_model_name
    cores = pool.ray_actor_options.num_cpus
    if cores is not None and cores >= 1 and args.engine == "native":
        own["node.threads"] = int(cores)
    return (sys.executable, "-m", "pdcluster.cli", "node", *_sets({**own, **pool.settings, **more}))


def _engine_settings(args: PdArgs, pool: PoolArgs) -> dict[str, Setting]:
    """What the engine is started with. vLLM starts its workers itself: they are children of the node, not Ray's."""
    if args.engine == "native":
        return {"node.tp": pool.tp}
    words = ["--tensor-parallel-size", pool.tp, "--distributed-executor-backend", "mp", *pool.vllm_args]
    return {
        "node.engine": "vllm",
        "node.vllm.start_s": args.ready_s,
        "node.vllm.args": shlex.join(map(str, words)),
    }


def _sets(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """Settings as flags. Ray's YAML has true and false where the settings have them."""
    return tuple(
        f"--set={path}={str(value).lower() if isinstance(value, bool) else value}" for path, value in settings.items()
    )


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child of a Ray worker gets. It finds this package wherever Ray put it (`runtime_env`)."""
    kept = {name: value for name, value in environ.items() if not name.startswith(RAYS_OWN)}
    router = importlib.util.find_spec("pdcluster_router")
    homes = (
        [Path(__file__).parents[2], *(Path(each).parent for each in (router.submodule_search_locations or ()))]
        if router
        else []
    )
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in (*given, *map(str, homes)) if path and "/ray/" not in path]
    return kept | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}

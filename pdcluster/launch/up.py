"""`pdcluster up`: bootstrap, nodes and router of one cluster as child processes on this machine.

Decides names, addresses, cores and the order of starting and stopping. The supervisor keeps processes alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import TextIO, TypeVar, cast

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint import bundled
from pdcluster.checkpoint.hub import is_repository, local_model
from pdcluster.checkpoint.inspection import check_model_files
from pdcluster.core.address import format_address, loopback_like, parse_address
from pdcluster.core.errors import ConfigError, ModelError, PdclusterError, Unavailable, Unservable
from pdcluster.core.messages import Role
from pdcluster.launch.run_key import RunKey
from pdcluster.launch.targets import Target, target_of
from pdcluster.processes.http_client import http_connection
from pdcluster.processes.listening import listening_place
from pdcluster.processes.supervisor import ChildGaveUp, Facts, Spec, Supervisor
from pdcluster.settings.config import (
    BootstrapConfig,
    LoadedSection,
    NodeConfig,
    RouterConfig,
    UpConfig,
    check_folder,
    keys,
    load,
    section_of,
    whole_pair,
)
from pdcluster.settings.keys import Section, joined
from pdcluster.settings.tls_files import read_certificate
from pdcluster.settings.tls_trust import TlsTrust
from pdcluster.telemetry.log import resolve_format, writer_of

NODE_STOP_S = 5.0
BOOTSTRAP_STOP_S = 3.0
# A process gets this much longer than its drain deadline before it is killed. Letting go of ranks and pools takes
# seconds on a busy machine.
KILL_GRACE_S = 6.0
# KV pool of a node with the bundled model: 100 thousand tokens, and memory that a laptop can spare.
BUNDLED_KV_BYTES = 2**28
READY_POLL_S = 0.03
NEVER_READY = f'"code":"{Unservable.code}"'.encode()
NODE_UP = re.compile(rb"^pdcluster_node_up\{", re.MULTILINE)
T = TypeVar("T")
S = TypeVar("S", bound=Section)
LOOPBACK = "127.0.0.1:0"
HEALTH_FLAG = ("health", "--health")
ROUTER = "router"
BOOTSTRAP = "bootstrap"
CHILD_SECTIONS: tuple[type[Section], ...] = (BootstrapConfig, NodeConfig, RouterConfig)
# What `up` decides for its children. A file may have it for processes that run alone.
CHOSEN = ("node.role", "node.name", "node.bootstrap", "node.listen", "router.bootstrap", "bootstrap.listen")


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to start. cores: empty when it is not pinned; tp: its ranks."""

    name: str
    role: Role
    cores: tuple[int, ...]
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Serving:
    """A cluster that answers. host and port are the router's, seconds what the start took."""

    host: str
    port: int
    model: str
    nodes: tuple[str, ...]
    transfer: str
    seconds: float
    grpc: str | None = None
    admin: str | None = None
    console: str | None = None
    control: str | None = None
    # None: the router speaks no TLS.
    trust: TlsTrust | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.trust is None else "https"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{format_address(self.host, self.port)}"

    def line(self) -> str:
        doors = "".join(
            f"  {name} {where}" for name, where in (("grpc", self.grpc), ("admin", self.admin)) if where is not None
        )
        return (
            f"ready in {self.seconds:.1f} s: {self.url}/v1{doors}  model {self.model}  nodes {' '.join(self.nodes)}  "
            f"transfer {self.transfer}"
        ) + "".join(
            f"\n{line}"
            for line, where in (
                (f"console {self.scheme}://{self.console}/", self.console),
                (f"control {self.scheme}://{self.control}", self.control),
                (f"pdctl finds it after: export PDCTL_ADMIN={self.admin}{self._trusting}", self.admin),
            )
            if where is not None
        )

    @property
    def _trusting(self) -> str:
        """What pdctl must trust, as variables of a shell."""
        if self.trust is None:
            return ""
        return f" PDCTL_CA={shlex.quote(str(self.trust.ca))} PDCTL_TLS_NAME={shlex.quote(self.trust.name or self.host)}"


class ClusterOutput:
    """What `up` shows: its own lines on stdout, its children's on stderr, each with the child's name."""

    def __init__(self, out: TextIO, err: TextIO, *, as_json: bool, width: int) -> None:
        self._out = out
        self._err = err
        self._as_json = as_json
        self._width = width

    def say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def write(self, text: str) -> None:
        """A piece of a line."""
        print(text, end="", file=self._out, flush=True)

    def forward(self, name: str, line: str) -> None:
        if not self._as_json:
            line = f"{name:<{self._width}} | {line}"
        elif not line.startswith("{"):
            line = json.dumps({"process": name, "event": line}, ensure_ascii=False)
        writer = writer_of(self._err)
        if writer is None:
            print(line, file=self._err)
        else:
            writer.write(line)


class LocalCluster:
    """The processes of one `up`. Start it once, stop it once. `stop` may be called at any time."""

    def __init__(self, loaded: LoadedSection[UpConfig], output: ClusterOutput, *, log_format: str) -> None:
        self._loaded = loaded
        self._config = loaded.config
        # None: the cluster's key is the user's affair.
        self._key = _run_key(loaded) if loaded.config.secure else None
        self._say = output.say
        self._log_format = log_format
        self._nodes = self._plan()
        # Where the model lies, from the start on.
        self._found_model: Path | None = None
        self._trust: TlsTrust | None = None
        self.supervisor = Supervisor(output.say, output.forward, self._config.ready_s, self._config.restarts)

    def _plan(self) -> tuple[NodePlan, ...]:
        """Nodes are not pinned where the section node says on which cores, or how many threads, they run."""
        config, node = self._config, self._node_settings
        if {node.origins["node.cores"], node.origins["node.threads"]} != {"default"}:
            config = replace(config, pin=False)
        if not self._is_set("up.tp"):
            config = replace(config, tp=node.config.tp)
        return plan_nodes(config, os.sched_getaffinity(0))

    async def start(self) -> Serving:
        began = time.monotonic()
        self._check()
        self._found_model = await self._find_model()
        self._say(f"starting {' '.join(plan.name for plan in self._nodes)} router bootstrap")
        bootstrap = await self.supervisor.start(self._bootstrap_spec())
        address = str(bootstrap["address"])
        specs = [self._node_spec(plan, address) for plan in self._nodes] + [self._router_spec(address)]
        *nodes, router, _ = await _all_or_nothing([*(self.supervisor.start(spec) for spec in specs), self._read_text()])
        host, port = parse_address(str(router["address"]))
        await self._wait_until_ready(host, port)
        model = str(nodes[0]["model"])
        grpc, admin, console, control = (
            None if router.get(name) is None else str(router[name]) for name in ("grpc", "admin", "console", "control")
        )
        names = tuple(plan.name for plan in self._nodes)
        self._write_targets({BOOTSTRAP: bootstrap, **dict(zip(names, nodes, strict=True)), ROUTER: router})
        seconds = time.monotonic() - began
        return Serving(host, port, model, names, _transfer(nodes), seconds, grpc, admin, console, control, self._trust)

    def _write_targets(self, facts: dict[str, Facts]) -> None:
        if self._config.targets is None:
            return
        targets = targets_of(facts, self._config.cluster)
        try:
            self._config.targets.write_text(json.dumps(targets, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"up.targets {self._config.targets} cannot be written: {error.strerror}") from error

    async def stop(self) -> bool:
        """Drain and stop everything, the router first; True when nothing had to be killed."""
        await self.supervisor.stop([[ROUTER], [plan.name for plan in self._nodes], [BOOTSTRAP]])
        if self._key is not None:
            self._key.close()
        return not self.supervisor.killed

    def _check(self) -> None:
        """Refuse what cannot work before anything starts."""
        own = [f"{path} is set, but up chooses it itself; leave it out" for path in CHOSEN if path in self._flags]
        if own:
            raise ConfigError(joined(own))
        bootstrap = _load(BootstrapConfig, self._flags, self._loaded.file).config
        check_folder("up.targets", self._config.targets)
        router = self._router_settings.config
        sections = bootstrap, self._node_settings.config, router
        if len({section.security.cluster_keys() for section in sections}) > 1:
            raise ConfigError(
                "bootstrap.security, node.security and router.security hold different cluster keys, so they could not "
                "talk; set all three to the same"
            )
        self._trust = self._own_trust()
        for name in ("http", "grpc"):
            path, address = self._listens(name)
            if address is not None:
                check_free(path, address)

    def _own_trust(self) -> TlsTrust | None:
        """How clients of this machine reach the router: they trust its own certificate. Raises ConfigError."""
        own = self._config
        files = whole_pair("up", own.tls_cert, own.tls_key) or self._router_settings.config.tls_files
        if files is None:
            return None
        certificate = read_certificate(*files)
        if certificate.is_over:
            raise ConfigError(f"the TLS certificate {files[0]} ended on {certificate.not_after}; renew it")
        return TlsTrust(files[0], certificate.name or None)

    async def _find_model(self) -> Path:
        """Where the model lies, downloaded if need be. A missing or damaged model ends here, before nodes start."""
        model = self._given_model or bundled.path()
        if is_repository(model):
            self._say(f"looking for {model}")
            model = await in_daemon(lambda: local_model(model))
        check_model_files(model, needs_tokenizer=self._router_settings.config.tokenizer is None)
        return model

    async def _read_text(self) -> Facts:
        """Runs beside the nodes' start. A tokenizer or template that the router could never read ends the start at
        once.
        """
        model = self._router_settings.config.tokenizer or self._found_model or bundled.path()
        await asyncio.to_thread(TextModel.from_dir, model)
        return {}

    def _listens(self, name: str) -> tuple[str, str | None]:
        """The setting that says where the router listens for `name`, and its value: up's own, unless only the router's
        section has one.
        """
        path, values = f"up.{name}", self._loaded.values
        if not self._is_set(path) and self._router_settings.origins[f"router.{name}"] != "default":
            path, values = f"router.{name}", self._router_settings.values
        return path, cast("str | None", values[path])

    @cached_property
    def _flags(self) -> Mapping[str, object]:
        """The user's flags, and what `up` was told for all its processes."""
        found = dict(self._loaded.flags)
        for section in map(section_of, CHILD_SECTIONS):
            if self._config.insecure:
                found.setdefault(f"{section}.insecure", ",".join(self._config.insecure))
            if self._key is not None:
                found[f"{section}.security.cluster_key_file"] = str(self._key.file)
        return found

    @cached_property
    def _router_settings(self) -> LoadedSection[RouterConfig]:
        return _load(RouterConfig, self._flags, self._loaded.file)

    @cached_property
    def _node_settings(self) -> LoadedSection[NodeConfig]:
        return _load(NodeConfig, self._flags, self._loaded.file)

    @property
    def _given_model(self) -> Path | None:
        """None: the bundled one."""
        return self._config.model or self._node_settings.config.model

    async def _wait_until_ready(self, host: str, port: int) -> None:
        """Until the router sees every node. It is asked only what needs no API key."""
        deadline = time.monotonic() + self._config.ready_s
        while True:
            status, body = await asyncio.to_thread(_get, host, port, "/ready", self._trust)
            seen = len(NODE_UP.findall((await asyncio.to_thread(_get, host, port, "/metrics", self._trust))[1]))
            if status == 200 and seen >= len(self._nodes):
                return
            if NEVER_READY in body:
                raise ModelError(json.loads(body)["error"]["message"])
            if time.monotonic() > deadline:
                what = (
                    f"sees {seen} of {len(self._nodes)} nodes and answers /ready with {status} "
                    f"{body.decode(errors='replace')[:300]}"
                )
                raise Unavailable(
                    f"all processes started, but after {self._config.ready_s:g} s (up.ready_s) the router {what}"
                )
            await asyncio.sleep(READY_POLL_S)

    def _bootstrap_spec(self) -> Spec:
        own: dict[str, object] = {"bootstrap.listen": self._inner} | self._own_health(BootstrapConfig)
        argv = self._argv(BootstrapConfig, ("pdcluster.cli", "bootstrap"), own)
        return Spec(BOOTSTRAP, argv, BOOTSTRAP_STOP_S, address_flags=(("address", "--listen"), HEALTH_FLAG))

    def _node_spec(self, plan: NodePlan, bootstrap: str) -> Spec:
        own: dict[str, object] = {
            "node.role": plan.role,
            "node.name": plan.name,
            "node.bootstrap": bootstrap,
            "node.listen": self._inner,
        }
        if self._node_settings.origins["node.drain_s"] == "default":
            own["node.drain_s"] = NODE_STOP_S
        own |= self._own_health(NodeConfig)
        if plan.cores:
            own |= {"node.cores": ",".join(map(str, plan.cores)), "node.threads": max(1, len(plan.cores) // plan.tp)}
        if plan.tp != self._node_settings.config.tp:
            own["node.tp"] = plan.tp
        if self._is_set("up.device"):
            own["node.device"] = self._config.device
        if self._is_set("up.served_model_name") and self._config.served_model_name is not None:
            own["node.served_model_name"] = ",".join(self._config.served_model_name)
        if self._is_set("up.dtype"):
            own["node.dtype"] = self._config.dtype
        if self._is_set("up.otlp"):
            own["node.tracing.otlp"] = self._config.otlp or "none"
        if self._is_set("up.transfer"):
            own["node.transfer.backend"] = self._config.transfer
        if self._given_model is not None:
            own["node.model"] = (self._found_model or self._given_model).absolute()
        elif (
            self._node_settings.origins["node.model"]
            == self._node_settings.origins["node.kv.memory_bytes"]
            == "default"
        ):
            own["node.kv.memory_bytes"] = BUNDLED_KV_BYTES
        argv = self._argv(NodeConfig, ("pdcluster.cli", "node"), own)
        drain_s = NODE_STOP_S if "node.drain_s" in own else self._node_settings.config.drain_s
        return Spec(plan.name, argv, drain_s + KILL_GRACE_S, address_flags=(HEALTH_FLAG,))

    def _router_spec(self, bootstrap: str) -> Spec:
        own: dict[str, object] = {"router.bootstrap": bootstrap}
        drain_s = self._config.drain_s
        if self._is_set("up.drain_s") or self._router_settings.origins["router.drain_s"] == "default":
            own["router.drain_s"] = drain_s
        else:
            drain_s = self._router_settings.config.drain_s
        own |= {f"router.{name}": self._listens(name)[1] or "none" for name in ("http", "grpc")}
        if self._config.tls_cert is not None:
            own |= {"router.tls_cert": self._config.tls_cert, "router.tls_key": self._config.tls_key}
        if self._config.workers is not None:
            own["router.workers"] = self._config.workers
        if self._is_set("up.otlp"):
            own["router.tracing.otlp"] = self._config.otlp or "none"
        if self._router_settings.origins["router.admin"] == "default":
            own["router.admin"] = self._inner
        is_admin_off = self._router_settings.config.admin is None
        if self._router_settings.origins["router.console"] == "default" and not is_admin_off:
            own["router.console"] = self._inner
        own |= self._own_health(RouterConfig)
        argv = self._argv(RouterConfig, ("pdcluster_router.cli",), own)
        addresses = (
            ("address", "--http"),
            ("grpc", "--grpc"),
            ("admin", "--admin"),
            ("console", "--console"),
            ("control", "--control"),
            HEALTH_FLAG,
        )
        return Spec(ROUTER, argv, drain_s + KILL_GRACE_S, address_flags=addresses)

    def _argv(self, cls: type[Section], module: tuple[str, ...], own: dict[str, object]) -> tuple[str, ...]:
        """The child's command line. `own` wins over what the user set for the section."""
        section = section_of(cls)
        own[f"{section}.log.format"] = self._log_format
        if (
            self._is_set("up.log.level")
            or _load(cls, self._flags, self._loaded.file).origins[f"{section}.log.level"] == "default"
        ):
            own[f"{section}.log.level"] = self._config.log.level
        if self._config.log.requests:
            own[f"{section}.log.requests"] = True
        given = {path: value for path, value in self._flags.items() if path.startswith(f"{section}.")} | own
        flags = {key.path: key.flag for key in keys(cls)}
        argv = [sys.executable, "-m", *module]
        if self._loaded.file is not None:
            argv += ["--config", str(self._loaded.file)]
        for path, value in given.items():
            argv += (
                ["--set", f"{path}={value}"]
                if isinstance(value, bool) or path not in own
                else [flags[path], str(value)]
            )
        return tuple(argv)

    @property
    def _inner(self) -> str:
        """Where processes listen that only this machine needs: on loopback, in the family of the API's address."""
        host, _ = parse_address(self._listens("http")[1] or "")
        return format_address(loopback_like(host), 0)

    def _own_health(self, cls: type[Section]) -> dict[str, object]:
        """A free health port, unless the user chose one."""
        path = f"{section_of(cls)}.health"
        is_default = _load(cls, self._flags, self._loaded.file).origins[path] == "default"
        return {path: self._inner} if is_default else {}

    def _is_set(self, path: str) -> bool:
        return self._loaded.origins[path] != "default"


def _load(cls: type[S], flags: Mapping[str, object], file: Path | None) -> LoadedSection[S]:
    """A child's settings as it listens here, on loopback, wherever a file has processes that run alone.

    Raises ConfigError.
    """
    return load(cls, {**flags, **{path: LOOPBACK for path in CHOSEN if path.endswith(".listen")}}, file)


def _run_key(loaded: LoadedSection[UpConfig]) -> RunKey:
    """Raises ConfigError where the user has given a key."""
    for cls in CHILD_SECTIONS:
        given = _load(cls, loaded.flags, loaded.file).origins
        for path in (f"{section_of(cls)}.security.{name}" for name in ("cluster_key", "cluster_key_file")):
            if given[path] != "default":
                raise ConfigError(f"up.secure makes a cluster key, and {path} is set; keep one of them")
    return RunKey()


def run(loaded: LoadedSection[UpConfig]) -> int:
    """Start, say one line when ready, serve until SIGINT, SIGTERM or a lasting failure, stop."""
    return asyncio.run(_serve(loaded))


async def _serve(loaded: LoadedSection[UpConfig]) -> int:
    output, log_format = make_output(loaded)
    stop = on_signals()
    cluster = LocalCluster(loaded, output, log_format=log_format)
    code = 0
    try:
        serving = await unless(stop.first, cluster.start())
        if serving is not None:
            output.say(serving.line())
            failure = await unless(stop.first, cluster.supervisor.failed())
            if failure is not None:
                raise ChildGaveUp(failure)
        output.say("stopping; once more to stop without waiting")
    except PdclusterError as error:
        output.say(f"error: {error}")
        code = 2 if isinstance(error, ConfigError | ModelError) else 1
    finally:
        clean = await stop_all(cluster, stop)
    if code != 2:  # otherwise nothing was started
        output.say("stopped")
    return code or int(not clean)


async def stop_all(cluster: LocalCluster, stop: Signals) -> bool:
    """Stop the cluster, at once when a second signal comes; True when nothing had to be killed."""
    hurry = asyncio.create_task(_hurry(stop, cluster))
    try:
        return await cluster.stop()
    finally:
        hurry.cancel()


@dataclass(frozen=True, slots=True)
class Signals:
    """Set by the first and by the second SIGINT, SIGTERM or SIGHUP."""

    first: asyncio.Event
    second: asyncio.Event


def on_signals() -> Signals:
    signals = Signals(asyncio.Event(), asyncio.Event())

    def received() -> None:
        (signals.second if signals.first.is_set() else signals.first).set()

    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # ignored: started by nohup
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, received)
    return signals


async def _hurry(stop: Signals, cluster: LocalCluster) -> None:
    await stop.second.wait()
    cluster.supervisor.hurry()


def make_output(loaded: LoadedSection[UpConfig]) -> tuple[ClusterOutput, str]:
    """Where lines go, and the log format children must use (their own stderr is a pipe, so they cannot tell)."""
    log_format = resolve_format(loaded.config.log.format, sys.stderr)
    width = max(len(BOOTSTRAP), *(len(plan.name) for plan in plan_nodes(loaded.config, set())))
    return ClusterOutput(sys.stdout, sys.stderr, as_json=log_format == "json", width=width), log_format


def plan_nodes(config: UpConfig, available: set[int]) -> tuple[NodePlan, ...]:
    """Names and roles. Every node gets an equal share of the cores when there is at least one for each. The rest is
    left to the router.
    """
    roles: list[tuple[Role, int, int]] = [
        ("prefill", config.prefill, config.prefill_tp or config.tp),
        ("decode", config.decode, config.decode_tp or config.tp),
        ("mixed", config.mixed, config.tp),
    ]
    named = [(f"{role}-{index}", role, tp) for role, count, tp in roles for index in range(count)]
    cores = sorted(available)
    share = len(cores) // len(named) if config.pin and config.device == "cpu" else 0
    return tuple(
        NodePlan(name, role, tuple(cores[i * share : (i + 1) * share]), tp) for i, (name, role, tp) in enumerate(named)
    )


async def in_daemon(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread that does not keep this process alive."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            told, value = done.set_result, work()
        except BaseException as error:  # passed on to who waits
            told, value = done.set_exception, error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else told(value))

    threading.Thread(target=run, name="download", daemon=True).start()
    found: T = await done
    return found


def check_free(path: str, address: str) -> None:
    """Refuse an address that the router could not listen on, before anything starts. path: the setting's."""
    host, port = parse_address(address)
    try:
        family, where = listening_place(host, port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        flag = f"--{path.rpartition('.')[2]}"
        raise ConfigError(
            f"{path} {address} cannot be used: {error.strerror}; stop what holds it, or choose another with {flag}"
        ) from error


def targets_of(facts: Mapping[str, Facts], cluster: str) -> list[Target]:
    """Health ports as Prometheus's file_sd_configs reads them."""
    found = (target_of(said, cluster, name, component_of(name)) for name, said in facts.items())
    return [target for target in found if target is not None]


def component_of(name: str) -> str:
    return name if name in (ROUTER, BOOTSTRAP) else "node"


def _transfer(nodes: list[Facts]) -> str:
    """The medium that pairs of these nodes use: the first of one's list (best first) that all have."""
    lists = [[str(name) for name in given] for facts in nodes if isinstance(given := facts.get("transfer"), list)]
    return next((name for name in (lists[0] if lists else ()) if all(name in other for other in lists)), "none")


def _get(host: str, port: int, path: str, trust: TlsTrust | None) -> tuple[int, bytes]:
    """(status, body); status 0 while nobody answers."""
    connection = http_connection(host, port, 5.0, trust)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


async def _all_or_nothing(starts: list[Coroutine[None, None, Facts]]) -> list[Facts]:
    """Run all at once. The first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless(stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
    """The result of `work`, or None when `stop` was set first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None

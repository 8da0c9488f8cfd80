"""A cluster of real processes that a test kills, stops, cuts and starts again: two bootstraps, nodes, two routers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from pdcluster.rpc import admin_pb2_grpc as stubs
from tests.chaos.edges import OPEN, Edges, GuardedEdges

ROOT = Path(__file__).parents[2]
START_S = 180.0
IDLE_S = 60.0
_PAGES = re.compile(r'pdcluster_node_kv_pages\{node="([^"]+)",role="[^"]+",state="(used|quarantined|pinned)"\} (\S+)')
_SLOTS = re.compile(r'pdcluster_node_slots_used\{node="([^"]+)",role="[^"]+"\} (\S+)')


class ChildProcess:
    """One process of the cluster, which may be started again under its name and address."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        source: Path,
        last: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """last: arguments behind all others.
        environment: variables beside the test's own.
        """
        self.name, self._argv, self._log, self._last = name, tuple(argv), log, tuple(last)
        self._environment = dict(environment or {})
        # The checkout whose code it runs from its next start on.
        self.source = source
        self.process: subprocess.Popen[bytes] | None = None
        # What it announced when it was ready.
        self.facts: dict[str, str] = {}
        # How its clients reach it.
        self.edges: Edges = OPEN
        self.num_kills = 0
        # It accepts connections, as far as is known.
        self.is_ready = False
        self.is_stopped = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def address(self) -> str:
        return self.facts["address"]

    @property
    def url(self) -> str:
        return f"{self.edges.scheme}://{self.address}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, *more: str, within_s: float = START_S) -> None:
        """Start it, and wait until it is ready."""
        read_end, write_end = os.pipe()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                (sys.executable, "-m", *self._argv, *more, "--ready-fd", str(write_end), *self._last),
                pass_fds=[write_end], cwd=self.source, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{self.source}:{self.source / 'router'}", **self._environment},
            )  # fmt: skip
        os.close(write_end)
        with os.fdopen(read_end, "rb") as announced:
            async with asyncio.timeout(within_s):
                line = await asyncio.to_thread(announced.readline)
        if not line:
            raise AssertionError(f"{self.name} ended with {self.process.wait()} before it was ready; see {self._log}")
        self.facts = json.loads(line)
        self.is_ready, self.is_stopped = True, False

    def signal(self, number: int) -> None:
        """To all of its processes: a node of several ranks has more."""
        if self.is_running:
            assert self.process is not None
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Let it stand still."""
        self.is_stopped = True
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        self.is_stopped = False

    async def kill(self) -> None:
        self.num_kills += 1
        self.is_ready = False
        self.signal(signal.SIGKILL)
        await self.wait(10.0)

    async def terminate(self, within_s: float) -> int:
        """SIGTERM, and its exit code. Killed when it takes longer."""
        assert self.process is not None
        self.is_ready = False
        self.resume()
        self.process.terminate()
        return await self.wait(within_s)

    async def wait(self, within_s: float) -> int:
        assert self.process is not None
        try:
            return await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            await asyncio.to_thread(self.process.wait)
            raise AssertionError(f"{self.name} did not end within {within_s:g} s; see {self._log}") from None


@dataclass(frozen=True)
class NodeKind:
    """What every node runs.

    flags: of the command, before those of the shape.
    last: arguments behind all others.
    start_s: until it is ready.
    environment: variables of the node of a number.
    """

    flags: tuple[str, ...] = (
        "--deterministic", "--threads", "1", "--set=node.kv.memory_bytes=64MiB",
    )  # fmt: skip
    last: tuple[str, ...] = ()
    start_s: float = START_S
    environment: Callable[[int], Mapping[str, str]] = lambda number: {}


NATIVE = NodeKind()


@dataclass(frozen=True)
class ClusterShape:
    """What a chaos cluster consists of.

    node: more flags for every node.
    source: the checkout whose code it runs.
    is_guarded: with a key, TLS and a tenant.
    """

    prefill: int = 2
    decode: int = 2
    mixed: int = 0
    routers: int = 2
    bootstraps: int = 2
    transfer: str = "auto"
    tp: int = 1
    node: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    source: Path = ROOT
    kind: NodeKind = NATIVE
    is_guarded: bool = False


def lease_flags(seconds: float | None, who: str) -> tuple[str, ...]:
    return () if seconds is None else (f"--set={who}.lease_s={seconds:g}", f"--set={who}.heartbeat_s={seconds / 5:g}")


@dataclass
class ChaosCluster:
    """Use as `async with`. Logs of all processes lie in `folder`."""

    shape: ClusterShape
    folder: Path
    nodes: dict[str, ChildProcess] = field(default_factory=dict)
    routers: dict[str, ChildProcess] = field(default_factory=dict)
    bootstraps: dict[str, ChildProcess] = field(default_factory=dict)
    edges: Edges = OPEN

    async def __aenter__(self) -> ChaosCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.shape.is_guarded:
            self.edges = GuardedEdges(self.folder)
        try:
            await self._start()
        except BaseException:
            self._kill_all()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        for child in self.all():
            child.signal(signal.SIGKILL)
        for child in self.all():
            if child.process is not None:
                child.process.wait()

    async def _start(self) -> None:
        shape = self.shape
        for number in range(shape.bootstraps):
            self._add(
                self.bootstraps, f"bootstrap-{number}", "pdcluster.cli", "bootstrap", *self.edges.flags("bootstrap")
            )
        await asyncio.gather(*(child.start("--listen", "127.0.0.1:0") for child in self.bootstraps.values()))
        addresses = ",".join(child.address for child in self.bootstraps.values())
        for role, count in (("prefill", shape.prefill), ("decode", shape.decode), ("mixed", shape.mixed)):
            for number in range(count):
                name = f"{role}-{number}"
                self._add(
                    self.nodes, name, "pdcluster.cli", "node", "--role", role, "--name", name, "--bootstrap", addresses,
                    *shape.kind.flags, "--tp", str(shape.tp), "--drain-s", "2",
                    f"--set=node.transfer.backend={shape.transfer}", *self.edges.flags("node"), *shape.node,
                    last=shape.kind.last, environment=shape.kind.environment(len(self.nodes)),
                )  # fmt: skip
        for number in range(shape.routers):
            name = f"router-{number}"
            self._add(
                self.routers, name, "pdcluster_router.cli", "--name", name, "--bootstrap", addresses, "--drain-s", "60",
                "--set=router.tool_format=llama", *self.edges.flags("router"), *shape.router,
            )  # fmt: skip
            self.routers[name].edges = self.edges
        for child in self.nodes.values():  # one after the other: each loads a model on few cores
            await child.start(within_s=shape.kind.start_s)
        ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0")
        await asyncio.gather(*(child.start(*ports) for child in self.routers.values()))
        await self.until_ready()

    def _add(
        self,
        group: dict[str, ChildProcess],
        name: str,
        *argv: str,
        last: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        log = self.folder / f"{name}.log"
        group[name] = ChildProcess(
            name, (*argv, "--log-level", "info"), log, self.shape.source, last=last, environment=environment
        )

    def all(self) -> list[ChildProcess]:
        return [*self.routers.values(), *self.nodes.values(), *self.bootstraps.values()]

    async def restart(self, child: ChildProcess) -> None:
        """Start an ended process again. Clients and peers know bootstraps and routers by their addresses."""
        if child.name in self.nodes:
            await child.start(within_s=self.shape.kind.start_s)
        elif child.name in self.bootstraps:
            await child.start("--listen", child.address)
        else:
            facts = child.facts
            await child.start("--http", facts["address"], "--grpc", facts["grpc"], "--admin", facts["admin"])
            child.is_ready = False  # as a load balancer sees it: until it says so itself
            await self._until(lambda: self._is_ready(child), START_S, lambda: f"{child.name} is not ready")
            child.is_ready = True

    # ------------------------------------------------------------ what it says

    async def until_ready(self) -> None:
        """Until every router has a link to every node."""
        await self._until(self._knows_all_nodes, self.shape.kind.start_s, lambda: "not all nodes are up at all routers")

    async def _knows_all_nodes(self) -> bool:
        for router in self.routers.values():
            text = await self.metrics(router)
            if len(re.findall(r"^pdcluster_node_up\{", text, re.MULTILINE)) != len(self.nodes):
                return False
            if not await self._is_ready(router):
                return False
        return True

    async def _is_ready(self, router: ChildProcess) -> bool:
        async with self.edges.client(timeout=10.0) as client:
            return (await client.get(f"{router.url}/ready")).status_code == 200

    async def metrics(self, router: ChildProcess) -> str:
        async with self.edges.client(timeout=10.0) as client:
            return (await client.get(f"{router.url}/metrics")).text

    async def num_pages(self, router: ChildProcess, state: str) -> float:
        """KV pages in that state on all nodes that are up."""
        return sum(float(count) for _, each, count in _PAGES.findall(await self.metrics(router)) if each == state)

    async def held(self) -> list[str]:
        """What nodes hold now, as their last reports say."""
        left = []
        for router in self.routers.values():
            text = await self.metrics(router)
            left.extend(f"{node}: {count} pages {state}" for node, state, count in _PAGES.findall(text) if float(count))
            left.extend(f"{node}: {count} slots" for node, count in _SLOTS.findall(text) if float(count))
        return left

    async def until_idle(self) -> list[str]:
        """What is still held after a while on nodes: nothing, unless something leaked."""
        left: list[str] = []

        async def is_idle() -> bool:
            left[:] = await self.held()
            return not left

        with contextlib.suppress(AssertionError):
            await self._until(is_idle, IDLE_S, str)
        return left

    @staticmethod
    async def _until(condition: Callable[[], object], within_s: float, why: Callable[[], str]) -> None:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if await condition():  # type: ignore[misc]
                    return
            if time.monotonic() >= deadline:
                raise AssertionError(why())
            await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def admin(self, router: ChildProcess):
        async with self.edges.channel(router.facts["admin"]) as channel:
            yield stubs.AdminStub(channel)

"""Workers for tests of the fleet: the real channel over a real unix socket, in front of operations that are
scripted."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from pdcluster.core.errors import BadRequest, PdclusterError, UnknownName
from pdcluster.core.messages import Load, Role
from pdcluster.telemetry.health import Verdict
from pdcluster_router.admin.operations import (
    CachedNode,
    CacheStatus,
    DrainProgress,
    NodeAdapter,
    NodeStatus,
    PolicyStatus,
    RequestList,
    RequestStatus,
)
from pdcluster_router.cluster.events import Event, EventLog
from pdcluster_router.explain.records import Explanation
from pdcluster_router.workers.endpoint import WorkerEndpoint
from pdcluster_router.workers.fleet import Fleet
from pdcluster_router.workers.worker import WorkerIdentity

KNOWN = ("seconds", "random")


def node_status(name: str = "n0", in_flight: int = 0, *, draining: bool = False, running: int = 0) -> NodeStatus:
    load = Load(0, running, 0, 0, 100, 100, 0, 0, 0, 8, 0, draining=draining)
    state = "cordoned" if draining else "ready"
    return NodeStatus(name, f"{name}-boot", "mixed", state, f"{name}:1", "m", "cpu", ("shm",), 4096, in_flight, load)  # type: ignore[arg-type]


def request_status(name: str, age_s: float) -> RequestStatus:
    return RequestStatus(name, "m", "decode", "local", "", "n0", 10, 3, 1, age_s)


@dataclass
class ScriptedWorker:
    """Implements Operations with what it is told to have."""

    open: dict[str, float] = field(default_factory=dict)
    explained: dict[str, list[Explanation]] = field(default_factory=dict)
    node_list: list[NodeStatus] = field(default_factory=lambda: [node_status()])
    cache_status: CacheStatus = field(
        default_factory=lambda: CacheStatus(1, 100, (CachedNode("n0", "n0-boot", 1, True, "1:a"),))
    )
    log: EventLog = field(default_factory=EventLog)
    live: str = "seconds"
    shadow: str = ""
    is_stuck: bool = False
    verdict: Verdict = field(default_factory=lambda: Verdict(True, "ready", facts={"can_serve": True}))
    asked: list[str] = field(default_factory=list)

    async def _note(self, what: str) -> None:
        self.asked.append(what)
        if self.is_stuck:
            await asyncio.Event().wait()

    async def nodes(self) -> list[NodeStatus]:
        await self._note("nodes")
        return self.node_list

    async def node(self, name: str) -> NodeStatus:
        raise PdclusterError("nobody asks a worker for one node")

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus:
        await self._note("cordon")
        found = next((node for node in self.node_list if name in (node.name, node.incarnation)), None)
        if found is None:
            raise UnknownName(f"no node is called {name}", "node")
        return found

    async def set_role(self, name: str, role: Role) -> NodeStatus:
        await self._note("role")
        return self.node_list[0]

    async def change_adapter(self, name: str, path: str | None, nodes: tuple[str, ...]) -> list[NodeAdapter]:
        await self._note("adapter")
        return [NodeAdapter(node, digest=path or "") for node in nodes]

    async def move(self, name: str) -> int:
        await self._note("move")
        return 3

    def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]:
        raise PdclusterError("nobody asks a worker to drain")

    async def requests(self, node: str = "") -> RequestList:
        await self._note("requests")
        if node and node not in [known.name for known in self.node_list]:
            raise UnknownName(f"no node is called {node}", "node")
        return RequestList(tuple(request_status(name, age_s) for name, age_s in self.open.items()))

    async def cancel(self, request: str, reason: str) -> int:
        await self._note("cancel")
        if request not in self.open:
            raise UnknownName(f"no open request is called {request}", "id")
        del self.open[request]
        return 1

    async def explain(self, request: str) -> list[Explanation]:
        await self._note("explain")
        if request not in self.explained:
            raise UnknownName(f"nothing is known of {request}", "id")
        return self.explained[request]

    async def policy(self) -> PolicyStatus:
        await self._note("policy")
        return PolicyStatus(self.live, self.shadow, KNOWN)

    async def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> PolicyStatus:
        await self._note("set policy")
        for name in (live, shadow):
            if name and name not in KNOWN:
                raise BadRequest(f"no policy is called {name}", "policy")
        if not dry_run:
            self.live = self.live if live is None else live
            self.shadow = self.shadow if shadow is None else shadow
        return PolicyStatus(self.live, self.shadow, KNOWN)

    async def cache(self, *, digests: bool) -> CacheStatus:
        await self._note("cache")
        return self.cache_status

    async def readiness(self) -> Verdict:
        return self.verdict

    def events(self, since: int, *, follow: bool) -> AsyncIterator[Event]:
        return self.log.follow(since) if follow else self.log.kept(since)


def registry_of(number: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("pdcluster_things", "Things done.", ("kind",), registry=registry).labels("good").inc(number + 1)
    Gauge("pdcluster_node_up", "Nodes.", ("node",), registry=registry).labels("n0").set(1)
    Gauge("pdcluster_node_in_flight", "On nodes.", ("node",), registry=registry).labels("n0").set(2)
    if number:
        Gauge("pdcluster_node_waiting", "Known by one worker only.", ("node",), registry=registry).labels("n1").set(7)
    return registry


class Workers:
    """A fleet, and workers that join and die."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.scripted: dict[int, ScriptedWorker] = {}
        self.endpoints: dict[int, WorkerEndpoint] = {}
        self._path = folder / "control"
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def listen(self, stack: AsyncExitStack) -> None:
        server = await asyncio.start_unix_server(self.fleet.serve, str(self._path))
        stack.callback(server.close)
        stack.callback(self.fleet.close)

    async def join(self, number: int, worker: ScriptedWorker | None = None) -> ScriptedWorker:
        scripted = self.scripted[number] = worker or ScriptedWorker()
        endpoint = self.endpoints[number] = WorkerEndpoint(scripted, registry_of(number), scripted.readiness)
        self._tasks[number] = asyncio.create_task(
            endpoint.serve(WorkerIdentity(number, 2, self._path), f"boot-{number}")
        )
        await self.until(lambda: self.fleet.is_there(number))
        return scripted

    async def die(self, number: int) -> None:
        task = self._tasks.pop(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.until(lambda: not self.fleet.is_there(number))

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for number in list(self._tasks):
            with contextlib.suppress(TimeoutError):
                await self.die(number)


@asynccontextmanager
async def two_workers(
    first: ScriptedWorker | None = None, second: ScriptedWorker | None = None, clock=lambda: 0.0
) -> AsyncIterator[Workers]:
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            workers = Workers(Fleet(2, clock), Path(folder))
            await workers.listen(stack)
            stack.push_async_callback(workers.close)
            await workers.join(0, first)
            await workers.join(1, second)
            yield workers

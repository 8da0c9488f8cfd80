"""Faults on a chaos cluster. Which one comes next, on whom and for how long is drawn from the seed."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import grpc

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import bootstrap_pb2
from tests.chaos.cluster import ChaosCluster, ChildProcess
from tests.chaos.freeze import frozen

Tell = Callable[[str], None]
Fault = Callable[[ChaosCluster, ChildProcess, random.Random], Awaitable[None]]

# Between two faults.
SHORTEST_S, LONGEST_S = 3.0, 8.0
ROLES = (bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE, bootstrap_pb2.ROLE_MIXED)


class FaultMaker:
    """Makes one fault after the other. Each ends before its process takes part in the next one."""

    def __init__(
        self, cluster: ChaosCluster, seed: int, kinds: tuple[str, ...], tell: Tell, faults: Mapping[str, Fault]
    ) -> None:
        """kinds: of `faults`, those that are drawn."""
        self._cluster, self._chance, self._tell = cluster, random.Random(seed), tell
        self._kinds, self._faults = kinds, faults
        self._busy: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Make faults for so long, and wait until all are over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(self._chance.uniform(SHORTEST_S, LONGEST_S), left))
            for done in [task for task in self._running if task.done()]:
                self._running.discard(done)
                done.result()
            if time.monotonic() < until:
                self._begin()
        await asyncio.gather(*self._running)

    def _begin(self) -> None:
        kind = self._chance.choice(self._kinds)
        victims = [child for child in self._victims(kind) if child.name not in self._busy and child.is_running]
        # One of each kind stays: a cluster of which nothing runs is a scenario of its own.
        victim = self._chance.choice(victims) if victims else None
        draw = random.Random(self._chance.random())
        if victim is None:
            return
        self._busy.add(victim.name)
        self.counts[kind] += 1
        self._tell(f"{kind} {victim.name}")
        task = asyncio.create_task(self._make(kind, victim, draw), name=f"{kind} {victim.name}")
        self._running.add(task)

    def _victims(self, kind: str) -> list[ChildProcess]:
        cluster = self._cluster
        if kind.startswith("router"):
            own = list(cluster.routers.values())
            return own if sum(child.name in self._busy for child in own) == 0 else []
        if kind.startswith("bootstrap"):
            return list(cluster.bootstraps.values())
        return list(cluster.nodes.values())

    async def _make(self, kind: str, victim: ChildProcess, draw: random.Random) -> None:
        try:
            await self._faults[kind](self._cluster, victim, draw)
        finally:
            self._busy.discard(victim.name)


async def kill(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    await victim.kill()
    await asyncio.sleep(draw.uniform(0.0, 3.0))
    await cluster.restart(victim)


async def stop(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """Shorter and longer than a lease."""
    victim.stop()
    await asyncio.sleep(draw.choice((0.5, 2.0, 9.0)))
    victim.resume()


async def freeze(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """The engine's thread. Shorter and longer than what makes an engine stuck."""
    with frozen(victim.pid, while_computing=draw.random() < 0.5):
        await asyncio.sleep(draw.choice((0.5, 4.0, 9.0)))


async def pause(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """The whole cluster, as a machine that sleeps."""
    moved = [child for child in cluster.all() if child.is_running and not child.is_stopped]
    for child in moved:
        child.stop()
    await asyncio.sleep(draw.choice((1.0, 9.0)))
    for child in moved:
        child.resume()


async def cut(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """All connections to the node."""
    port = victim.address.rpartition(":")[2]
    for _ in range(draw.randrange(1, 4)):
        for side in ("dport", "sport"):
            command = ["ss", "-K", "state", "established", side, "=", f":{port}"]
            await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=10)
        await asyncio.sleep(draw.uniform(0.1, 0.6))


async def _with_admin(
    cluster: ChaosCluster, call: Callable[[object], Awaitable[object]], *, allowed: tuple[grpc.StatusCode, ...] = ()
) -> None:
    """By any router that runs. What its end or the node's does to the call is no failure of the call."""
    gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
    for router in cluster.routers.values():
        if router.is_running and not router.is_stopped:
            try:
                async with cluster.admin(router) as stub:
                    await call(stub)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (*gone, *allowed):
                    raise


async def drain(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    deadline_s = draw.choice((0.0, 0.5, 3.0))

    async def drained(stub) -> None:
        async for _ in stub.Drain(pb.DrainRequest(node=victim.name, deadline_s=deadline_s), timeout=30):
            continue

    async def open_again(stub) -> None:
        await stub.Cordon(pb.CordonRequest(node=victim.name, cordoned=False), timeout=10)

    await _with_admin(cluster, drained)
    await asyncio.sleep(draw.uniform(0.0, 1.0))
    for _ in range(20):
        await _with_admin(cluster, open_again)
        if not await _is_cordoned(cluster, victim.name):
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"{victim.name} stays cordoned")


async def _is_cordoned(cluster: ChaosCluster, name: str) -> bool:
    states: list[str] = []

    async def look(stub) -> None:
        reply = await stub.ListNodes(pb.ListNodesRequest(), timeout=10)
        states.extend(node.state for node in reply.nodes if node.name == name)

    await _with_admin(cluster, look)
    return "ready" not in states


async def flip(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    role = draw.choice(ROLES)

    async def set_role(stub) -> None:
        await stub.SetRole(pb.SetRoleRequest(node=victim.name, role=role), timeout=10)

    await _with_admin(cluster, set_role)


async def restart(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """A rolling restart's step."""
    code = await victim.terminate(90.0)
    if code != 0:
        raise AssertionError(f"{victim.name} ended with {code} after SIGTERM")
    await cluster.restart(victim)


FAULTS: dict[str, Fault] = {
    "kill": kill,
    "stop": stop,
    "freeze": freeze,
    "cut": cut,
    "pause": pause,
    "drain": drain,
    "flip": flip,
    "restart": restart,
    "router-kill": kill,
    "router-stop": stop,
    "router-restart": restart,
    "bootstrap-kill": kill,
    "bootstrap-stop": stop,
}

"""Named faults that must lose no stream: each runs several times under eight streams, whose bytes must be right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import bootstrap_pb2
from pdcluster.rpc import bootstrap_pb2_grpc as stubs
from tests.chaos.cluster import ChaosCluster, ClusterShape
from tests.chaos.freeze import frozen
from tests.chaos.load import ChaosLoad, requests_of

STREAMS = 8
# Of a registry, by default.
LEASE_S = 3.0


@dataclass(frozen=True)
class Scenario:
    """shape: of the cluster.
    make: the fault, while the streams run.
    num_output: tokens of each stream.
    lead_s: how long the fault runs before the streams come; below 0: after.
    """

    shape: ClusterShape
    make: Callable[[ChaosCluster], Awaitable[None]]
    num_output: int = 400
    lead_s: float = -0.4


async def _kill_only_node(cluster: ChaosCluster) -> None:
    """Back 4 s later, and then as soon as it has loaded its model."""
    (node,) = cluster.nodes.values()
    await node.kill()
    await asyncio.sleep(4.0)
    await cluster.restart(node)


async def _stop_nodes(cluster: ChaosCluster) -> None:
    for node in cluster.nodes.values():
        node.stop()
    await asyncio.sleep(8.0)
    for node in cluster.nodes.values():
        node.resume()


async def _stop_router(cluster: ChaosCluster) -> None:
    (router,) = cluster.routers.values()
    router.stop()
    await asyncio.sleep(8.0)
    router.resume()


async def _cordon_all(cluster: ChaosCluster) -> None:
    (router,) = cluster.routers.values()
    async with cluster.admin(router) as stub:
        for name in cluster.nodes:
            await stub.Cordon(pb.CordonRequest(node=name, cordoned=True))
        await asyncio.sleep(10.0)
        for name in cluster.nodes:
            await stub.Cordon(pb.CordonRequest(node=name, cordoned=False))


async def _drain_six_times(cluster: ChaosCluster) -> None:
    """Each node in turn, at once, whatever runs there."""
    (router,) = cluster.routers.values()
    names = list(cluster.nodes)
    async with cluster.admin(router) as stub:
        for number in range(6):
            name = names[number % len(names)]
            async for _ in stub.Drain(pb.DrainRequest(node=name, deadline_s=0.0)):
                continue
            await stub.Cordon(pb.CordonRequest(node=name, cordoned=False))
            await asyncio.sleep(1.0)


async def _kill_six_times(cluster: ChaosCluster) -> None:
    names = list(cluster.nodes)
    for number in range(6):
        node = cluster.nodes[names[number % len(names)]]
        await node.kill()
        await cluster.restart(node)
        await asyncio.sleep(1.0)


async def _freeze(cluster: ChaosCluster, role: str) -> None:
    """The engine's thread of the only node of that role, until it is out of rotation and 4 s on."""
    (router,) = cluster.routers.values()
    (node,) = (each for name, each in cluster.nodes.items() if name.startswith(role))
    began = time.monotonic()
    async with cluster.admin(router) as stub:

        async def until(state: str) -> float:
            async with asyncio.timeout(30.0):
                while True:
                    reply = await stub.ListNodes(pb.ListNodesRequest())
                    if any(each.name == node.name and each.state == state for each in reply.nodes):
                        return time.monotonic() - began
                    await asyncio.sleep(0.02)

        with frozen(node.pid, while_computing=True):
            stuck_s = await until("stuck")
            await asyncio.sleep(4.0)
        began = time.monotonic()
        back_s = await until("ready")
        print(f"    {node.name}: stuck after {stuck_s:.2f} s, ready {back_s:.2f} s after it went on", flush=True)


async def _kill_writer(cluster: ChaosCluster) -> None:
    """The only prefill node, while it holds tickets of every stream: it stands still before they come."""
    (node,) = (each for name, each in cluster.nodes.items() if name.startswith("prefill"))
    (router,) = cluster.routers.values()
    node.stop()
    await asyncio.sleep(1.0)
    began = time.monotonic()
    await node.kill()
    most, freed = 0.0, began
    while time.monotonic() < freed + 3.0:  # they run on the decode node meanwhile
        held = await cluster.num_pages(router, "quarantined")
        most, freed = max(most, held), time.monotonic() if held else freed
        await asyncio.sleep(0.02)
    print(f"    {most:.0f} pages waited for {node.name}'s end, {freed - began:.2f} s at most after it", flush=True)
    await cluster.restart(node)


async def _kill_registries(cluster: ChaosCluster) -> None:
    """Each in turn, and back after more than a lease. A node is killed while one is away: its old boot must not return
    with it.
    """
    first, second = cluster.bootstraps.values()
    node = cluster.nodes["decode-0"]
    await first.kill()
    await asyncio.sleep(LEASE_S + 1.0)
    await node.kill()
    await cluster.restart(node)
    await cluster.restart(first)
    await _until_registered(cluster)
    await second.kill()
    await asyncio.sleep(LEASE_S + 1.0)
    await cluster.restart(second)
    await _until_registered(cluster)


async def _until_registered(cluster: ChaosCluster) -> None:
    """Until each registry has the boots that run and no other, within a lease of its start, three times that."""
    began = time.monotonic()
    for registry in cluster.bootstraps.values():
        async with grpc.aio.insecure_channel(registry.address) as channel:
            async with asyncio.timeout(3 * LEASE_S):
                async for snapshot in stubs.BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest()):
                    names = [card.node for card in snapshot.nodes]
                    if sorted(names) == sorted(cluster.nodes) and not snapshot.settling:
                        break
    print(f"    both registries whole after {time.monotonic() - began:.2f} s", flush=True)
    (router,) = cluster.routers.values()
    async with cluster.admin(router) as stub:
        reply = await stub.ListNodes(pb.ListNodesRequest())
    names = sorted(node.name for node in reply.nodes)
    assert names == sorted(cluster.nodes), f"the router has {names}"


_ONE = ClusterShape(prefill=0, decode=0, mixed=1, routers=1, bootstraps=1)
_TWO = ClusterShape(prefill=0, decode=0, mixed=2, routers=1, bootstraps=1)
_PAIR = ClusterShape(prefill=1, decode=1, routers=1, bootstraps=1)
_FOUR = ClusterShape(prefill=2, decode=2, routers=1, bootstraps=1)
SCENARIOS: dict[str, Scenario] = {
    "only-node-killed": Scenario(_ONE, _kill_only_node),
    "nodes-stopped": Scenario(_PAIR, _stop_nodes),
    "router-stopped": Scenario(_PAIR, _stop_router),
    "nodes-cordoned": Scenario(_PAIR, _cordon_all, lead_s=1.0),
    "writer-killed": Scenario(_PAIR, _kill_writer, lead_s=0.3),
    "drained-six-times": Scenario(_TWO, _drain_six_times, 1500),
    "killed-six-times": Scenario(_TWO, _kill_six_times, 3000),
    "decode-engine-frozen": Scenario(_FOUR, partial(_freeze, role="decode-0"), 3000),
    "registries-killed": Scenario(
        ClusterShape(prefill=1, decode=2, routers=1, bootstraps=2, transfer="tcp"), _kill_registries, 3000
    ),
    "prefill-engine-frozen": Scenario(_FOUR, partial(_freeze, role="prefill-0"), lead_s=0.2),
}


async def _later(seconds: float, make: Callable[[ChaosCluster], Awaitable[None]], cluster: ChaosCluster) -> None:
    await asyncio.sleep(max(seconds, 0.0))
    await make(cluster)


async def run_scenario(name: str, times: int, seed: int, folder: Path) -> bool:
    """Whether no stream was lost, and all were right."""
    scenario = SCENARIOS[name]
    kinds = ("stream", "penalties")
    requests = [each for each in requests_of(seed, 20 * STREAMS, num_output=scenario.num_output) if each.kind in kinds]
    for number, each in enumerate(requests):
        each.body["max_tokens"] = scenario.num_output if number < STREAMS else 8
    async with ChaosCluster(scenario.shape, folder) as cluster:
        load = ChaosLoad(cluster, requests[:STREAMS], seed)
        await load.learn()
        others = ChaosLoad(cluster, requests[STREAMS:], seed)  # nodes know their steps after that
        await others.learn()
        await others.close()
        (router,) = cluster.routers.values()
        seconds = []
        for _ in range(times):
            began = time.monotonic()
            fault = asyncio.create_task(_later(-scenario.lead_s, scenario.make, cluster))
            await asyncio.sleep(max(scenario.lead_s, 0.0))
            await asyncio.gather(fault, *(load.ask(number, router) for number in range(STREAMS)))
            seconds.append(time.monotonic() - began)
            await cluster.until_ready()
        left = await cluster.until_idle()
        await load.close()
    report = load.report
    print(
        f"{name}: {report.num_right} right, {len(report.wrong)} wrong, {len(report.lost)} lost, {len(report.hung)} "
        f"hung, {len(report.excused)} excused, {len(left)} leaked; slowest {report.slowest_s:.1f} s",
        flush=True,
    )
    for each in (*report.wrong, *report.lost, *report.hung, *left)[:10]:
        print(f"    {each}")
    return report.is_clean and not left and not report.excused

"""Every router has its own exact view, and no router knows of another: two of them over eight nodes and real sockets,
and one that is killed."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import zmq
from local_cluster import OneModel

from bench.fakes.fake_node import FakeNode, Speed
from pdcluster.bootstrap.card import ClusterSnapshot
from pdcluster.core.messages import HASH_BYTES, Sampling
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.core.generation import Done, Generation
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

BLOCK = 4
WIRE = WireSettings(heartbeat_s=0.1, lease_s=1.0)
SPEED = Speed(prefill_s=0.0005, prefill_token_s=0.00001)


async def only(snapshot: ClusterSnapshot) -> AsyncIterator[ClusterSnapshot]:
    """The cluster never changes; links that a hiccup of this process cost are dialled again, as a router does."""
    yield snapshot
    await asyncio.Event().wait()


class Router:
    """One router process's worth of state; `kill` leaves its sockets to the nodes' leases, as a SIGKILL would."""

    def __init__(self, name: str, context: zmq.Context[zmq.Socket[bytes]], snapshot: ClusterSnapshot) -> None:
        self.cluster = NodeTable(Peer(name, f"{name}-{random.getrandbits(32):08x}"), context=context, settings=WIRE)
        self._following = asyncio.create_task(self.cluster.follow(only(snapshot)))
        selector = PolicySelector(PolicyHolder(make_policy(DEFAULT)), self.cluster.view, self.cluster.cached)
        self.dispatch = Dispatch(
            self.cluster, OneModel(BLOCK), selector, DispatchSettings(hold_s=10.0), asyncio.get_running_loop().time
        )

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self.cluster.close()

    async def run(self, number: int, prompt: list[int], num_output: int) -> Done:
        generation = Generation(
            f"r{number}", "model", array("i", prompt), Sampling(max_tokens=num_output, seed=1), 30.0
        )
        position = 0
        async with aclosing(self.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    assert position == num_output
                    return event
                assert event.position == position
                position += len(event.token_ids)
        raise AssertionError("no Done")

    def is_exact(self, nodes: list[FakeNode]) -> bool:
        return all(
            self.cluster.caches.is_exact(node.me.incarnation) and self.holdings(node) == truth(node) for node in nodes
        )

    def holdings(self, node: FakeNode) -> set[bytes]:
        return self.cluster.caches.index.holdings(node.me.incarnation)


def truth(node: FakeNode) -> set[bytes]:
    packed = node.pages.snapshot()
    return {packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)}


async def spin(nodes: list[FakeNode]) -> None:
    while True:
        for node in nodes:
            node.turn()
        await asyncio.sleep(0.001)


async def until(condition, timeout_s: float = 60.0) -> float:
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
    return time.monotonic() - started


@asynccontextmanager
async def eight_nodes() -> AsyncIterator[tuple[list[FakeNode], ClusterSnapshot, zmq.Context[zmq.Socket[bytes]]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    roles = ["prefill"] * 3 + ["decode"] * 3 + ["mixed"] * 2
    kind = {
        "wire": WIRE,
        "speed": SPEED,
        "num_pages": 300,
        "block_tokens": BLOCK,
        "report_s": 0.005,
        "clock": asyncio.get_running_loop().time,
    }
    nodes = [FakeNode(f"n{i}", role, context=context, **kind) for i, role in enumerate(roles)]
    spinning = asyncio.create_task(spin(nodes))
    try:
        yield nodes, ClusterSnapshot("boot", 1, False, tuple(node.card() for node in nodes)), context
    finally:
        spinning.cancel()
        await asyncio.gather(spinning, return_exceptions=True)
        for node in nodes:
            node.close()
        context.destroy(0)


def prompts(chance: random.Random, count: int) -> list[list[int]]:
    """Turns of conversations that share a system prompt; small pools, so that nodes evict all the time."""
    system = [chance.randrange(1000) for _ in range(40)]
    talks = [list(system) for _ in range(60)]
    made = []
    for _ in range(count):
        talk = chance.choice(talks)
        talk += [chance.randrange(1000) for _ in range(chance.randrange(4, 40))]
        if len(talk) > 300:
            del talk[40:]
        made.append(list(talk))
    return made


async def serve(routers: list[Router], asked: list[list[int]], numbers: itertools.count) -> None:
    queue = iter(asked)

    async def client(index: int) -> None:
        for prompt in queue:
            done = await routers[index % len(routers)].run(next(numbers), prompt, 1 + index % 5)
            assert done.reason == "length"

    async with asyncio.TaskGroup() as clients:
        for index in range(16):
            clients.create_task(client(index))


async def test_two_routers_agree_after_quiet_and_a_restarted_one_is_exact_again() -> None:
    chance, numbers = random.Random(5), itertools.count()
    async with eight_nodes() as (nodes, snapshot, context):
        first, second = Router("first", context, snapshot), Router("second", context, snapshot)
        routers = [first, second]
        try:
            await until(lambda: all(len(router.cluster.view().nodes) == 8 for router in routers))
            await serve(routers, prompts(chance, 700), numbers)
            await until(lambda: all(router.is_exact(nodes) for router in routers))
            assert [first.holdings(node) for node in nodes] == [second.holdings(node) for node in nodes]

            await second.close()
            await serve([first], prompts(chance, 100), numbers)
            second = routers[1] = Router("second", context, snapshot)
            took_s = await until(lambda: second.is_exact(nodes))
            print(f"a restarted router is exact after {took_s:.3f} s")
            await serve(routers, prompts(chance, 200), numbers)
            await until(lambda: all(router.is_exact(nodes) for router in routers))

            for router in routers:
                caches = router.cluster.caches
                caches.index.check_integrity()
                router.cluster.ledger.pending.check_integrity()
                assert not caches.num_gaps and caches.index.num_entries == sum(len(truth(node)) for node in nodes)
                assert not router.cluster.ledger.num_requests()
                assert all(not view.in_flight and not view.pending.requests for view in router.cluster.view().nodes)
            await until(
                lambda: not any(node.pages.num_used for node in nodes)
            )  # cancels of legs that are over may still be on their way
            for node in nodes:
                node.pages.check_integrity()
        finally:
            for router in routers:
                await router.close()


async def test_a_delta_that_was_lost_is_mended_by_a_snapshot() -> None:
    chance, numbers = random.Random(6), itertools.count()
    async with eight_nodes() as (nodes, snapshot, context):
        router = Router("first", context, snapshot)
        try:
            await until(lambda: len(router.cluster.view().nodes) == 8)
            await serve([router], prompts(chance, 50), numbers)
            for node in nodes:
                node.lose_next_delta()
            await serve([router], prompts(chance, 100), numbers)
            await until(lambda: router.is_exact(nodes))
            assert router.cluster.caches.num_gaps >= 1
        finally:
            await router.close()


async def test_a_node_that_leaves_takes_its_blocks_with_it() -> None:
    chance, numbers = random.Random(7), itertools.count()
    async with eight_nodes() as (nodes, snapshot, context):
        router = Router("first", context, snapshot)
        try:
            await until(lambda: len(router.cluster.view().nodes) == 8)
            await serve([router], prompts(chance, 100), numbers)
            gone = nodes.pop()
            gone.close()
            await until(lambda: gone.me.incarnation not in {node.incarnation for node in router.cluster.view().nodes})
            await until(lambda: not router.holdings(gone))  # told one turn of the loop after the link knows
            await until(lambda: router.is_exact(nodes))
            router.cluster.caches.index.check_integrity()
        finally:
            await router.close()

"""Places in line at a full decode node, and what a local prompt says of its queue."""

from __future__ import annotations

import asyncio

import pytest
from simulated_cluster import SimulatedCluster
from virtual_time import VirtualLoop, run_virtually

from pdcluster.core.messages import (
    Cancel,
    Endpoint,
    NodeMessage,
    Prefill,
    Refused,
    Reserve,
    Sampling,
    Scheduled,
    Work,
    pack_tokens,
)
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Received

ROUTER = Peer("router", "another")
WRITER = Endpoint("p9", "p9-boot", "127.0.0.1:9")


def work(name: str, length: int = 9) -> Work:
    return Work(name, 0, pack_tokens(range(length)), length, b"", Sampling(max_tokens=4, seed=1), 20.0)


@pytest.mark.parametrize("how", ["cancel", "hello", "router lost", "nothing"])
def test_a_place_in_line_goes_with_its_request(how: str) -> None:
    async def play(loop: VirtualLoop) -> int:
        async with SimulatedCluster(loop, {"m0": "mixed"}) as cluster:
            node = cluster.nodes["m0"]
            said: list[object] = []
            node.parts.links.outbox.message = lambda router, message, **_: said.append(message)  # type: ignore[method-assign]
            number = 0
            while not (refused := [each for each in said if isinstance(each, Refused)]):
                node.loop.handle(Received(ROUTER, "router", Reserve(work(f"r{number}", 40), WRITER)))
                number += 1
                assert number < 1000
            assert node.parts.decode.num_places == 1
            if how == "cancel":
                node.loop.handle(Received(ROUTER, "router", Cancel(refused[0].request, 0, "it has a slot")))
            elif how == "hello":
                node.parts.decode.keep_only(ROUTER, frozenset())
            elif how == "router lost":
                node.parts.decode.cancel_router(ROUTER)
            places = node.parts.decode.num_places
            node.parts.decode.cancel_router(ROUTER)
            await asyncio.sleep(1)
            return places

    assert run_virtually(play) == (1 if how == "nothing" else 0)


def test_a_local_prompt_says_when_it_leaves_the_queue_also_where_nothing_was_cached() -> None:
    async def play(loop: VirtualLoop) -> list[NodeMessage]:
        async with SimulatedCluster(loop, {"m0": "mixed"}) as cluster:
            node = cluster.nodes["m0"]
            said: list[NodeMessage] = []
            node.parts.links.outbox.message = lambda router, message, **_: said.append(message)  # type: ignore[method-assign]
            node.loop.handle(Received(ROUTER, "router", Prefill(work("r"), remote=False)))
            await asyncio.sleep(5)
            return said

    assert Scheduled("r", 0, 0) in run_virtually(play)

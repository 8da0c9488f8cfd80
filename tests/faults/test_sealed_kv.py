"""Somebody who reads the wire between two nodes with a cluster key learns no byte of KV."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import aclosing

import pytest
from faulty_node import SEALED, WIDTH
from oracle import VOCAB, reference
from process_cluster import ProcessCluster

from pdcluster.core.messages import Role, Sampling
from pdcluster_router.core.generation import Done, Generation

ROLES: dict[str, Role] = {"p0": "prefill", "d0": "decode"}
PROMPT = [7 * number % VOCAB for number in range(180)]
WINDOW = 16


async def captured(backend: str) -> bytes:
    """All that writers send while the prompt's KV crosses."""
    async with ProcessCluster(ROLES, backend) as cluster:
        generation = Generation("r0", "model", array("i", PROMPT), Sampling(max_tokens=3, seed=1), 20.0)
        tokens: list[int] = []
        async with aclosing(cluster.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    break
                tokens += event.token_ids
        assert tokens == reference(PROMPT, 3, WIDTH)
        return cluster.proxies["d0"].recorded()


def windows(capture: bytes) -> set[bytes]:
    """Of every place in it, without those of one byte alone."""
    found = {capture[at : at + WINDOW] for at in range(len(capture) - WINDOW)}
    return {each for each in found if len(set(each)) > 2}


@pytest.mark.timeout(240)
def test_a_capture_of_sealed_kv_holds_no_kv() -> None:
    first, second = windows(asyncio.run(captured("tcp"))), windows(asyncio.run(captured("tcp")))
    assert len(first & second) > len(first) * 0.8, "plain KV of one prompt is the same bytes"
    sealed = asyncio.run(captured(SEALED))
    assert len(sealed) > len(first) and not windows(sealed) & (first | second)

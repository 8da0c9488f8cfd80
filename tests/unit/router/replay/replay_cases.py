"""Small traces and clusters for the tests of the replay."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.replay.scenario import Layout
from pdcluster_router.replay.simulation import LinkSpec
from pdcluster_router.replay.trace import BlockChain, Trace, TraceRequest

CHUNK = 512
COST = NodeCost(PrefillCost(0.01, 1e-3, 1e-7, CHUNK, 10), DecodeCost(0.02, 1e-3, 1e-6, 10))
CHAIN = BlockChain()


def request(
    arrival_s: float,
    num_tokens: int,
    num_output: int = 1,
    contents: Sequence[int] | None = None,
    block_tokens: int = 16,
) -> TraceRequest:
    """contents: of its full blocks; None for blocks that nobody else has."""
    count = num_tokens // block_tokens
    numbers = list(contents)[:count] if contents is not None else [random.getrandbits(60) for _ in range(count)]
    numbers += [random.getrandbits(60) for _ in range(count - len(numbers))]
    blocks = CHAIN.extend((), numbers)
    return TraceRequest(arrival_s, num_tokens, num_output, blocks, blocks)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("case", 16, requests)


def random_trace(seed: int, num_requests: int = 60, *, most_tokens: int = 400, rate: float = 4.0) -> Trace:
    """Prompts that share beginnings, in bursts, some of one token and some with one token of answer."""
    chance = random.Random(seed)
    requests, now = [], 0.0
    for _ in range(num_requests):
        now += chance.choice([0.0, chance.expovariate(rate)])
        contents = [chance.randint(0, 2) for _ in range(30)]
        requests.append(
            request(now, chance.randint(1, most_tokens), chance.choice([1, 2, chance.randint(1, 60)]), contents)
        )
    return trace(*requests)


def layout(prefill: int = 0, decode: int = 0, mixed: int = 0, cache_tokens: int = 4096) -> Layout:
    return Layout(prefill, decode, mixed, cache_tokens, chunk_tokens=CHUNK, cost=COST, link=LinkSpec(bandwidth=1e9))

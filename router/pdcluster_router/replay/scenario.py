"""One replay from plain values: nodes, hardware, policy, and the speed of the trace. No printing.

The hardware models a node of 8 GPUs of 2021 that serves a dense 70B model in 16 bits: 10,000 prompt tokens a second
without attention, attention equal to the rest at 105,000 tokens, 20 ms for a step of one row, 320 KiB of KV a token, 80
GB/s between nodes (4 × 200 Gb/s).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import Role
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.core.room import COMFORT
from pdcluster_router.policy.base import Force
from pdcluster_router.policy.pull import BY_TOKENS, PullRule
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.queueing.demand import TARGET
from pdcluster_router.replay.cache import pooled_depths
from pdcluster_router.replay.feed import IMMEDIATE, FeedSpec
from pdcluster_router.replay.fitted import drawn
from pdcluster_router.replay.node import NodeSpec, SimNode
from pdcluster_router.replay.routing import ReplayRouter, RouterSpec
from pdcluster_router.replay.scaling import ScaledPools, ScalingSpec
from pdcluster_router.replay.simulation import LinkSpec, RequestInFlight, Simulation
from pdcluster_router.replay.trace import Trace

COST = NodeCost(
    PrefillCost(fixed_s=0.005, token_s=1e-4, pair_s=1.9e-9, chunk_tokens=2048, samples=1000),
    DecodeCost(fixed_s=0.02, row_s=1.5e-4, context_s=2.9e-8, samples=1000),
)
KV_BYTES_PER_TOKEN = 327_680
LINK = LinkSpec(bandwidth=8e10)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many nodes of each role, and what each is.

    cache_tokens: KV of one node.
    chunk_tokens: of a step of decode and mixed nodes, whose rows must not wait long. Prefill nodes use the cost
    model's.
    seed: nodes differ within the cost's error bars, sampled by it. Each reports the cost as given.
    """

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    cache_tokens: int = 4_000_000
    chunk_tokens: int = 256
    cost: NodeCost = COST
    link: LinkSpec = LINK
    seed: int = 0

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def num_computing(self) -> int:
        """Nodes that compute prompts."""
        return self.prefill + self.mixed or self.decode

    def nodes(self, block_tokens: int) -> list[SimNode]:
        if min(self.prefill, self.decode, self.mixed) < 0 or not self.num_nodes:
            counts = f"{self.prefill} prefill, {self.decode} decode and {self.mixed} mixed nodes"
            raise ConfigError(f"a cluster of {counts} cannot serve; give at least one node")
        if self.cache_tokens < block_tokens:
            raise ConfigError(
                f"a cache of {self.cache_tokens} tokens holds no block of {block_tokens}; give more tokens"
            )
        spec = NodeSpec(
            self.cost, self.cache_tokens, block_tokens, self.chunk_tokens, kv_bytes_per_token=KV_BYTES_PER_TOKEN
        )
        whole = replace(spec, chunk_tokens=self.cost.prefill.chunk_tokens)
        by_role: tuple[tuple[Role, int], ...] = (
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("mixed", self.mixed),
        )
        chance = random.Random(self.seed)
        return [
            SimNode(f"{role}-{number}", role, whole if role == "prefill" else spec, drawn(self.cost, chance))
            for role, count in by_role
            for number in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What else a run depends on.

    in_this_router: any policy gets this router's gate and pulls. Otherwise ours does, and a rival runs as published:
    its rule decides at once, and pulls only where it says so.
    """

    feed: FeedSpec = IMMEDIATE
    force: Force = "auto"
    seed: int = 0
    in_this_router: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """node_s: seconds of all nodes, where pools scaled; most_nodes: that were there at a time."""

    flights: list[RequestInFlight]
    nodes: list[SimNode]
    span_s: float
    node_s: float = 0.0
    most_nodes: int = 0


def replay(
    trace: Trace,
    layout: Layout,
    policy: str,
    conditions: Conditions = Conditions(),
    scaling: ScalingSpec | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Run a trace. Raises ConfigError for an unknown policy or layout.

    scaling: the layout has the most nodes of each pool; None: all serve throughout.
    progress: called with the number of requests that arrived.
    """
    nodes = layout.nodes(trace.block_tokens)
    is_ours = conditions.in_this_router or policy.partition(":")[0] == DEFAULT
    spec = RouterSpec(
        policy=make_policy(policy),
        feed=conditions.feed,
        force=conditions.force,
        seed=conditions.seed,
        bandwidth=layout.link.bandwidth,
        is_gated=is_ours,
        pulls=BY_TOKENS if is_ours else PullRule("chosen"),
    )
    router = ReplayRouter(nodes, spec)
    pools = None if scaling is None else ScaledPools(nodes, router, scaling)
    simulation = Simulation(nodes, router, layout.link, pools=pools, progress=progress)
    flights = simulation.run(trace)
    if pools is None:
        return Outcome(flights, nodes, trace.span_s)
    return Outcome(flights, nodes, trace.span_s, pools.node_s, pools.most_nodes)


@dataclass(frozen=True, slots=True)
class Oracle:
    """One LRU as large as all computing nodes' caches together: tokens of each request that it holds, their share, and
    the work left.
    """

    cached: tuple[int, ...]
    hit: float
    work_s: float


def oracle(trace: Trace, layout: Layout) -> Oracle:
    """Where a node computes and decodes, answers are cached, too."""
    grown = layout.mixed > 0 or not layout.prefill
    capacity = layout.num_computing * (layout.cache_tokens // trace.block_tokens)
    depths = pooled_depths([(r.blocks, r.grown if grown else r.blocks) for r in trace.requests], capacity)
    cached = tuple(
        min(depth * trace.block_tokens, r.num_tokens - 1) for depth, r in zip(depths, trace.requests, strict=True)
    )
    tokens = sum(r.num_tokens for r in trace.requests)
    prefill = layout.cost.prefill
    work_s = sum(prefill.seconds(r.num_tokens - known, known) for r, known in zip(trace.requests, cached, strict=True))
    return Oracle(cached, sum(cached) / max(tokens, 1), work_s)


# Work of so many seconds counts together where the future is known.
ORACLE_S = 10


def needed_nodes(trace: Trace, layout: Layout, known: Oracle) -> dict[Role, list[float]]:
    """Nodes of each role that the trace's work needs, by seconds, with the share of their time that is planned for."""
    num_seconds = int(trace.span_s) + 1
    prompts, tokens, contexts = [0.0] * num_seconds, [0.0] * num_seconds, 0
    for request, cached in zip(trace.requests, known.cached, strict=True):
        second = int(request.arrival_s)
        prompts[second] += layout.cost.prefill.seconds(request.num_tokens - cached, cached)
        tokens[second] += request.num_output
        contexts += request.num_tokens
    decode = layout.cost.decode
    each_s = decode.row_s + decode.context_s * contexts / max(len(trace.requests), 1)
    limit_s = COMFORT * (decode.fixed_s + each_s)
    rows = max((limit_s - decode.fixed_s) / each_s, 1.0)
    pace = rows / (decode.fixed_s + rows * each_s)
    return {
        "prefill": [each / TARGET for each in _smooth(prompts)],
        "decode": [each / pace / TARGET for each in _smooth(tokens)],
    }


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over ORACLE_S around each value."""
    sums = [0.0, *accumulate(values)]
    half, size = ORACLE_S // 2, len(values)
    return [
        (sums[min(at + half, size)] - sums[max(at - half, 0)]) / (min(at + half, size) - max(at - half, 0))
        for at in range(size)
    ]


def at_load(trace: Trace, layout: Layout, known: Oracle, load: float) -> Trace:
    """The trace at the speed at which the oracle's work is `load` times what the computing nodes can do meanwhile."""
    return trace.at_speed(load * layout.num_computing * trace.span_s / known.work_s)


def of_cost(layout: Layout, cost: NodeCost) -> Layout:
    """The layout with nodes as a real one was measured, with its chunks, whatever their role."""
    chunk_tokens = cost.prefill.chunk_tokens or COST.prefill.chunk_tokens
    return replace(
        layout, cost=replace(cost, prefill=replace(cost.prefill, chunk_tokens=chunk_tokens)), chunk_tokens=chunk_tokens
    )

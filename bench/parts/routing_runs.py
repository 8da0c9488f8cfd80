"""One replay of `bench.routing` as a value, and many of them on all cores. Says what is run; goals and printing are in
`bench.routing`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pdcluster.core.errors import ConfigError
from pdcluster_router.policy.base import Force
from pdcluster_router.replay.feed import IMMEDIATE, FeedSpec
from pdcluster_router.replay.report import Figures, ReplaySlo, figures
from pdcluster_router.replay.scenario import Conditions, Layout, Oracle, at_load, oracle, replay
from pdcluster_router.replay.trace import Trace, in_order, read_trace
from pdcluster_router.replay.workloads import generate

# Of the limit on TPOT, in steps of a decode node that is as full as it should be; for sizing pools.
FULL = 0.85


# Of a decode node's cache that rows may fill; for sizing pools.
ROOM = 0.8


@dataclass(frozen=True, slots=True)
class Workload:
    """path: of a recorded trace, "" for a generated kind. requests: how many; 0: all. seed: of a recorded trace, which
    stretch of so many."""

    name: str
    path: str = ""
    requests: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy as published, or with this router around it; ours is in this router in any case."""

    policy: str
    in_this_router: bool = False

    @property
    def name(self) -> str:
        return f"{self.policy} in this router" if self.in_this_router else self.policy


@dataclass(frozen=True, slots=True)
class Run:
    """load: of the computing nodes, or of all nodes when by_all (see `whole_rate`). in_this_router: see
    `scenario.Conditions`."""

    workload: Workload
    layout: Layout
    policy: str
    load: float
    force: Force = "auto"
    feed: FeedSpec = IMMEDIATE
    seed: int = 0
    by_all: bool = False
    in_this_router: bool = False
    slo_ttft_s: float | None = None
    ttft_factor: float = 5.0
    tpot_factor: float = 2.0

    @property
    def contender(self) -> Contender:
        return Contender(self.policy, self.in_this_router)


@lru_cache(maxsize=4)
def trace_of(workload: Workload) -> Trace:
    if not workload.path:
        return generate(workload.name, workload.requests, workload.seed)
    trace = read_trace(Path(workload.path))
    if not workload.requests:
        return trace
    begin = workload.seed * workload.requests
    stretch = trace.requests[begin : begin + workload.requests]
    if not stretch:
        raise ConfigError(
            f"{workload.path} has {len(trace.requests)} requests, too few for stretch {workload.seed} of "
            f"{workload.requests}"
        )
    return in_order(trace.name, trace.block_tokens, list(stretch))


@lru_cache(maxsize=16)
def oracle_of(workload: Workload, layout: Layout) -> Oracle:
    return oracle(trace_of(workload), layout)


def execute(run: Run) -> Figures:
    trace = trace_of(run.workload)
    known = oracle_of(run.workload, run.layout)
    loaded = (
        trace.at_speed(run.load * whole_rate(trace, known, run.layout) * trace.span_s / len(trace.requests))
        if run.by_all
        else None
    )
    loaded = loaded or at_load(trace, run.layout, known, run.load)
    conditions = Conditions(run.feed, run.force, run.seed, run.in_this_router)
    outcome = replay(loaded, run.layout, run.policy, conditions)
    slo = ReplaySlo(run.layout.cost, trace.mean_tokens, run.ttft_factor, run.tpot_factor)
    return figures(run.policy, outcome, slo, known.hit)


def execute_all(runs: Iterable[Run], processes: int, done: Callable[[int, int], None]) -> dict[Run, Figures]:
    """done: is told how many of how many runs have ended. Runs over one trace follow each other, so that a process
    reads it once."""
    ordered = list(dict.fromkeys(runs))
    found: dict[Run, Figures] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(execute, run): run for run in ordered}
        for number, future in enumerate(as_completed(waiting), 1):
            found[waiting[future]] = future.result()
            done(number, len(ordered))
    return found


def whole_rate(trace: Trace, known: Oracle, layout: Layout) -> float:
    """Requests a second that all nodes could serve if both kinds of work were spread evenly and decode steps were full:
    the same for every layout with as many nodes."""
    return layout.num_nodes * len(trace.requests) / (known.work_s + decode_work_s(trace, layout))


def decode_work_s(trace: Trace, layout: Layout) -> float:
    """Seconds of full decode steps, of one node."""
    decode = layout.cost.decode
    step_s = FULL * ReplaySlo(layout.cost, trace.mean_tokens).tpot_s(round(trace.mean_tokens))
    rows = max((step_s - decode.fixed_s) / decode.added_s(1, trace.mean_tokens), 1.0)
    return sum(r.num_output for r in trace.requests) * step_s / rows


def row_tokens_s(trace: Trace, layout: Layout) -> float:
    """KV tokens of rows × the seconds that they are held, in full decode steps."""
    step_s = FULL * ReplaySlo(layout.cost, trace.mean_tokens).tpot_s(round(trace.mean_tokens))
    return sum(r.num_output * step_s * (r.num_tokens + r.num_output) for r in trace.requests)


def pools_for(workload: Workload, num_nodes: int, cache_tokens: int, peak_load: float) -> Layout:
    """Most prefill nodes such that the others can decode what these let through at the highest load, and have room for
    its KV."""
    trace = trace_of(workload)
    for prefill in range(num_nodes - 1, 1, -1):
        layout = Layout(prefill=prefill, decode=num_nodes - prefill, cache_tokens=cache_tokens)
        known = oracle_of(workload, layout)
        offered = prefill * peak_load / known.work_s
        nodes = max(decode_work_s(trace, layout), row_tokens_s(trace, layout) / (ROOM * cache_tokens))
        if offered * nodes <= num_nodes - prefill:
            return layout
    return Layout(prefill=1, decode=num_nodes - 1, cache_tokens=cache_tokens)

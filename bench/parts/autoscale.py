"""Rules of autoscaling over traces in simulated time, and how long a replay of a large cluster takes.

    python -m bench.routing --autoscale [--quick] [--json FILE]

 1. rules: the router's own signal beside KEDA on waiting requests, an HPA on busy time, llm-d's rule and an oracle
    that knows the work that comes while a node starts. Pools of 1 to 12 prefill and 1 to 12 decode nodes; a node takes
    60 s to start. For each trace: goodput and node-hours of each rule, and ours beside the rule with the most goodput,
    the oracle left out. Our goodput is to be at least 0.98 of that rule's. Our node-hours are to be at most 0.9 of
    those of the best other rule, whatever its goodput.
 2. scale: 1,000 nodes (400 prefill, 600 decode) that are asked for 0.6 of what prefill nodes can do, with 30,000 and
    100,000 requests of conversations on one core; the line through both says what a million take.

Seconds of traces are those of the model; hardware as in `pdcluster_router.replay.scenario`. Recorded traces are used
where they are there.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness.report import Row, row
from pdcluster.settings.config import cache_directory
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.replay.report import ReplaySlo, ScalingFigures, scaling_figures
from pdcluster_router.replay.scaling import ScalingSpec
from pdcluster_router.replay.scenario import Layout, at_load, needed_nodes, oracle, replay
from pdcluster_router.replay.trace import Trace, read_trace
from pdcluster_router.replay.workloads import generate
from pdcluster_router.scaling.rules import RULES

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "data" / "conversation_trace.jsonl"
OURS, BOUND = "predicted", "oracle"
POOLS = Layout(prefill=12, decode=12)
CLOSE, CHEAPER = 0.98, 1 / 0.9
LARGE = Layout(prefill=400, decode=600)
LOAD = 0.6
MILLION = 1_000_000
MINUTES = 30.0


def traces(quick: bool) -> Iterator[Trace]:
    """Recorded conversations as they came, a day with bursts in 2.8 hours, and steady conversations and agents."""
    size = 0.1 if quick else 1.0
    if RECORDED.exists():
        yield read_trace(RECORDED).head(round(12_031 * size))
    yield generate("day", round(30_000 * size), 0).at_speed(3)
    yield generate("chat", round(10_000 * size), 0).at_speed(6)
    yield generate("agent", round(10_000 * size), 0).at_speed(3)


def rules_of(trace: Trace) -> dict[str, ScalingFigures]:
    known, slo = oracle(trace, POOLS), ReplaySlo(POOLS.cost, trace.mean_tokens)
    needed = needed_nodes(trace, POOLS, known)
    return {
        name: scaling_figures(name, replay(trace, POOLS, "seconds", scaling=ScalingSpec(rule, needed=needed)), slo)
        for name, rule in RULES.items()
    }


def rows_of(trace: Trace, found: dict[str, ScalingFigures]) -> Iterator[Row]:
    best = max((each for each in found.values() if each.rule != BOUND), key=lambda each: each.goodput)
    ours = found[OURS]
    for each in found.values():
        yield row("goodput", f"{trace.name}, {each.rule}", [each.goodput], "req/s")
        yield row("node-hours", f"{trace.name}, {each.rule}", [each.node_hours], "h")
    yield row(
        "goodput",
        f"{trace.name}, ours",
        [ours.goodput],
        "req/s",
        against=best.rule,
        against_value=best.goodput,
        goal=CLOSE,
    )
    rival = max((each for each in found.values() if each.rule not in (BOUND, OURS)), key=lambda each: each.goodput)
    yield Row(
        "node-hours", f"{trace.name}, ours", ours.node_hours, "h", against=rival.rule, against_value=rival.node_hours,
        better="less", goal=CHEAPER,
    )  # fmt: skip


def scale(quick: bool) -> Iterator[Row]:
    compiled.load(cache_directory())
    sizes, taken_s = (1_000, 3_000) if quick else (30_000, 100_000), []
    for size in sizes:
        trace = generate("chat", size, 1)
        trace = at_load(trace, LARGE, oracle(trace, LARGE), LOAD)
        began = time.perf_counter()
        replay(trace, LARGE, "seconds")
        taken_s.append(time.perf_counter() - began)
        yield row("time", f"1,000 nodes, {size:,} requests", [taken_s[-1]], "s")
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        yield row("memory", f"1,000 nodes, {size:,} requests", [memory], "MiB")
    each_s = (taken_s[1] - taken_s[0]) / (sizes[1] - sizes[0])
    minutes = (taken_s[1] + (MILLION - sizes[1]) * each_s) / 60
    case = "1,000 nodes, a million requests, by the line"
    yield Row("time", case, minutes, "min", against="allowed", against_value=MINUTES, better="less", goal=1.0)


def measure(quick: bool) -> list[Row]:
    rows = list[Row]()
    for trace in traces(quick):
        rows += rows_of(trace, rules_of(trace))
    rows += scale(quick)
    losing = [f"{each.metric} of {each.case} (beside {each.against})" for each in rows if each.holds is False]
    print(f"{len(losing)} cells do not hold{': ' if losing else ''}{'; '.join(losing)}")
    return rows

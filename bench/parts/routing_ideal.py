"""What choosing modes could win at most, about: the goodput of an ideal pool on the traces, speeds and number of nodes
of `bench.routing`'s modes.

The pool has one queue in the order of this router's own (due after PATIENCE times the own work), its nodes compute one
prompt after the other in the chunks of mixed nodes, prefixes are cached as in one pooled LRU, KV moves in no time, and
rows take their share of every step, evenly over nodes and time: none is ever slow, and no node idles while a prompt
waits. What no rule over real nodes gets is in here: nothing waits behind a prompt on a node that another could have
taken, and no row runs alone. Not a bound in the strict sense (another order might do better still), but told from the
same work; `order` "arrival" shows what the order is worth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.parts.routing_runs import Run, Workload, oracle_of, trace_of, whole_rate
from pdcluster_router.core.room import PATIENCE
from pdcluster_router.replay.report import ReplaySlo
from pdcluster_router.replay.scenario import Layout
from pdcluster_router.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """work_s: of one node, with the rows of all others beside it. late_s: the moment after which its first token is
    late."""

    arrival_s: float
    work_s: float
    late_s: float


Order = Callable[[Prompt], float]

ORDERS: Mapping[str, Order] = {
    "due": lambda prompt: prompt.arrival_s + PATIENCE * prompt.work_s,
    "arrival": lambda prompt: prompt.arrival_s,
}


def num_good(prompts: Sequence[Prompt], num_nodes: int, order: Order) -> int:
    """Of prompts in the order of their arrival: how many first tokens are in time."""
    free, waiting, coming, good = [0.0] * num_nodes, list[tuple[float, int]](), 0, 0
    for _ in prompts:
        now = heapq.heappop(free)
        if not waiting:
            now = max(now, prompts[coming].arrival_s)
        while coming < len(prompts) and prompts[coming].arrival_s <= now:
            heapq.heappush(waiting, (order(prompts[coming]), coming))
            coming += 1
        prompt = prompts[heapq.heappop(waiting)[1]]
        done_s = (
            max(now, prompt.arrival_s) + prompt.work_s
        )  # several may have come at the moment to which an idle node was set
        good += done_s <= prompt.late_s
        heapq.heappush(free, done_s)
    return good


def goodput(workload: Workload, layout: Layout, load: float, order: str = "due") -> float:
    """layout: of mixed nodes, whose chunks and cache the pool has; load: of all nodes, as of a Run by_all."""
    trace, known = trace_of(workload), oracle_of(workload, layout)
    speed = load * whole_rate(trace, known, layout) * trace.span_s / len(trace.requests)
    loaded, slo = trace.at_speed(speed), ReplaySlo(layout.cost, trace.mean_tokens)
    share = min(sum(_row_s(each, layout) for each in loaded.requests) / (layout.num_nodes * loaded.span_s), MOST_ROWS)
    prompts = [
        Prompt(
            each.arrival_s,
            _prompt_s(each.num_tokens, cached, layout) / (1.0 - share),
            each.arrival_s + slo.ttft_s(each.num_tokens),
        )
        for each, cached in zip(loaded.requests, known.cached, strict=True)
    ]
    return num_good(prompts, layout.num_nodes, ORDERS[order]) / loaded.span_s


# Of the time; where rows alone fill all nodes there is no pool to speak of.
MOST_ROWS = 0.95


def _prompt_s(num_tokens: int, cached: int, layout: Layout) -> float:
    new, prefill = num_tokens - cached, layout.cost.prefill
    return (
        prefill.fixed_s * max(new / layout.chunk_tokens, 1.0)
        + prefill.token_s * new
        + prefill.pair_s * new * (cached + new / 2)
    )


def _row_s(request: TraceRequest, layout: Layout) -> float:
    """What an answer adds to steps that are there anyway."""
    decode = layout.cost.decode
    return request.num_output * decode.added_s(1, request.num_tokens + request.num_output / 2)


def best(runs: Sequence[Run], order: str = "due") -> dict[str, float]:
    """By mix: the most over the loads and mixed layouts of these runs, of the mean over seeds."""
    points: dict[tuple[str, Layout, float], dict[Workload, float]] = {}
    for run in runs:
        if run.layout.mixed == run.layout.num_nodes:
            found = points.setdefault((run.workload.name, run.layout, run.load), {})
            if run.workload not in found:
                found[run.workload] = goodput(run.workload, run.layout, run.load, order)
    most: dict[str, float] = {}
    for (mix, _, _), by_workload in points.items():
        most[mix] = max(most.get(mix, 0.0), sum(by_workload.values()) / len(by_workload))
    return most

"""Routing policies over traces in simulated time: who is best where, how far `seconds` is from it, and whether choosing
P/D per request pays.

    python -m bench.routing [--quick] [--trace FILE] [--processes N] [--parts PARTS] [--mode-seeds N] [--mixes MIXES]
    [--json FILE] python -m bench.routing --real MODEL [--rounds N] [--seed S] [--json FILE] python -m bench.routing
    --pool FILE... [--json FILE]

 1. cells: all policies × 5 loads × 2 cache sizes on the recorded trace and on each generated kind. Load 1.0: the work
    that one pooled LRU cache would leave equals what the prefill nodes can do. Rivals run twice: as published (their
    rule decides at once, KV is fetched from another node only where the rule says so), and with this router's hold
    queue and pulls around their rule. Ours is judged against the best of all.
 2. imperfect: the best three again behind feeds that are 100 and 500 ms late and lose 1 % of messages, through the
    production index.
 3. seeds: the best three on generated kinds, seeds 0 to 4.
 4. modes: `seconds` choosing P/D per request, against every static split (remote always) and against colocated nodes
    (local always, two chunk sizes). Every way gets its best layout and load: goodput(way) is the maximum over layouts
    and loads of the mean over seeds, on the same traces at the same speeds; auto has the layouts of both others
    together. A mix that some way still does best on under the highest load is run under more, until every way has had
    its peak: a maximum at the edge says what was offered, not what a way can do. All run behind the same gate, with
    `seconds` choosing the nodes. Beside it, what an ideal pool of as many nodes would do (`routing_ideal`): how much
    there is to be won by any choice. Seeds differ by far more than ways do, and two of them decide a tie by chance:
    --mode-seeds 8 --mixes recorded,agent says it for these two.

Traces are samples (MOST_RECORDED requests of the recorded one, MOST_GENERATED of each kind), so that all ends within
half an hour on two cores. Decode, transfers and quadratic prefill are modelled (`pdcluster_router.replay`); seconds are
those of the model, so ratios are what counts. Rows with a goal are printed, and every cell that misses it; --json has
all figures of all policies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from bench.harness.report import Better, Row, add_output_flags, print_rows, save
from bench.parts import autoscale, routing_ideal, routing_real
from bench.parts.routing_runs import Contender, Run, Workload, execute_all, pools_for
from pdcluster.core.errors import ConfigError
from pdcluster_router.policy.base import Force
from pdcluster_router.policy.registry import POLICIES
from pdcluster_router.replay.feed import FeedSpec
from pdcluster_router.replay.report import Figures
from pdcluster_router.replay.scenario import Layout
from pdcluster_router.replay.trace import read_trace

OURS = "seconds"
RIVALS = [policy for policy in POLICIES if policy != OURS]
CONTENDERS = [Contender(OURS), *map(Contender, RIVALS), *(Contender(policy, True) for policy in RIVALS)]
RECORDED = str(Path(__file__).resolve().parents[2] / "shared" / "data" / "conversation_trace.jsonl")
LOADS = (0.5, 0.7, 0.85, 1.0, 1.2)
CACHES = (400_000, 4_000_000)
NUM_NODES = 12
# Within 5 % of the best.
CLOSE = 0.95

Way = Literal["colocated", "static", "auto"]
FORCED: Mapping[Way, Force] = {"colocated": "local", "static": "remote", "auto": "auto"}

UNITS = {
    "ttft_mean_s": "s",
    "ttft_p90_s": "s",
    "ttft_p99_s": "s",
    "tpot_mean_s": "s",
    "goodput": "1/s",
    "token_goodput": "tokens/s",
}
MODE_LOADS = (0.7, 0.85, 1.0, 1.15)
# One after the other, for mixes of which some way has not had its peak.
FURTHER_MODE_LOADS = (1.3, 1.5, 1.75)
MODE_NODES = 4
# Of generated mixes; a recorded one has as many stretches instead, from its beginning.
NUM_MODE_SEEDS, FIRST_MODE_SEED = 2, 11

MOST_RECORDED, MOST_GENERATED, MOST_MIXED = 1200, 400, 400
# More than the smaller caches hold.
MOST_DOCUMENTS = 800
MODE_CACHE = 1_500_000
CHUNKS = (256, 512)
# Mixes in which neither prompts nor answers are nearly all of the work.
BALANCED = ("balanced", "everything", "recorded")


@dataclass(frozen=True, slots=True)
class Plan:
    recorded: Workload
    kinds: tuple[Workload, ...]
    mixes: tuple[Workload, ...]
    loads: tuple[float, ...]
    caches: tuple[int, ...]
    mode_loads: tuple[float, ...]
    further_mode_loads: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return (self.recorded, *self.kinds)


def plan_of(path: str, *, quick: bool, num_mode_seeds: int = NUM_MODE_SEEDS, chosen: Sequence[str] = ()) -> Plan:
    """chosen: mixes of the modes, none: all."""
    kinds = ("chat", "agent", "rag", "no-reuse")
    mixes = ("recorded", *kinds, "prefill-heavy", "decode-heavy", "balanced", "everything")
    if unknown := set(chosen) - set(mixes):
        raise ConfigError(f"there is no mix {', '.join(sorted(unknown))}; use some of {', '.join(mixes)}")
    few, mode = (300, 300) if quick else (MOST_GENERATED, MOST_MIXED)
    which = range(1 if quick else num_mode_seeds)
    return Plan(
        recorded=Workload("recorded", path, 800 if quick else MOST_RECORDED),
        kinds=(
            *(Workload(kind, requests=few) for kind in kinds),
            Workload("documents", requests=few if quick else MOST_DOCUMENTS),
        ),
        mixes=tuple(
            Workload(mix, path, mode, number)
            if mix == "recorded"
            else Workload(mix, requests=mode, seed=FIRST_MODE_SEED + number)
            for mix in chosen or mixes
            for number in which
        ),
        loads=(0.7, 1.0) if quick else LOADS,
        caches=CACHES[:1] if quick else CACHES,
        mode_loads=(0.85, 1.0) if quick else MODE_LOADS,
        further_mode_loads=() if quick else FURTHER_MODE_LOADS,
        seeds=(0, 1) if quick else (0, 1, 2, 3, 4),
    )


# ---------------------------------------------------------------- what is run


def cells(plan: Plan) -> Iterator[Run]:
    for workload in plan.workloads:
        for cache in plan.caches:
            layout = pools_for(workload, NUM_NODES, cache, max(plan.loads))
            for load in plan.loads:
                yield from (_run_of(each, workload, layout, load) for each in CONTENDERS)


def imperfect(plan: Plan, best: Iterable[Contender]) -> Iterator[Run]:
    workload = plan.recorded
    layout = pools_for(workload, NUM_NODES, plan.caches[-1], max(plan.loads))
    for each in best:
        for feed in (FeedSpec(), FeedSpec(0.1), FeedSpec(0.5), FeedSpec(0.1, 0.01)):
            yield replace(_run_of(each, workload, layout, 0.85), feed=feed)


def seeds(plan: Plan, best: Iterable[Contender]) -> Iterator[Run]:
    for kind in plan.kinds:
        for seed in plan.seeds:
            workload = replace(kind, seed=seed)
            layout = pools_for(workload, NUM_NODES, plan.caches[-1], max(plan.loads))
            yield from (replace(_run_of(each, workload, layout, 0.85), seed=seed) for each in best)


def _run_of(contender: Contender, workload: Workload, layout: Layout, load: float) -> Run:
    return Run(workload, layout, contender.policy, load, in_this_router=contender.in_this_router)


def mode_layouts(num_nodes: int) -> Iterator[tuple[Way, Layout]]:
    """Colocated by chunk size, static splits, and ours on the same layouts."""
    for chunk in CHUNKS:
        mixed = Layout(mixed=num_nodes, cache_tokens=MODE_CACHE, chunk_tokens=chunk)
        yield "colocated", mixed
        yield "auto", mixed
    for prefill in range(1, num_nodes):
        split = Layout(prefill=prefill, decode=num_nodes - prefill, cache_tokens=MODE_CACHE, chunk_tokens=CHUNKS[0])
        yield "static", split
        yield "auto", split


def modes(mixes: Iterable[Workload], loads: Iterable[float]) -> Iterator[Run]:
    for workload in mixes:
        for way, layout in mode_layouts(MODE_NODES):
            for load in loads:
                yield Run(workload, layout, OURS, load, force=FORCED[way], by_all=True)


def without_peak(found: Found) -> set[str]:
    """Mixes of which a way does best under the highest load that it was run under."""
    mixes = set()
    for (mix, _), points in _by_way(found).items():
        best = max(points, key=lambda point: fmean(points[point]))
        if best[1] == max(load for _, load in points):
            mixes.add(mix)
    return mixes


# ---------------------------------------------------------------- what is promised


Found = Mapping[Run, Figures]


def name_of(run: Run) -> str:
    layout = run.layout
    nodes = f"{layout.prefill}P+{layout.decode}D" if not layout.mixed else f"{layout.mixed}M"
    return (
        f"{run.workload.name} seed {run.workload.seed} {nodes} cache {layout.cache_tokens / 1e6:g}M load {run.load:g}"
    )


def all_figures(found: Found) -> Iterator[Row]:
    for run, figures in found.items():
        feed = f" late {run.feed.delay_s:g} s lost {run.feed.loss:g}" if run.feed != FeedSpec() else ""
        case = f"{run.contender.name} {run.force}: {name_of(run)} chunk {run.layout.chunk_tokens}{feed}"
        for field in fields(figures):
            value = getattr(figures, field.name)
            if isinstance(value, float | int):
                yield Row(field.name, case, float(value), UNITS.get(field.name, ""))


def against_best(found: Found) -> Iterator[Row]:
    """In each cell, mean TTFT and goodput of ours against the best policy's; the ratio is 1 or above where ours is
    best."""
    for cell in _by_cell(found).values():
        ours = cell[OURS]
        if len(cell) < 2:
            continue
        run = next(run for run in found if found[run] is ours)
        rivals = {name: figures for name, figures in cell.items() if name != OURS}
        fastest = min(rivals, key=lambda name: rivals[name].ttft_mean_s)
        yield goal(
            "mean TTFT",
            name_of(run),
            ours.ttft_mean_s,
            "s",
            fastest,
            rivals[fastest].ttft_mean_s,
            CLOSE,
            less_is_better=True,
        )
        most = max(rivals, key=lambda name: rivals[name].goodput)
        yield goal("goodput", name_of(run), ours.goodput, "1/s", most, rivals[most].goodput, CLOSE)


def promises_on_recorded(found: Found) -> Iterator[Row]:
    for (workload, _, load, *_), cell in _by_cell(found).items():
        if workload.name != "recorded" or load < 0.8 or "least-load" not in cell:
            continue
        ours, plain = cell[OURS], cell["least-load"]
        case = name_of(next(run for run in found if found[run] is ours))
        yield goal(
            "mean TTFT",
            case,
            ours.ttft_mean_s,
            "s",
            "0.7 × least-load",
            0.7 * plain.ttft_mean_s,
            1.0,
            less_is_better=True,
        )
        here = cell["least-load in this router"].ttft_mean_s
        yield goal(
            "mean TTFT",
            case,
            ours.ttft_mean_s,
            "s",
            "0.7 × least-load in this router",
            0.7 * here,
            None,
            less_is_better=True,
        )
        yield goal("hit", case, ours.hit, "", "pooled LRU", ours.hit_oracle, 0.9)
        yield goal("max ÷ mean busy", case, ours.imbalance, "", "limit", 1.15, 1.0, less_is_better=True)


def against_modes(found: Found) -> Iterator[Row]:
    """Best goodput over loads and layouts, of each way."""
    ideal, in_turn = routing_ideal.best(list(found)), routing_ideal.best(list(found), "arrival")
    by_way = _by_way(found)
    for mix in dict.fromkeys(mix for mix, _ in by_way):
        peaks: dict[str, float] = dict.fromkeys((*FORCED, "auto, all mixed"), 0.0)
        for way in FORCED:
            for (layout, _), goodputs in by_way[mix, way].items():
                for name in (way, f"{way}, all mixed") if way == "auto" and layout.mixed else (way,):
                    peaks[name] = max(peaks[name], fmean(goodputs))
        rival = max(("colocated", "static"), key=lambda way: peaks[way])
        yield goal(
            "goodput auto",
            f"{mix}, {MODE_NODES} nodes",
            peaks["auto"],
            "1/s",
            rival,
            peaks[rival],
            1.1 if mix in BALANCED else 1.0,
        )
        yield goal(
            "goodput auto, all mixed",
            f"{mix}, {MODE_NODES} nodes",
            peaks["auto, all mixed"],
            "1/s",
            rival,
            peaks[rival],
            None,
        )
        yield goal(
            "goodput of an ideal pool", f"{mix}, {MODE_NODES} nodes", ideal[mix], "1/s", rival, peaks[rival], None
        )
        yield goal(
            "the same, first come first served",
            f"{mix}, {MODE_NODES} nodes",
            in_turn[mix],
            "1/s",
            rival,
            peaks[rival],
            None,
        )


def _by_way(found: Found) -> dict[tuple[str, Way], dict[tuple[Layout, float], list[float]]]:
    """Goodputs of all seeds by mix and way, then by layout and load."""
    by_way: dict[tuple[str, Way], dict[tuple[Layout, float], list[float]]] = {}
    for run, figures in found.items():
        way = next(way for way, force in FORCED.items() if force == run.force)
        by_way.setdefault((run.workload.name, way), {}).setdefault((run.layout, run.load), []).append(figures.goodput)
    return by_way


def goal(
    metric: str,
    case: str,
    value: float,
    unit: str,
    against: str,
    other: float,
    least: float | None,
    *,
    less_is_better: bool = False,
) -> Row:
    better: Better = "less" if less_is_better else "more"
    return Row(metric, case, value, unit, against=against, against_value=other, better=better, goal=least)


def best_three(found: Found) -> list[Contender]:
    """Ours and the two whose mean TTFT is, over all cells, closest to each cell's best."""
    distance = dict.fromkeys((each.name for each in CONTENDERS), 0.0)
    for cell in _by_cell(found).values():
        least = min(figures.ttft_mean_s for figures in cell.values())
        for name, figures in cell.items():
            distance[name] += min(figures.ttft_mean_s / max(least, 1e-9), 10.0)
    ranked = sorted(CONTENDERS, key=lambda each: distance[each.name])
    return [Contender(OURS), *[each for each in ranked if each.policy != OURS][:2]]


Cell = tuple[Workload, Layout, float, FeedSpec]


def _by_cell(found: Found) -> dict[Cell, dict[str, Figures]]:
    cells: dict[Cell, dict[str, Figures]] = {}
    for run, figures in found.items():
        cells.setdefault((run.workload, run.layout, run.load, run.feed), {})[run.contender.name] = figures
    return cells


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few cells of each part; of --real, 6 rounds of short turns, in 3 minutes",
    )
    parser.add_argument(
        "--trace", default=RECORDED, help="a Mooncake or Azure trace in place of the conversation trace"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parts", default="cells,imperfect,seeds,modes")
    parser.add_argument(
        "--mode-seeds",
        type=int,
        default=NUM_MODE_SEEDS,
        help="seeds, or stretches of the recorded trace, of each mix of the modes",
    )
    parser.add_argument("--mixes", default="", help="of the modes, with commas; none: all")
    parser.add_argument(
        "--real",
        type=Path,
        metavar="MODEL",
        help="instead of replays: two real nodes with this model (see bench.parts.routing_real)",
    )
    parser.add_argument(
        "--pool",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="instead of replays: judge the rounds of several --real --json together",
    )
    parser.add_argument(
        "--autoscale", action="store_true", help="instead of policies: rules of autoscaling (see bench.parts.autoscale)"
    )
    parser.add_argument("--rounds", type=int, default=36, help="of --real, half a minute each")
    parser.add_argument("--seed", type=int, default=0, help="of --real")
    add_output_flags(parser)
    arguments = parser.parse_args()
    if arguments.autoscale:
        rows = autoscale.measure(arguments.quick)
    elif arguments.pool is not None:
        rows = list(routing_real.pooled(arguments.pool, arguments.seed))
    elif arguments.real is not None:
        rounds, seconds = (6, 5.0) if arguments.quick else (arguments.rounds, 8.0)
        rows = list(routing_real.measure(arguments.real, rounds, seconds, arguments.seed))
    else:
        read_trace(Path(arguments.trace))  # a file that is not there is said now and not after half of the replays
        mixes = arguments.mixes.split(",") if arguments.mixes else ()
        plan = plan_of(arguments.trace, quick=arguments.quick, num_mode_seeds=arguments.mode_seeds, chosen=mixes)
        rows = list(measure(plan, arguments.processes, arguments.parts.split(",")))
    report(rows)
    save(rows, arguments)


def report(rows: list[Row]) -> None:
    judged = [row for row in rows if row.against and not row.metric.startswith(routing_real.IN_TIME)]
    print_rows(
        [
            row
            for row in rows
            if row.goal is None and row.case.startswith("real") and not row.metric.startswith(routing_real.IN_TIME)
        ]
    )
    print_rows([row for row in judged if row.holds is not False])
    missed = [row for row in judged if row.holds is False]
    print(
        f"\n{len(missed)} of {sum(row.holds is not None for row in judged)} goals are missed" + (":" if missed else "")
    )
    print_rows(missed)


def measure(plan: Plan, processes: int, parts: list[str]) -> Iterator[Row]:
    best = [Contender(OURS), Contender("conductor"), Contender("conductor", in_this_router=True)]
    if "cells" in parts:
        found = _run(cells(plan), processes, "cells")
        best = best_three(found)
        yield from (*all_figures(found), *against_best(found), *promises_on_recorded(found))
    for part, runs in (("imperfect", imperfect(plan, best)), ("seeds", seeds(plan, best))):
        if part in parts:
            found = _run(runs, processes, part)
            yield from (*all_figures(found), *against_best(found))
    if "modes" in parts:
        found = dict(_run(modes(plan.mixes, plan.mode_loads), processes, "modes"))
        for load in plan.further_mode_loads:
            if mixes := without_peak(found):
                found |= _run(
                    modes([mix for mix in plan.mixes if mix.name in mixes], (load,)), processes, f"modes, load {load:g}"
                )
        yield from (*all_figures(found), *against_modes(found))


def _run(runs: Iterable[Run], processes: int, part: str) -> Found:
    begun = time.monotonic()

    def done(number: int, total: int) -> None:
        if number == total or number % 25 == 0:
            print(f"{part}: {number} of {total} replays, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    return execute_all(runs, processes, done)


if __name__ == "__main__":
    main()

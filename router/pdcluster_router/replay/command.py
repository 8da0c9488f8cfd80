"""`pdctl replay` behind its flags: check options, run each policy, print a row for each."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import cache_directory
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.replay.feed import FeedSpec
from pdcluster_router.replay.fitted import read_cost
from pdcluster_router.replay.options import NodeOptions, Routing, Scaling, Traffic
from pdcluster_router.replay.report import Figures, ReplaySlo, ScalingFigures, figures, scaling_figures
from pdcluster_router.replay.scaling import ScalingSpec
from pdcluster_router.replay.scenario import Conditions, Layout, needed_nodes, of_cost, oracle, replay
from pdcluster_router.replay.trace import MAX_REQUESTS, Trace, read_trace
from pdcluster_router.replay.workloads import KINDS, generate
from pdcluster_router.scaling.rules import rules_of

GENERATE = "generate:"
NUM_GENERATED = 5000
# Columns of the table. JSON has all figures.
COLUMNS = (
    "policy",
    "ttft_mean_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "goodput",
    "hit",
    "hit_oracle",
    "imbalance",
    "attainment",
    "remote",
)
SCALING_COLUMNS = (
    "rule", "goodput", "attainment", "node_hours", "per_node_hour", "most_nodes", "ttft_mean_s", "ttft_p90_s",
    "ttft_p99_s", "tpot_mean_s",
)  # fmt: skip
# Nodes times requests from which compiled choices are worth loading, and compiling.
SOME_CHOICES, MANY_CHOICES = 200_000, 20_000_000
# Bounds of what can be asked for. Beyond them a time in seconds has no microseconds any more.
SPEEDS = (1e-3, 1e6)
LONGEST_S = 86_400.0
MOST_LOSS = 0.999
MOST_NODES = 10_000
MOST_CACHED = 10**12
PROGRESS_S = 5.0
NOT_SCALED = Scaling()


def rows(
    traffic: Traffic, nodes: NodeOptions, routing: Routing, scaling: Scaling = NOT_SCALED
) -> Sequence[Figures | ScalingFigures]:
    """Rows of all policies, or of all rules. Raises ConfigError before the first one runs."""
    policies = split_policies(routing.policy)
    rules = rules_of(scaling.autoscale) if scaling.autoscale else []
    layout, conditions = layout_of(nodes, traffic.seed), _conditions(routing, traffic.seed)
    check("--requests", traffic.requests, 0, MAX_REQUESTS)
    check("--speedup", traffic.speedup, *SPEEDS)
    check("--start-s", scaling.start_s, 0, LONGEST_S)
    if rules and (layout.mixed or not layout.prefill or not layout.decode or len(policies) > 1):
        raise ConfigError("--autoscale scales prefill and decode nodes under one policy; give --prefill and --decode")
    layout.nodes(1)
    trace = load_trace(traffic.trace, traffic.seed)
    if traffic.requests:
        trace = trace.head(traffic.requests)
    trace = trace.at_speed(traffic.speedup)
    _use_compiled(layout, trace)
    known = oracle(trace, layout)
    slo = ReplaySlo(layout.cost, trace.mean_tokens)
    if not rules:
        return [
            figures(
                policy, replay(trace, layout, policy, conditions, progress=_progress(policy, trace)), slo, known.hit
            )
            for policy in policies
        ]
    needed = needed_nodes(trace, layout, known)
    found = []
    for rule in rules:
        spec = ScalingSpec(rule, scaling.start_s, needed=needed)
        outcome = replay(trace, layout, policies[0], conditions, spec, _progress(rule.name, trace))
        found.append(scaling_figures(rule.name, outcome, slo))
    return found


def _use_compiled(layout: Layout, trace: Trace) -> None:
    """Weigh choices in compiled code where that is there, or worth its minute. The choices are the same."""
    size = layout.num_nodes * len(trace.requests)
    if size > MANY_CHOICES or (size > SOME_CHOICES and compiled.is_kept(cache_directory())):
        compiled.load(cache_directory())


def _progress(name: str, trace: Trace) -> Callable[[int], None]:
    """A line on stderr now and then, on a terminal's own line."""
    began = told = time.monotonic()
    total = len(trace.requests)

    def progress(num: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < PROGRESS_S or num == total:
            if num == total and told > began:
                print(file=sys.stderr)
            return
        told = now
        left_s = (now - began) * (total - num) / num
        line = f"{name}: {num:,} of {total:,} requests, about {left_s:.0f} s to go"
        print(
            f"\r{line}\033[K" if sys.stderr.isatty() else line,
            end="" if sys.stderr.isatty() else "\n",
            file=sys.stderr,
            flush=True,
        )

    return progress


def split_policies(text: str) -> list[str]:
    """`a,b:x=1,y=2,c` is a, b with two parameters, and c: a part with = belongs to the policy before it."""
    policies: list[str] = []
    for part in (text or DEFAULT).split(","):
        is_parameter = "=" in part and ":" not in part
        if is_parameter and policies:
            policies[-1] += f",{part}"
        else:
            policies.append(part.strip())
    for policy in policies:
        make_policy(policy)
    return policies


def layout_of(asked: NodeOptions, seed: int) -> Layout:
    """8 prefill and 4 decode nodes unless a role is given."""
    counts = (asked.prefill, asked.decode, asked.mixed)
    if counts == (None, None, None):
        counts = (8, 4, 0)
    for flag, count in zip(("--prefill", "--decode", "--mixed"), counts, strict=True):
        check(flag, count or 0, 0, MOST_NODES)
    check("--cache-tokens", asked.cache_tokens, 1, MOST_CACHED)
    prefill, decode, mixed = (count or 0 for count in counts)
    layout = Layout(prefill=prefill, decode=decode, mixed=mixed, cache_tokens=asked.cache_tokens, seed=seed)
    return layout if asked.cost is None else of_cost(layout, read_cost(asked.cost))


def load_trace(text: str, seed: int) -> Trace:
    if not text.startswith(GENERATE):
        kind = next((part for part in text.split(":") if part in KINDS), None)
        if kind is not None and not Path(text).exists():
            raise ConfigError(f"there is no file {text}; generated requests are called {GENERATE}{kind}")
        return read_trace(Path(text))
    kind, _, number = text.removeprefix(GENERATE).partition(":")
    if number and not number.isdigit():
        raise ConfigError(f"{text!r}: {number!r} is no number of requests; write generate:KIND:REQUESTS")
    num_requests = int(number or NUM_GENERATED)
    check(text, num_requests, 1, MAX_REQUESTS)
    return generate(kind, num_requests, seed)


def check(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError for a number that is none, or beyond its bounds."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value:g}, but must be from {low:g} to {high:g}")


def show(found: Sequence[Figures | ScalingFigures], output: Literal["table", "json"] | str) -> None:
    if output == "json":
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    columns = SCALING_COLUMNS if found and isinstance(found[0], ScalingFigures) else COLUMNS
    table = [columns, *(tuple(_cell(getattr(row, column)) for column in columns) for row in found)]
    widths = [max(len(line[column]) for line in table) for column in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _conditions(asked: Routing, seed: int) -> Conditions:
    check("--feed-delay-ms", asked.feed_delay_ms, 0, 1000 * LONGEST_S)
    check("--feed-loss", asked.feed_loss, 0, MOST_LOSS)
    return Conditions(
        FeedSpec(asked.feed_delay_ms / 1000, asked.feed_loss), asked.mode.value, seed, asked.in_this_router
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

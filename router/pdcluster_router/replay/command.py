"""`pdctl replay` behind its flags: check options, run each policy, print a row for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pdcluster.core.errors import ConfigError
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.replay.feed import FeedSpec
from pdcluster_router.replay.fitted import read_cost
from pdcluster_router.replay.options import NodeOptions, Routing, Traffic
from pdcluster_router.replay.report import Figures, ReplaySlo, figures
from pdcluster_router.replay.scenario import Conditions, Layout, of_cost, oracle, replay
from pdcluster_router.replay.trace import Trace, read_trace
from pdcluster_router.replay.workloads import generate

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


def rows(traffic: Traffic, nodes: NodeOptions, routing: Routing) -> list[Figures]:
    """Rows of all policies. Raises ConfigError before the first one runs."""
    policies = split_policies(routing.policy)
    layout, conditions = layout_of(nodes, traffic.seed), _conditions(routing, traffic.seed)
    if traffic.requests < 0:
        raise ConfigError(f"cannot replay {traffic.requests} requests; give 0 for all")
    layout.nodes(1)
    trace = load_trace(traffic.trace, traffic.seed)
    if traffic.requests:
        trace = trace.head(traffic.requests)
    trace = trace.at_speed(traffic.speedup)
    known = oracle(trace, layout)
    slo = ReplaySlo(layout.cost, trace.mean_tokens)
    return [figures(policy, replay(trace, layout, policy, conditions), slo, known.hit) for policy in policies]


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
    prefill, decode, mixed = (count or 0 for count in counts)
    layout = Layout(prefill=prefill, decode=decode, mixed=mixed, cache_tokens=asked.cache_tokens, seed=seed)
    return layout if asked.cost is None else of_cost(layout, read_cost(asked.cost))


def load_trace(text: str, seed: int) -> Trace:
    if not text.startswith(GENERATE):
        return read_trace(Path(text))
    kind, _, number = text.removeprefix(GENERATE).partition(":")
    if number and not number.isdigit():
        raise ConfigError(f"{text!r}: {number!r} is no number of requests; write generate:KIND:REQUESTS")
    return generate(kind, int(number or NUM_GENERATED), seed)


def show(found: Sequence[Figures], output: Literal["table", "json"] | str) -> None:
    if output == "json":
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    table = [COLUMNS, *(tuple(_cell(getattr(row, column)) for column in COLUMNS) for row in found)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _conditions(asked: Routing, seed: int) -> Conditions:
    if asked.feed_delay_ms < 0:
        raise ConfigError(f"a feed cannot be {asked.feed_delay_ms:g} ms late; give 0 or more")
    if not 0 <= asked.feed_loss < 1:
        raise ConfigError(f"a share of {asked.feed_loss:g} of messages cannot be lost; give 0 to below 1")
    return Conditions(
        FeedSpec(asked.feed_delay_ms / 1000, asked.feed_loss), asked.mode.value, seed, asked.in_this_router
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Overload of real processes: bootstrap, a prefill and a decode node with an engine, and a router, as `pdcluster up`
starts them.

Capacity is measured: requests per second while some always wait. With two cores the prefill node has one to itself;
decode node, router and this client share the other, which is part of what is measured. Loads and figures are those of
`bench.overload`.

So is the SLO where the machine is fast enough; otherwise it is longer, so that the longest prompt, alone, takes as much
of it as before nodes that keep a pace (0.6). With one prefill node nobody's first token comes before a prompt that is
being computed there is done: where one takes longer than the whole SLO, all that come meanwhile are refused, whoever
asks, and what is counted is how many long prompts were drawn (at 1 s, 11 a minute that took 1.1 s each: of the 7 of 79
requests that the small tenant missed, 5 came behind one).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.fakes.paced_nodes import Pace
from bench.harness.cluster import NodePlan, cluster
from bench.harness.offered_load import (
    GOAL,
    MOST_TOKENS,
    OVERLOAD,
    SLO_S,
    Outcome,
    Target,
    ask,
    attainments,
    by_length,
    goodput,
    offer,
    prompt_tokens,
    refusals,
)
from bench.harness.report import Row
from pdcluster.checkpoint import bundled

TENANTS = ("all", "flood", "small")
WINDOW_S = 4.0
MOST_WINDOWS = 8
# Capacity is that of the last window once two in a row agree to this part: young nodes compile, and fit what their
# steps cost.
AGREE = 0.1

# Requests that are always open while capacity is measured: enough that the prefill node never idles, too few to be
# refused.
NUM_WAITING = 4

# Pause of a client that was refused while capacity is measured: it should not be, and must not take the router's core.
REFUSED_S = 0.1


# Of the SLO that the longest prompt takes when nothing else runs, before nodes that keep a pace.
LONGEST = Pace().token_s * MOST_TOKENS / SLO_S

# How many times longer than others the phase with the small tenant is, which asks for so little that 30 s would know
# its share within 0.05 only.
FLOOD_FACTOR = 4


@contextmanager
def router(model: Path, num_workers: int, slo_s: float) -> Iterator[Target]:
    cores = sorted(os.sched_getaffinity(0))
    nodes = [NodePlan("p0", "prefill", cores[-1]), NodePlan("d0", "decode", cores[0])]
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        tenants.write_text("".join(f'[{name}]\nkeys = ["key-of-{name}"]\n' for name in TENANTS))
        flags = [
            "--slo-ttft-s",
            f"{slo_s:g}",
            "--mode",
            "remote",
            "--tenants",
            str(tenants),
            "--workers",
            str(num_workers),
        ]
        os.sched_setaffinity(0, set(cores[:-1]) or set(cores))  # children inherit it; nodes have cores of their own
        try:
            with cluster(model, nodes, "auto", flags, api_key=f"key-of-{TENANTS[0]}") as client:
                yield Target.of(client.address, client.model, slo_s)
        finally:
            os.sched_setaffinity(0, set(cores))


def level(target: Target) -> float:
    """The SLO for these nodes, in tenths of a second; see the module's docstring. The first prompts teach the node what
    its steps cost."""
    rng = random.Random("level")
    alone = [asyncio.run(ask(target, TENANTS[0], MOST_TOKENS, rng)) for _ in range(7)][2:]
    if any(outcome.status != 200 for outcome in alone):
        raise RuntimeError(f"prompts of {MOST_TOKENS} tokens are refused by idle nodes: {alone}")
    return max(SLO_S, round(statistics.median(outcome.ttft_s for outcome in alone) / LONGEST, 1))


async def saturate(target: Target, phase: str) -> float:
    """Requests per second that are served while NUM_WAITING are always open."""
    until, rng = time.perf_counter() + WINDOW_S, random.Random(phase)
    served = 0

    async def client() -> None:
        nonlocal served
        while time.perf_counter() < until:
            outcome = await ask(target, TENANTS[0], prompt_tokens(rng), rng)
            served += outcome.status == 200 and time.perf_counter() < until
            if outcome.status != 200:
                await asyncio.sleep(REFUSED_S)

    await asyncio.gather(*(client() for _ in range(NUM_WAITING)))
    return served / WINDOW_S


def settled(target: Target) -> float:
    rates: list[float] = []
    for window in range(MOST_WINDOWS):
        rates.append(asyncio.run(saturate(target, f"window {window}")))
        if len(rates) > 1 and abs(rates[-1] - rates[-2]) <= AGREE * rates[-1]:
            break
    return rates[-1]


async def run(target: Target, phase: str, rates: dict[str, float], seconds: float) -> list[Outcome]:
    """rates: tenant → requests per second. Every phase has prompts of its own: the nodes have cached those of the
    others."""
    runs = [offer(target, tenant, rate, seconds, random.Random(f"{phase} {tenant}")) for tenant, rate in rates.items()]
    return [outcome for outcomes in await asyncio.gather(*runs) for outcome in outcomes]


def measure(model: Path | None, seconds: float, loads: Sequence[float], num_workers: int) -> list[Row]:
    model = model or bundled.path()
    with router(model, num_workers, SLO_S) as target:
        slo_s = level(target)
    with router(model, num_workers, slo_s) as target:
        capacity = settled(target)
        rows = [Row("capacity", f"processes, SLO {slo_s:g} s", capacity, "req/s")]
        peak, peak_load = 0.0, 0.0
        for load in loads:
            value = goodput(asyncio.run(run(target, f"load {load:g}", {"all": load * capacity}, seconds)), seconds)
            rows.append(
                Row("goodput", f"processes, load {load:g}", value, "req/s", against="capacity", against_value=capacity)
            )
            peak, peak_load = max((peak, peak_load), (value, load))
        outcomes = asyncio.run(run(target, "overload", {"all": OVERLOAD * capacity}, seconds))
        value = goodput(outcomes, seconds)
        against = f"peak (load {peak_load:g})"
        rows.append(
            Row(
                "goodput",
                f"processes, load {OVERLOAD:g}",
                value,
                "req/s",
                against=against,
                against_value=peak,
                goal=GOAL,
            )
        )
        case = f"processes, load {OVERLOAD:g}"
        return rows + refusals(outcomes, case) + by_length(outcomes, case) + fairness(target, capacity, seconds)


def fairness(target: Target, capacity: float, seconds: float) -> list[Row]:
    """A tenant that asks for a tenth of the cluster beside one that asks for twice of it."""
    outcomes = asyncio.run(
        run(target, "flood", {"flood": 2.0 * capacity, "small": 0.1 * capacity}, FLOOD_FACTOR * seconds)
    )
    return attainments(outcomes, "processes, ")

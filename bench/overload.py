"""What is left of a cluster's goodput when more is asked than it can do: the real HTTP application, gate and dispatch
before nodes that keep a pace.

Goodput is the rate of requests that meet the time-to-first-token SLO, all offered ones counted. Peak: the best over
loads up to 1.1 of capacity. At 1.5 the router must keep 0.9 of it, and answer every refused request at once with 429
and Retry-After; beside it the same load without a service level. Then one tenant floods while another asks for a tenth
of the capacity. Client and router share a process and its core.

Then the same over real processes (`overload_cluster`), bootstrap, nodes with an engine and a router, whose capacity is
measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.fakes.paced_nodes import Pace as NodePace
from bench.fakes.paced_nodes import PacedCluster
from bench.harness import overload_cluster
from bench.harness.offered_load import (
    GOAL,
    OVERLOAD,
    SLO_S,
    Outcome,
    Target,
    attainments,
    by_length,
    goodput,
    offer,
    prompt_tokens,
    refusals,
)
from bench.harness.report import Row, add_output_flags, print_rows, save
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import listening, router_metrics
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

NUM_NODES = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """loads and shares of tenants are parts of capacity; offered: tenant → load."""

    offered: dict[str, float]
    slo: Slo
    seconds: float
    seed: int = 0


# ---------------------------------------------------------------- one run


def capacity(pace: NodePace) -> float:
    """Requests per second that the nodes can prefill."""
    rng = random.Random(1)
    mean = sum(prompt_tokens(rng) for _ in range(20_000)) / 20_000
    return NUM_NODES / (pace.token_s * mean)


@asynccontextmanager
async def router(scenario: Scenario, pace: NodePace) -> AsyncIterator[Target]:
    cluster = PacedCluster(NUM_NODES, pace)
    selector = PolicySelector(PolicyHolder(make_policy(DEFAULT)), cluster.view, lambda hashes: {})
    is_shared = len(scenario.offered) > 1
    settings = DispatchSettings(slo=scenario.slo, hold=HoldLimits(is_shared=is_shared))
    dispatch = Dispatch(cluster, cluster, selector, settings)
    entries = {tenant: Entry(keys=[f"key-of-{tenant}"]) for tenant in scenario.offered} if is_shared else None
    app = create_app(dispatch, HttpSettings(max_requests=4096), router_metrics(), Places(4096, Tenants(entries)))
    async with listening(app, "127.0.0.1:0", drain_s=1.0) as address:
        yield Target.of(address, "paced")


async def run(scenario: Scenario, pace: NodePace) -> list[Outcome]:
    async with router(scenario, pace) as target:
        rate = capacity(pace)
        runs = [
            offer(target, tenant, load * rate, scenario.seconds, random.Random(f"{scenario.seed} {tenant}"))
            for tenant, load in scenario.offered.items()
        ]
        return [outcome for outcomes in await asyncio.gather(*runs) for outcome in outcomes]


# ---------------------------------------------------------------- figures


def measure(seconds: float, loads: Sequence[float]) -> list[Row]:
    pace = NodePace()
    plain = Scenario({"all": 1.0}, Slo(SLO_S), seconds)
    rows, peak, peak_load = [], 0.0, 0.0
    for load in loads:
        value = goodput(asyncio.run(run(replace(plain, offered={"all": load}), pace)), seconds)
        rows.append(Row("goodput", f"load {load:g}", value, "req/s", against="capacity", against_value=capacity(pace)))
        peak, peak_load = max((peak, peak_load), (value, load))
    over = replace(plain, offered={"all": OVERLOAD})
    outcomes = asyncio.run(run(over, pace))
    value = goodput(outcomes, seconds)
    against = f"peak (load {peak_load:g})"
    rows.append(
        Row(
            "goodput",
            f"load {OVERLOAD:g}",
            value,
            "req/s",
            against=against,
            against_value=peak,
            goal=GOAL,
        )
    )
    without = goodput(asyncio.run(run(replace(over, slo=Slo()), pace)), seconds)
    rows.append(
        Row("goodput", f"load {OVERLOAD:g}, no service level", without, "req/s", against=against, against_value=peak)
    )
    return rows + refusals(outcomes) + by_length(outcomes) + fairness(seconds, pace)


def fairness(seconds: float, pace: NodePace) -> list[Row]:
    """A tenant that asks for a tenth of the cluster beside one that asks for twice of it."""
    outcomes = asyncio.run(run(Scenario({"flood": 2.0, "small": 0.1}, Slo(SLO_S), seconds), pace))
    return attainments(outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="shorter runs, fewer loads")
    parser.add_argument("--only", choices=("paced", "processes"), help="one of the two parts")
    parser.add_argument("--model", type=Path, help="of the processes' nodes; default: the bundled one")
    parser.add_argument("--workers", type=int, default=1, help="of the router process")
    add_output_flags(parser)
    arguments = parser.parse_args()
    seconds, loads = (8.0, (0.8, 1.0)) if arguments.quick else (30.0, (0.6, 0.8, 0.9, 1.0, 1.1))
    rows = measure(seconds, loads) if arguments.only != "processes" else []
    if arguments.only != "paced":
        rows += overload_cluster.measure(arguments.model, seconds, loads, arguments.workers)
    print_rows(rows)
    save(rows, arguments)


if __name__ == "__main__":
    main()

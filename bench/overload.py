"""What is left of a cluster's goodput when more is asked than it can do: the real HTTP application, gate and dispatch before nodes that keep a pace.

Goodput is the rate of requests that meet the time-to-first-token SLO, all offered ones counted. Peak: the best over loads up to 1.1 of capacity. At
1.5 the router must keep 0.9 of it, and answer every refused request at once with 429 and Retry-After; beside it the same load without a service
level. Then one tenant floods while another asks for a tenth of the capacity. Client and router share a process and its core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.paced_nodes import Pace as NodePace
from bench.paced_nodes import PacedCluster
from bench.report import Row, print_rows, write_json
from pdcluster_router.admission import Slo
from pdcluster_router.app import HttpSettings, create_app
from pdcluster_router.chooser import Chooser, PolicyHolder
from pdcluster_router.dispatch import Dispatch, DispatchSettings
from pdcluster_router.hold import HoldLimits
from pdcluster_router.places import Places
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.server import listening, router_metrics
from pdcluster_router.tenants import Entry, Tenants

NUM_NODES = 2
SLO_S = 1.0
MEAN_TOKENS = 800
OUTPUT_TOKENS = 8
OVERLOAD = 1.5
GOAL = 0.9
AT_ONCE_S = 0.1
"""A refusal is at once when it takes no longer than this; the process is busy with everybody's streams, too."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """loads and shares of tenants are parts of capacity; offered: tenant → load."""

    offered: dict[str, float]
    slo: Slo
    seconds: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    tenant: str
    num_tokens: int
    status: int
    ttft_s: float
    has_retry_after: bool

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.ttft_s <= SLO_S


# ---------------------------------------------------------------- one run


def prompt_tokens(rng: random.Random) -> int:
    """Most prompts are short, some are long; the mean is MEAN_TOKENS."""
    return min(max(int(rng.lognormvariate(0.0, 0.8) * MEAN_TOKENS / 1.377), 16), 6000)


def capacity(pace: NodePace) -> float:
    """Requests per second that the nodes can prefill."""
    rng = random.Random(1)
    mean = sum(prompt_tokens(rng) for _ in range(20_000)) / 20_000
    return NUM_NODES / (pace.token_s * mean)


@asynccontextmanager
async def router(scenario: Scenario, pace: NodePace) -> AsyncIterator[tuple[str, int]]:
    cluster = PacedCluster(NUM_NODES, pace)
    chooser = Chooser(PolicyHolder(make_policy(DEFAULT)), cluster.view, lambda hashes: {})
    is_shared = len(scenario.offered) > 1
    settings = DispatchSettings(slo=scenario.slo, hold=HoldLimits(is_shared=is_shared))
    dispatch = Dispatch(cluster, cluster, chooser, settings)
    entries = {tenant: Entry(keys=[f"key-of-{tenant}"]) for tenant in scenario.offered} if is_shared else None
    app = create_app(dispatch, HttpSettings(max_requests=4096), router_metrics(), Places(4096, Tenants(entries)))
    async with listening(app, "127.0.0.1:0", drain_s=1.0) as address:
        host, _, port = address.rpartition(":")
        yield host, int(port)


async def ask(where: tuple[str, int], tenant: str, num_tokens: int, rng: random.Random) -> Outcome:
    """One streamed completion over a connection of its own; time to the first event."""
    body = {"model": "paced", "prompt": [rng.randrange(100, 1000) for _ in range(num_tokens)], "max_tokens": OUTPUT_TOKENS, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nauthorization: Bearer key-of-{tenant}\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(*where)
    try:
        writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.split(b" ", 2)[1] == b"200":
            await reader.readuntil(b"data:")
        ttft_s = time.perf_counter() - started
        await reader.read()
    finally:
        writer.close()
    status = int(answer.split(b" ", 2)[1])
    if status not in (200, 429):
        raise RuntimeError(f"a request was answered with {answer.decode(errors='replace')}")
    return Outcome(tenant, num_tokens, status, ttft_s, b"\r\nretry-after: " in answer.lower())


async def offer(where: tuple[str, int], tenant: str, rate: float, seconds: float, rng: random.Random) -> list[Outcome]:
    """Poisson arrivals; late ones of a slow client are sent at once."""
    tasks, due, started = [], 0.0, time.perf_counter()
    while (due := due + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(started + due - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(ask(where, tenant, prompt_tokens(rng), rng)))
    return await asyncio.gather(*tasks)


async def run(scenario: Scenario, pace: NodePace) -> list[Outcome]:
    async with router(scenario, pace) as where:
        rate = capacity(pace)
        runs = [
            offer(where, tenant, load * rate, scenario.seconds, random.Random(f"{scenario.seed} {tenant}"))
            for tenant, load in scenario.offered.items()
        ]
        return [outcome for outcomes in await asyncio.gather(*runs) for outcome in outcomes]


# ---------------------------------------------------------------- figures


def goodput(outcomes: Sequence[Outcome], seconds: float) -> float:
    return sum(outcome.is_good for outcome in outcomes) / seconds


def measure(seconds: float, loads: Sequence[float]) -> list[Row]:
    pace = NodePace()
    plain = Scenario({"all": 1.0}, Slo(SLO_S), seconds)
    rows, peak, peak_load = [], 0.0, 0.0
    for load in loads:
        value = goodput(asyncio.run(run(replace(plain, offered={"all": load}), pace)), seconds)
        rows.append(Row("goodput", f"load {load:g}", value, "req/s", "capacity", capacity(pace), value / capacity(pace)))
        peak, peak_load = max((peak, peak_load), (value, load))
    over = replace(plain, offered={"all": OVERLOAD})
    outcomes = asyncio.run(run(over, pace))
    value = goodput(outcomes, seconds)
    against = f"peak (load {peak_load:g})"
    rows.append(Row("goodput", f"load {OVERLOAD:g}", value, "req/s", against, peak, value / peak, None, GOAL, value / peak >= GOAL))
    without = goodput(asyncio.run(run(replace(over, slo=Slo()), pace)), seconds)
    rows.append(Row("goodput", f"load {OVERLOAD:g}, no service level", without, "req/s", against, peak, without / peak))
    return rows + refusals(outcomes) + by_length(outcomes) + fairness(seconds, pace)


def refusals(outcomes: Sequence[Outcome]) -> list[Row]:
    case = f"load {OVERLOAD:g}"
    refused = [outcome for outcome in outcomes if outcome.status != 200]
    slow = sorted(outcome.ttft_s for outcome in refused)
    right = sum(outcome.status == 429 and outcome.has_retry_after for outcome in refused)
    served = sorted(outcome.ttft_s for outcome in outcomes if outcome.status == 200)
    late = sum(outcome.status == 200 and not outcome.is_good for outcome in outcomes)
    share = right / len(refused) if refused else 0.0
    return [
        Row("refused with 429 and Retry-After", case, float(right), "requests", "refused", float(len(refused)), share, None, 1.0, share == 1.0),
        Row("time to a refusal, the longest", case, slow[-1], "s", "at once", AT_ONCE_S, slow[-1] / AT_ONCE_S, None, None, slow[-1] <= AT_ONCE_S),
        Row("time to a refusal, median", case, slow[len(slow) // 2], "s"),
        Row("TTFT of accepted requests, p99", case, served[len(served) * 99 // 100], "s", "SLO", SLO_S, served[len(served) * 99 // 100] / SLO_S),
        Row("accepted and late", case, float(late), "requests", "accepted", float(len(served)), late / len(served)),
    ]


def by_length(outcomes: Sequence[Outcome]) -> list[Row]:
    """Long prompts are refused sooner, because they fit less often; how much sooner is the price of the goodput."""
    long = [outcome.is_good for outcome in outcomes if outcome.num_tokens >= 2 * MEAN_TOKENS]
    short = [outcome.is_good for outcome in outcomes if outcome.num_tokens < MEAN_TOKENS]
    share, against = sum(long) / len(long), sum(short) / len(short)
    return [Row("attainment, prompts of twice the mean", f"load {OVERLOAD:g}", share, "of them", "shorter than the mean", against, share / against)]


def fairness(seconds: float, pace: NodePace) -> list[Row]:
    """A tenant that asks for a tenth of the cluster beside one that asks for twice of it."""
    outcomes = asyncio.run(run(Scenario({"flood": 2.0, "small": 0.1}, Slo(SLO_S), seconds), pace))
    small = [outcome for outcome in outcomes if outcome.tenant == "small"]
    attained = sum(outcome.is_good for outcome in small) / len(small)
    flood = [outcome for outcome in outcomes if outcome.tenant == "flood"]
    share = sum(outcome.is_good for outcome in flood) / len(flood)
    return [
        Row(
            "attainment", "small tenant beside a flood of 2.0", attained, "of its requests", "of the flood", share, None, None, GOAL, attained >= GOAL
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="shorter runs, fewer loads")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(8.0, (0.8, 1.0)) if arguments.quick else measure(30.0, (0.6, 0.8, 0.9, 1.0, 1.1))
    print_rows(rows)
    if arguments.json is not None:
        write_json(rows, arguments.json)


if __name__ == "__main__":
    main()

"""An offered load and what became of it: a client that keeps its rate whatever the router says, and what clients saw.
For `bench.overload`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.report import Row

SLO_S = 1.0
MEAN_TOKENS = 800
MOST_TOKENS = 6000
OUTPUT_TOKENS = 8
OVERLOAD = 1.5
GOAL = 0.9
# A refusal is at once when it takes no longer than this; the process is busy with everybody's streams, too.
AT_ONCE_S = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """A router. model: takes prompts of the ids 100 to 999; slo_s: its service level for first tokens."""

    host: str
    port: int
    model: str
    slo_s: float = SLO_S

    @classmethod
    def of(cls, address: str, model: str, slo_s: float = SLO_S) -> Target:
        host, _, port = address.rpartition(":")
        return cls(host, int(port), model, slo_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    tenant: str
    num_tokens: int
    status: int
    ttft_s: float
    has_retry_after: bool
    slo_s: float = SLO_S

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.ttft_s <= self.slo_s


# ---------------------------------------------------------------- load


def prompt_tokens(rng: random.Random) -> int:
    """Most prompts are short, some are long; the mean is MEAN_TOKENS."""
    return min(max(int(rng.lognormvariate(0.0, 0.8) * MEAN_TOKENS / 1.377), 16), MOST_TOKENS)


async def ask(target: Target, tenant: str, num_tokens: int, rng: random.Random) -> Outcome:
    """One streamed completion over a connection of its own; time to the first event."""
    body = {
        "model": target.model,
        "prompt": [rng.randrange(100, 1000) for _ in range(num_tokens)],
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
    }
    content = json.dumps(body | {"ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer "
        f"key-of-{tenant}\r\n"
    )
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(target.host, target.port)
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
    return Outcome(tenant, num_tokens, status, ttft_s, b"\r\nretry-after: " in answer.lower(), target.slo_s)


async def offer(target: Target, tenant: str, rate: float, seconds: float, rng: random.Random) -> list[Outcome]:
    """Poisson arrivals; late ones of a slow client are sent at once."""
    tasks, due, started = [], 0.0, time.perf_counter()
    while (due := due + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(started + due - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(ask(target, tenant, prompt_tokens(rng), rng)))
    return await asyncio.gather(*tasks)


# ---------------------------------------------------------------- figures


def goodput(outcomes: Sequence[Outcome], seconds: float) -> float:
    return sum(outcome.is_good for outcome in outcomes) / seconds


def refusals(outcomes: Sequence[Outcome], case: str = f"load {OVERLOAD:g}") -> list[Row]:
    refused = [outcome for outcome in outcomes if outcome.status != 200]
    slow = sorted(outcome.ttft_s for outcome in refused)
    right = sum(outcome.status == 429 and outcome.has_retry_after for outcome in refused)
    served = sorted(outcome.ttft_s for outcome in outcomes if outcome.status == 200)
    late = sum(outcome.status == 200 and not outcome.is_good for outcome in outcomes)
    if not refused:
        metric, against = "refused with 429 and Retry-After", "at least one"
        return [Row(metric, case, 0.0, "requests", against=against, against_value=1.0, goal=1.0)]
    return [
        Row(
            "refused with 429 and Retry-After",
            case,
            float(right),
            "requests",
            against="refused",
            against_value=float(len(refused)),
            goal=1.0,
        ),
        Row(
            "time to a refusal, the longest",
            case,
            slow[-1],
            "s",
            against="at once",
            against_value=AT_ONCE_S,
            better="less",
            goal=1.0,
        ),
        Row("time to a refusal, median", case, slow[len(slow) // 2], "s"),
        Row(
            "TTFT of accepted requests, p99",
            case,
            served[len(served) * 99 // 100],
            "s",
            against="SLO",
            against_value=refused[0].slo_s,
            better="less",
        ),
        Row(
            "accepted and in time",
            case,
            float(len(served) - late),
            "requests",
            against="accepted",
            against_value=float(len(served)),
        ),
    ]


def by_length(outcomes: Sequence[Outcome], case: str = f"load {OVERLOAD:g}") -> list[Row]:
    """Long prompts are refused sooner, because they fit less often; how much sooner is the price of the goodput."""
    long = [outcome.is_good for outcome in outcomes if outcome.num_tokens >= 2 * MEAN_TOKENS]
    short = [outcome.is_good for outcome in outcomes if outcome.num_tokens < MEAN_TOKENS]
    share, against = sum(long) / len(long), sum(short) / len(short)
    return [
        Row(
            "attainment, prompts of twice the mean",
            case,
            share,
            "of them",
            against="shorter than the mean",
            against_value=against,
        )
    ]


def attainments(outcomes: Sequence[Outcome], prefix: str = "") -> list[Row]:
    """Of a small tenant beside one that floods the cluster, and of the flood."""
    share = {tenant: attainment([o for o in outcomes if o.tenant == tenant]) for tenant in ("flood", "small")}
    return [
        Row(
            "attainment",
            f"{prefix}small tenant beside a flood of 2.0",
            share["small"],
            "of its requests",
            against="all of them",
            against_value=1.0,
            goal=GOAL,
        ),
        Row("attainment", f"{prefix}flood of 2.0 beside a small tenant", share["flood"], "of its requests"),
    ]


def attainment(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.is_good for outcome in outcomes) / len(outcomes) if outcomes else 0.0

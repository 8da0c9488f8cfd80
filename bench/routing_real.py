"""Real nodes with a small model: the router choosing P/D per request, against every request on one node and every request on two, paired.

One cluster of a prefill and a decode node, a core each; the mode is asked for with each request, so all three ways meet the same processes. A round
sends requests of the same lengths at the same moments through each way, with tokens that no node has seen, in turns that change with the round, at
each of RATES times the rate that both nodes could serve if their work were spread evenly (from floors measured first). A way's goodput in a round is
its best over the rates; what is compared is goodput(auto) ÷ max(colocated, static), and its lower 95 % bound over the rounds. Limits: 5 × the floor
of the first token, 2 × that of the others.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster import Client, NodePlan, cluster, random_prompt
from bench.report import Row

WAYS = ("auto", "local", "remote")
NAMES = {"auto": "auto", "local": "colocated", "remote": "static P/D"}
RATES = (0.6, 0.85)
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0
MEAN_PROMPT, MEAN_OUTPUT = 500, 60
MOST_PROMPT, MOST_OUTPUT = 3000, 250
QUIET_S = 10.0
"""For what still runs after the last arrival of a turn; then it counts as missed."""
MOST_BYTES = 16 * 2**20
"""Of an answer's events that are read at once."""

GOAL = 0.97

NODES = (NodePlan("p", "prefill", 0), NodePlan("d", "decode", 1))


@dataclass(frozen=True, slots=True)
class Floor:
    """Of an idle node: seconds for each prompt token, between two tokens, and what rows beside each other take."""

    first_s: float
    token_s: float
    next_s: float
    full_next_s: float

    def ttft_s(self, num_tokens: int) -> float:
        """Short prompts are given the time of a mean one, as in the replay."""
        return TTFT_FACTOR * (self.first_s + self.token_s * max(num_tokens, MEAN_PROMPT))

    def is_good(self, answer: Answer) -> bool:
        return answer.ttft_s <= self.ttft_s(answer.num_tokens) and answer.tpot_s <= TPOT_FACTOR * self.next_s

    @property
    def rate(self) -> float:
        """Requests a second that two nodes could serve if work were spread evenly; rows share steps FULL at a time."""
        return 2.0 / (self.first_s + self.token_s * MEAN_PROMPT + MEAN_OUTPUT * self.full_next_s / FULL)


FULL = 4
"""Rows beside each other when the cost of a full step is taken."""


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Answer:
    """As the client saw it; the first token counts from the moment the request was due."""

    num_tokens: int
    ttft_s: float
    tpot_s: float


def requests(rate: float, seconds: float, seed: int) -> list[Asked]:
    """Poisson arrivals, lognormal lengths."""
    chance = random.Random(seed)
    asked, now = [], chance.expovariate(rate)
    while now < seconds:
        length = _length(chance, MEAN_PROMPT, 0.8, MOST_PROMPT)
        asked.append(Asked(now, random_prompt(length, chance), max(_length(chance, MEAN_OUTPUT, 0.6, MOST_OUTPUT), 2)))
        now += chance.expovariate(rate)
    return asked


def unseen(asked: Sequence[Asked], seed: str) -> list[Asked]:
    """The same moments and lengths with other tokens: the way before left its prompts in the nodes' caches."""
    chance = random.Random(seed)
    return [replace(each, prompt=random_prompt(len(each.prompt), chance)) for each in asked]


def _length(chance: random.Random, mean: float, spread: float, most: int) -> int:
    return max(1, min(most, round(math.exp(chance.gauss(math.log(mean) - spread * spread / 2, spread)))))


async def turn(where: tuple[str, int], model: str, asked: Sequence[Asked], way: str) -> list[Answer]:
    """Those that were answered in time; one that is refused is a miss."""
    begun = time.monotonic()
    tasks = [asyncio.create_task(_one(where, model, each, way, begun)) for each in asked]
    done, late = await asyncio.wait(tasks, timeout=asked[-1].at_s + QUIET_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [answer for task in done if (answer := task.result()) is not None]


async def _one(where: tuple[str, int], model: str, asked: Asked, way: str, begun: float) -> Answer | None:
    await asyncio.sleep(begun + asked.at_s - time.monotonic())
    body = {"model": model, "prompt": asked.prompt, "max_tokens": asked.num_output, "ignore_eos": True, "stream": True, "pdcluster_mode": way}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*where, limit=MOST_BYTES)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        status = answer.split(b" ", 2)[1]
        if status == b"429":
            return None
        if status != b"200":
            raise RuntimeError(f"{answer.decode()}{(await reader.read()).decode()}")
        await reader.readuntil(b"data:")
        first_s = time.monotonic()
        await reader.readuntil(b"[DONE]")
        return Answer(len(asked.prompt), first_s - begun - asked.at_s, (time.monotonic() - first_s) / (asked.num_output - 1))
    finally:
        writer.close()


def floors(where: tuple[str, int], model: str, seed: int) -> Floor:
    """Medians of requests one after the other, and of FULL at once."""
    chance = random.Random(seed)

    def alone(length: int) -> list[Answer]:
        prompts = [Asked(0.0, random_prompt(length, chance), 40) for _ in range(6)]
        return [asyncio.run(turn(where, model, [prompt], "local"))[0] for prompt in prompts][1:]

    short, long = alone(50), alone(1050)
    token_s = (_median(answer.ttft_s for answer in long) - _median(answer.ttft_s for answer in short)) / 1000
    crowd = [Asked(0.0, random_prompt(50, chance), 60) for _ in range(2 * FULL)]
    full = asyncio.run(turn(where, model, crowd, "local"))
    first_s = max(_median(answer.ttft_s for answer in short) - 50 * token_s, 0.0)
    return Floor(first_s, token_s, _median(answer.tpot_s for answer in short), _median(answer.tpot_s for answer in full))


def measure(model: Path, rounds: int, seconds: float, seed: int) -> Iterator[Row]:
    with cluster(model, NODES, "auto", ("--tokenizer", str(model))) as client:
        where = _where(client)
        floor = floors(where, client.model, seed)
        _warm(where, client.model, floor)
        found = [_round(where, client.model, floor, seconds, seed + number) for number in range(rounds)]
    for way in WAYS:
        rates = [goodputs[way] for goodputs in found]
        yield Row(f"goodput {NAMES[way]}", "real, 1 prefill + 1 decode node", statistics.median(rates), "1/s", spread=_spread(rates))
    yield judged(found)


def _warm(where: tuple[str, int], model: str, floor: Floor) -> None:
    """Until nodes have fitted their cost models, and paths their bandwidth."""
    for way in WAYS:
        asyncio.run(turn(where, model, requests(0.4 * floor.rate, 4.0, 10_000), way))


def _round(where: tuple[str, int], model: str, floor: Floor, seconds: float, seed: int) -> dict[str, float]:
    """Each way's best goodput over the rates."""
    best = dict.fromkeys(WAYS, 0.0)
    for number, share in enumerate(RATES):
        asked = requests(share * floor.rate, seconds, 31 * seed + number)
        for place in range(len(WAYS)):
            way = WAYS[(seed + number + place) % len(WAYS)]
            answers = asyncio.run(turn(where, model, unseen(asked, f"{seed} {number} {way}"), way))
            good = sum(map(floor.is_good, answers))
            best[way] = max(best[way], good / seconds)
    return best


def judged(found: Sequence[dict[str, float]]) -> Row:
    """The lower 95 % bound of the mean ratio, by Student's t."""
    ratios = [goodputs["auto"] / max(goodputs["local"], goodputs["remote"], 1e-9) for goodputs in found]
    bound = statistics.fmean(ratios)
    if len(ratios) > 1:
        bound -= T95[min(len(ratios) - 2, len(T95) - 1)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    case = f"{len(ratios)} rounds, mean {statistics.fmean(ratios):.3f}"
    return Row("goodput auto, lower 95 %", case, bound, "ratio", "better of both", 1.0, bound, _spread(ratios), GOAL, bound >= GOAL)


T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
"""One-sided, by degrees of freedom from 1 on."""


def _where(client: Client) -> tuple[str, int]:
    host, _, port = client.address.rpartition(":")
    return host, int(port)


def _median(values: Iterator[float] | Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> float | None:
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle and len(values) > 1 else None

"""Real nodes with a small model: the router choosing P/D per request, against every request on one node and every request on two, paired.

One cluster of a prefill and a decode node, a core each; the mode is asked for with each request, so all three ways meet the same processes. First
floors are measured, then the rate: it rises until the better of the two static ways answers less than ATTAINED of its requests in time. At that rate
a round sends requests of the same lengths at the same moments through each way, with tokens that no node has seen, in turns that change with the
round. What is judged is goodput(auto) ÷ goodput of the static way that has more of it over all rounds, by the lower 95 % bound of a bootstrap over
rounds. Limits: 5 × the floor of the first token, 2 × that of the others. Rounds of several starts are judged as one from their files (`pooled`).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster import Client, NodePlan, cluster, random_prompt
from bench.report import Row
from pdcluster.errors import ConfigError

WAYS = ("auto", "local", "remote")
NAMES = {"auto": "auto", "local": "colocated", "remote": "static P/D"}
STATIC = ("local", "remote")
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2)
"""Rates that are tried, as shares of what both nodes could serve if their work were spread evenly (from the floors)."""
ATTAINED = 0.9
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
    path: str = ""
    """Where it ran, as the reply's headers have it: p or d alone, or p+d."""


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
        tpot_s = (time.monotonic() - first_s) / (asked.num_output - 1)
        return Answer(len(asked.prompt), first_s - begun - asked.at_s, tpot_s, _path(answer))
    finally:
        writer.close()


def _path(head: bytes) -> str:
    nodes = [line.partition(b":")[2].strip().decode() for line in head.lower().split(b"\r\n") if line.startswith(NODE_HEADERS)]
    return "+".join(nodes)


NODE_HEADERS = (b"x-pdcluster-prefill:", b"x-pdcluster-decode:")


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


@dataclass(frozen=True, slots=True)
class Turn:
    """What one way did in a round."""

    num_asked: int
    num_good: int
    paths: Counter[str]


Round = dict[str, Turn]


def measure(model: Path, rounds: int, seconds: float, seed: int) -> Iterator[Row]:
    with cluster(model, NODES, "auto", ("--tokenizer", str(model))) as client:
        where = _where(client)
        floor = floors(where, client.model, seed)
        _warm(where, client.model, floor)
        rate = rate_to_miss(where, client.model, floor, seed)
        found = [_round(where, client.model, floor, requests(rate, seconds, 31 * seed + number), number) for number in range(rounds)]
    for way in WAYS:
        goodputs = [turn.num_good / seconds for turn in (each[way] for each in found)]
        asked = sum(each[way].num_asked for each in found) / seconds / rounds
        case = f"real, 1 prefill + 1 decode node, {asked:.1f}/s asked; {_shares(found, way)}"
        yield Row(f"goodput {NAMES[way]}", case, statistics.fmean(goodputs), "1/s", spread=_spread(goodputs))
    yield from _kept(found, seed)
    yield judged(found, seed)


def _kept(found: Sequence[Round], seed: int) -> Iterator[Row]:
    """What `pooled` reads."""
    for number, each in enumerate(found):
        for way in WAYS:
            turn = each[way]
            yield Row(f"{IN_TIME} {way}", f"real, seed {seed}, round {number}", turn.num_good, "requests", "asked", turn.num_asked)


IN_TIME = "in time,"


def pooled(files: Sequence[Path], seed: int) -> Iterator[Row]:
    """The rounds of other starts, each with a cluster and a rate of its own, judged as one. Raises ConfigError for a file without rounds."""
    found: list[Round] = []
    for file in files:
        rounds: dict[str, Round] = {}
        for row in json.loads(file.read_text()):
            what, _, way = row["metric"].rpartition(" ")
            if what == IN_TIME and way in WAYS:
                rounds.setdefault(row["case"], {})[way] = Turn(int(row["against_value"]), int(row["value"]), Counter())
        if not rounds or any(len(each) != len(WAYS) for each in rounds.values()):
            raise ConfigError(f"{file} has no whole rounds; give a file that `bench.routing --real MODEL --json FILE` wrote")
        found += rounds.values()
    for way in WAYS:
        asked = sum(each[way].num_asked for each in found)
        yield Row(f"in time {NAMES[way]}", f"real, {len(files)} starts", sum(each[way].num_good for each in found) / asked, "of those asked")
    yield judged(found, seed)


def _shares(found: Sequence[Round], way: str) -> str:
    paths: Counter[str] = sum((each[way].paths for each in found), Counter())
    return ", ".join(f"{path} {number / paths.total():.0%}" for path, number in sorted(paths.items()))


def _warm(where: tuple[str, int], model: str, floor: Floor) -> None:
    """Until nodes have fitted their cost models, and paths their bandwidth."""
    for way in WAYS:
        asyncio.run(turn(where, model, requests(0.4 * floor.rate, 4.0, 10_000), way))


RISE_REQUESTS, RISE_S = 24, 8.0
"""Of each turn while the rate rises, at least: a share of few requests would say little."""


def rate_to_miss(where: tuple[str, int], model: str, floor: Floor, seed: int) -> float:
    """The first rate at which the better static way begins to miss."""
    for number, share in enumerate(SHARES):
        seconds = max(RISE_S, RISE_REQUESTS / (share * floor.rate))
        asked = requests(share * floor.rate, seconds, 1000 * seed + number)
        found = {way: _turn(where, model, floor, unseen(asked, f"rise {seed} {number} {way}"), way) for way in STATIC}
        attained = ", ".join(f"{NAMES[way]} {each.num_good / len(asked):.0%}" for way, each in found.items())
        print(f"{len(asked) / seconds:.1f} requests a second: of {len(asked)} in time {attained}", flush=True)
        if max(each.num_good for each in found.values()) < ATTAINED * len(asked):
            return share * floor.rate
    raise RuntimeError(f"both static ways are in time at {SHARES[-1]} of {floor.rate:.1f}/s: the floors that the rate is told from are too slow")


def _round(where: tuple[str, int], model: str, floor: Floor, asked: Sequence[Asked], number: int) -> Round:
    ways = [WAYS[(number + place) % len(WAYS)] for place in range(len(WAYS))]
    return {way: _turn(where, model, floor, unseen(asked, f"{number} {way}"), way) for way in ways}


def _turn(where: tuple[str, int], model: str, floor: Floor, asked: Sequence[Asked], way: str) -> Turn:
    answers = asyncio.run(turn(where, model, asked, way))
    return Turn(len(asked), sum(map(floor.is_good, answers)), Counter(answer.path for answer in answers))


DRAWS = 10_000


def judged(found: Sequence[Round], seed: int) -> Row:
    """The ratio over all rounds, and its lower 95 % bound. One round less is drawn than there are: few rounds drawn in full would vary too little."""
    rival = max(STATIC, key=lambda way: sum(each[way].num_good for each in found))
    chance = random.Random(seed)
    drawn = [chance.choices(found, k=max(len(found) - 1, 1)) for _ in range(DRAWS)]
    bound = statistics.quantiles((_ratio(rounds, rival) for rounds in drawn), n=20)[0]
    ratios = [_ratio([each], rival) for each in found]
    case = f"{len(found)} rounds, {sum(each['auto'].num_asked for each in found)} requests a way, ratio {_ratio(found, rival):.3f}"
    return Row("goodput auto, lower 95 %", case, bound, "ratio", NAMES[rival], 1.0, bound, _spread(ratios), GOAL, bound >= GOAL)


def _ratio(rounds: Sequence[Round], rival: str) -> float:
    return sum(each["auto"].num_good for each in rounds) / max(sum(each[rival].num_good for each in rounds), 1e-9)


def _where(client: Client) -> tuple[str, int]:
    host, _, port = client.address.rpartition(":")
    return host, int(port)


def _median(values: Iterator[float] | Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> float | None:
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle and len(values) > 1 else None

"""What a client sends to a real cluster in one turn of `routing_real`, and what it saw: the way (auto, one node, two)
is asked for with each request.

Lengths are lognormal, one from each of as many equally likely parts as there are requests, so that no turn has all the
long ones; moments are those of a Poisson process that has so many arrivals. Nothing is judged here.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from bench.harness.cluster import random_prompt

MEAN_PROMPT, MEAN_OUTPUT = 500, 60
MOST_PROMPT, MOST_OUTPUT = 3000, 250
PROMPT_SPREAD, OUTPUT_SPREAD = 0.8, 0.6
# For what still runs after the last arrival of a turn; then it counts as missed.
QUIET_S = 10.0
# Of an answer's events that are read at once.
MOST_BYTES = 16 * 2**20


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
    # Where it ran, as the reply's headers have it: p or d alone, or p+d.
    path: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A router and the model it serves."""

    host: str
    port: int
    model: str

    @classmethod
    def of(cls, address: str, model: str) -> Target:
        host, _, port = address.rpartition(":")
        return cls(host, int(port), model)


def requests(num: int, seconds: float, seed: int | str) -> list[Asked]:
    chance = random.Random(seed)
    moments = sorted(chance.uniform(0.0, seconds) for _ in range(num))
    prompts = _lengths(num, MEAN_PROMPT, PROMPT_SPREAD, MOST_PROMPT, chance)
    outputs = _lengths(num, MEAN_OUTPUT, OUTPUT_SPREAD, MOST_OUTPUT, chance)
    return [
        Asked(at_s, random_prompt(prompt, chance), max(output, 2))
        for at_s, prompt, output in zip(moments, prompts, outputs, strict=True)
    ]


def _lengths(num: int, mean: float, spread: float, most: int, chance: random.Random) -> list[int]:
    normal = NormalDist(math.log(mean) - spread * spread / 2, spread)
    shares = [min(max((part + chance.random()) / num, 1e-9), 1 - 1e-9) for part in range(num)]
    lengths = [max(1, min(most, round(math.exp(normal.inv_cdf(share))))) for share in shares]
    chance.shuffle(lengths)
    return lengths


def unseen(asked: Sequence[Asked], seed: str) -> list[Asked]:
    """The same moments and lengths with other tokens: the way before left its prompts in the nodes' caches, and this is
    as good as empty ones."""
    chance = random.Random(seed)
    return [replace(each, prompt=random_prompt(len(each.prompt), chance)) for each in asked]


async def turn(target: Target, asked: Sequence[Asked], way: str) -> list[Answer]:
    """Those that were answered; one that is refused, or not answered QUIET_S after the last arrival, is not among
    them."""
    begun = time.monotonic()
    tasks = [asyncio.create_task(ask(target, each, way, begun)) for each in asked]
    done, late = await asyncio.wait(tasks, timeout=asked[-1].at_s + QUIET_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [answer for task in done if (answer := task.result()) is not None]


async def ask(target: Target, asked: Asked, way: str, begun: float) -> Answer | None:
    """One streamed completion, sent when it is due; None when it was refused. Raises RuntimeError for any other
    failure."""
    await asyncio.sleep(begun + asked.at_s - time.monotonic())
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=MOST_BYTES)
    try:
        writer.write(_request(target.model, asked, way))
        answer = await reader.readuntil(b"\r\n\r\n")
        status = answer.split(b" ", 2)[1]
        if status == b"429":
            return None
        if status != b"200":
            raise RuntimeError(f"{answer.decode()}{(await reader.read()).decode()}")
        await reader.readuntil(b"data:")
        first_s = time.monotonic()
        await reader.readuntil(b"[DONE]")  # an error that is told in the stream ends it without
        tpot_s = (time.monotonic() - first_s) / (asked.num_output - 1)
        return Answer(len(asked.prompt), first_s - begun - asked.at_s, tpot_s, _path(answer))
    except asyncio.IncompleteReadError as error:
        raise RuntimeError(f"an answer ended early, with {error.partial[-500:].decode(errors='replace')!r}") from error
    finally:
        writer.close()


def _request(model: str, asked: Asked, way: str) -> bytes:
    body = {
        "model": model,
        "prompt": asked.prompt,
        "max_tokens": asked.num_output,
        "ignore_eos": True,
        "stream": True,
        "pdcluster_mode": way,
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def _path(head: bytes) -> str:
    nodes = [
        line.partition(b":")[2].strip().decode()
        for line in head.lower().split(b"\r\n")
        if line.startswith(NODE_HEADERS)
    ]
    return "+".join(nodes)


NODE_HEADERS = (b"x-pdcluster-prefill:", b"x-pdcluster-decode:")


async def crowd(target: Target, asked: Sequence[Asked], way: str, num_open: int) -> float:
    """Requests a second that are answered while so many are always open, whenever they were due."""
    left: Iterator[Asked] = iter(asked)
    begun = time.monotonic()

    async def client() -> int:
        answers = [await ask(target, replace(each, at_s=0.0), way, time.monotonic()) for each in left]
        return sum(answer is not None for answer in answers)

    served = await asyncio.gather(*(client() for _ in range(num_open)))
    return sum(served) / (time.monotonic() - begun)

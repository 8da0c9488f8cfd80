"""Long prompts beside running chats, on two nodes of a core each: the gap between tokens of the chats, with a prefill
and a decode node in mode auto, and with two mixed nodes.

NUM_CHATS streams of short prompts are always open. Meanwhile prompts of LONG_TOKENS come one after the other. No prompt
comes twice. Both ways run in turns, each with processes of its own, and meet the same requests. The p99 of all gaps of
all chats counts. Time to first token of the long prompts stands beside it: nobody may buy one with the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.cluster import NodePlan, cluster, random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, save
from pdcluster.checkpoint import bundled

NUM_CHATS, CHAT_TOKENS, ANSWER_TOKENS = 4, 40, 120
LONG_TOKENS, LONG_ANSWER = 3000, 4
# Token ids below this, which every model here has.
VOCAB = 2000
# Between the answer to a long prompt and the next one.
PAUSE_S = 0.5
# The p99 gap of 1P+1D may be this share of that of two mixed nodes.
GOAL = 0.15

PAIR = (NodePlan("p", "prefill", 0), NodePlan("d", "decode", 1))
MIXED = (NodePlan("m0", "mixed", 0), NodePlan("m1", "mixed", 1))


@dataclass(slots=True)
class Seen:
    """Seconds: between tokens of chats, and to the first token of long prompts."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[98]


async def stream(address: str, model: str, prompt: Sequence[int], num_output: int) -> list[float]:
    """Moments of the events of one streamed completion; the first is when it was sent."""
    body = json.dumps(
        {"model": model, "prompt": list(prompt), "max_tokens": num_output, "stream": True, "ignore_eos": True}
    ).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        )
        moments = [time.perf_counter()]
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"a request was answered with {status.decode().strip()}")
        async for line in reader:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter())
        return moments
    finally:
        writer.close()


async def chats(address: str, model: str, chance: random.Random, until: float, seen: Seen) -> None:
    """One chat after the other."""
    while time.perf_counter() < until:
        moments = await stream(address, model, random_prompt(CHAT_TOKENS, chance, VOCAB), ANSWER_TOKENS)
        seen.gaps += [later - sooner for sooner, later in itertools.pairwise(moments[1:])]


async def longs(address: str, model: str, chance: random.Random, until: float, seen: Seen) -> None:
    while time.perf_counter() < until:
        moments = await stream(address, model, random_prompt(LONG_TOKENS, chance, VOCAB), LONG_ANSWER)
        seen.firsts.append(moments[1] - moments[0])
        await asyncio.sleep(PAUSE_S)


async def load(address: str, model: str, seconds: float, seed: int) -> Seen:
    seen, until = Seen(), time.perf_counter() + seconds
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_CHATS):
            tasks.create_task(chats(address, model, random.Random(f"{seed} chat {number}"), until, seen))
        tasks.create_task(longs(address, model, random.Random(f"{seed} long"), until, seen))
    return seen


def turn(model: Path, nodes: Sequence[NodePlan], seconds: float, seed: int) -> Seen:
    with cluster(model, nodes, "auto", ("--tokenizer", str(model))) as client:
        # Until nodes have fitted what their steps cost.
        asyncio.run(load(client.address, client.model, 10.0, -seed - 1))
        return asyncio.run(load(client.address, client.model, seconds, seed))


def measure(model: Path, turns: int, seconds: float) -> list[Row]:
    pairs: list[Seen] = []
    mixed: list[Seen] = []
    for number in range(turns):
        ways = [(PAIR, pairs), (MIXED, mixed)]
        for nodes, found in ways if number % 2 == 0 else reversed(ways):
            found.append(turn(model, nodes, seconds, number))
    ours, theirs = (statistics.median([each.p99 for each in found]) for found in (pairs, mixed))
    firsts, others = (statistics.median([one for each in found for one in each.firsts]) for found in (pairs, mixed))
    spread = (max(each.p99 for each in pairs) - min(each.p99 for each in pairs)) / ours
    case = f"{LONG_TOKENS} tokens beside {NUM_CHATS} chats, {turns} turns; 1P+1D in mode auto"
    return [
        Row(
            "ITL p99", case, ours * 1e3, "ms", against=f"{GOAL:g} x 2 mixed nodes", against_value=GOAL * theirs * 1e3,
            better="less", goal=1.0, spread=spread,
        ),
        Row("ITL p99, 2 mixed nodes", case, theirs * 1e3, "ms"),
        Row("TTFT of long prompts", case, firsts, "s", against="2 mixed nodes", against_value=others, better="less"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.long_prompts", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", type=Path, default=bundled.path())
    add_output_flags(parser)
    chosen = parser.parse_args()
    rows = measure(chosen.model, 2 if chosen.quick else 6, 15.0 if chosen.quick else 30.0)
    print_rows(rows)
    save(rows, chosen)


if __name__ == "__main__":
    main()

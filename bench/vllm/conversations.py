"""`python -m bench.vllm.conversations`: conversations on two nodes with vLLM, routed by the default policy and in turn.

Each conversation begins with a long prompt of its own and goes on with its answers. Two routers share the nodes, one
with the default policy and one with round-robin. They take turns, each time with conversations that no node has seen.
The python is that of an environment that has vLLM, NIXL and pdcluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.harness.cluster import random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, row_of_turns, save
from bench.vllm.pair import Pace, System, add_pace_flags, free_port
from pdcluster.checkpoint.bundled import path as bundled_model

POLICIES = ("seconds", "round-robin")
CONVERSATIONS, TURNS = 8, 4
FIRST_TOKENS, NEXT_TOKENS, OUTPUT = 1200, 100, 24
VOCAB = 500
PAUSE_S = (0.2, 1.0)
ARGS = ("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "16", "--block-size", "32")


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int]) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    begun, first = time.monotonic(), 0.0
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.monotonic()
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                tokens += choice.get("token_ids") or ()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(first - begun, usage["prompt_tokens"], cached, tokens)


async def converse(client: httpx.AsyncClient, model: str, chance: random.Random) -> list[Answer]:
    """The later turns of one conversation; the first has nothing to find."""
    prompt, answers = random_prompt(FIRST_TOKENS, chance, VOCAB), []
    for _ in range(TURNS):
        await asyncio.sleep(chance.uniform(*PAUSE_S))
        answers.append(await ask(client, model, prompt))
        prompt = [*prompt, *answers[-1].tokens, *random_prompt(NEXT_TOKENS, chance, VOCAB)]
    return answers[1:]


async def play(url: str, seed: str) -> tuple[float, float]:
    """Mean seconds to the first token, and the share of prompt tokens that were cached."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        parts = await asyncio.gather(
            *(converse(client, model, random.Random(f"{seed} {number}")) for number in range(CONVERSATIONS))
        )
    answers = [answer for part in parts for answer in part]
    hit = sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
    return statistics.mean(answer.ttft_s for answer in answers), hit


def start(folder: Path, model: Path, pace: Pace) -> tuple[System, dict[str, str]]:
    """Two nodes, and the addresses of the routers by policy."""
    system, bootstrap = System("turns", folder, pace), f"127.0.0.1:{free_port()}"
    system.spawn("bootstrap", sys.executable, "-m", "pdcluster.cli", "bootstrap", "--listen", bootstrap)
    for core in range(2):
        health = f"127.0.0.1:{free_port()}"
        system.spawn(
            f"node-{core}", sys.executable, "-m", "pdcluster.cli", "node", "--engine", "vllm", "--name", f"node-{core}",
            "--bootstrap", bootstrap, "--model", str(model), "--health", health, "--", *ARGS, core=core,
        )  # fmt: skip
        system.wait_ready(f"http://{health}/readyz")
    urls = {policy: f"http://127.0.0.1:{free_port()}" for policy in POLICIES}
    for policy, url in urls.items():
        system.spawn(
            policy, sys.executable, "-m", "pdcluster_router.cli", "--bootstrap", bootstrap, "--grpc", "none",
            "--admin", "none", "--http", url.removeprefix("http://"), "--policy", policy,
        )  # fmt: skip
        system.wait_ready(f"{url}/ready")
    return system, urls


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm.conversations", description=__doc__)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--rounds", type=int, default=5)
    add_pace_flags(parser)
    add_output_flags(parser)
    given = parser.parse_args()
    system, urls = start(
        Path(tempfile.mkdtemp(prefix="pdcluster-turns-")),
        given.model,
        Pace(given.progress_delay_us, given.yield_sleep_us),
    )
    found: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    try:
        for number in range(given.rounds + 1):
            for policy in POLICIES if number % 2 else reversed(POLICIES):
                ttft_s, hit = asyncio.run(play(urls[policy], f"{policy} {number}"))
                print(f"turn {number}, {policy}: TTFT {1e3 * ttft_s:.0f} ms, hit rate {hit:.2f}", file=sys.stderr)
                if number:  # the first one warms up
                    found[policy].append((ttft_s, hit))
    finally:
        system.close()
    own, other = (list(zip(*found[policy], strict=True)) for policy in POLICIES)
    case = f"vLLM, {CONVERSATIONS} conversations, {TURNS} turns"
    rows: list[Row] = [
        row_of_turns("mean TTFT", case, own[0], "s", against=POLICIES[1], other=other[0], better="less"),
        row_of_turns("hit rate", case, own[1], "", against=POLICIES[1], other=other[1]),
    ]
    print_rows(rows)
    save(rows, given)


if __name__ == "__main__":
    main()

"""A load while weights change. Each answer says which weights made which tokens, and every range is compared with what
transformers computes with them, in float32."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pdcluster.core.sampling import Sampling
from tests.chaos.changes import PUSHED, AbortWindows
from tests.chaos.cluster import ChaosCluster, ChildProcess, NodeKind
from tests.chaos.load import LIMIT_S, AnswerFailed, LoadReport, NotAccepted
from tests.harness.models.weight_versions import network

WEIGHTS_KIND = NodeKind(flags=("--dtype", "float32", "--threads", "1", "--set=node.kv.memory_bytes=64MiB"))
# A token is right when its logit, or its border in the sum of shares, is that close. Versions differ by far more.
NEAR, NEAR_SHARE = 1e-3, 1e-5


@dataclass(frozen=True)
class Ranged:
    """An answer: its tokens, and (first, end, label) of its ranges."""

    tokens: tuple[int, ...]
    ranges: tuple[tuple[int, int, str], ...]
    reason: str

    @property
    def is_aborted(self) -> bool:
        return self.reason == "abort"


class WeightsOracle:
    """What each version makes of a prompt and the tokens before, by its label. A pushed one has a number behind that."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self._directories = directories
        for directory in directories.values():
            network(directory)  # not by several threads at once

    def faults(self, body: dict[str, Any], answer: Ranged) -> str:
        """What is wrong with an answer; "" for nothing."""
        ends = [0, *(end for _, end, _ in answer.ranges)]
        if [first for first, _, _ in answer.ranges] != ends[:-1] or ends[-1] != len(answer.tokens):
            return f"ranges {answer.ranges} of {len(answer.tokens)} tokens"
        is_short = answer.is_aborted and len(answer.tokens) < body["max_tokens"]
        if len(answer.tokens) != body["max_tokens"] and not is_short:
            return f"{len(answer.tokens)} tokens ({answer.reason}) instead of {body['max_tokens']}"
        for first, end, version in answer.ranges:
            label = version.partition(PUSHED)[0]
            if label not in self._directories:
                return f"unknown weights {version!r}"
            wrong = self._wrong(label, body, answer.tokens, first, end)
            if wrong is not None:
                return f"token {wrong} is none of {label}; ranges {answer.ranges}, tokens {answer.tokens}"
        return ""

    def _wrong(self, label: str, body: dict[str, Any], tokens: Sequence[int], first: int, end: int) -> int | None:
        """The first token of a range that its weights do not make after what stands before it."""
        import torch

        from pdcluster.engine.sampling.penalties import SamplingRow
        from pdcluster.engine.sampling.sampler import sample

        prompt = body["prompt"]
        torch.set_num_threads(1)
        with torch.no_grad():
            context = torch.tensor([[*prompt, *tokens[:end]]])
            logits = network(self._directories[label])(context).logits[
                0, len(prompt) + first - 1 : len(prompt) + end - 1
            ]
        sampling = Sampling(body["max_tokens"], body["seed"], temperature=body["temperature"], ignore_eos=True)
        rows = [SamplingRow(sampling, len(prompt) + place, place) for place in range(first, end)]
        for place, made in enumerate(sample(logits, rows, ()), first):
            if made != tokens[place] and not is_near(logits[place - first], rows[place - first], tokens[place]):
                return place
        return None


def is_near(logits: Any, row: Any, token: int) -> bool:
    """Whether rounding may have made a token another one. A drawn one is that whose share of all weights, added up in
    the order of ids, has the random number; the numbers of ids are many, so some are close to a border.
    """
    from pdcluster.engine.sampling.sampler import uniforms

    sampling = row.sampling
    if not sampling.temperature:
        return bool(logits.max() - logits[token] <= NEAR)
    ends = logits.double().softmax(0).cumsum(0)
    (number,) = uniforms([sampling.seed], [sampling.choice], [row.position])
    return bool(ends[token] - logits.double().softmax(0)[token] - NEAR_SHARE <= number <= ends[token] + NEAR_SHARE)


class WeightsLoad:
    """Clients whose requests may go on with other weights. Used like ChaosLoad."""

    def __init__(self, cluster: ChaosCluster, oracle: WeightsOracle, aborts: AbortWindows, seed: int) -> None:
        self._cluster, self._oracle, self._aborts = cluster, oracle, aborts
        self._chance = random.Random(seed)
        self.report = LoadReport()
        # Answers that a pause ended with what they had.
        self.aborted: Counter[str] = Counter()
        self._is_over = asyncio.Event()
        self._client = cluster.edges.client(timeout=httpx.Timeout(LIMIT_S), limits=httpx.Limits(max_connections=None))

    async def run(self, clients: int) -> None:
        """Until `end`."""
        await asyncio.gather(*(self._run_client() for _ in range(clients)))

    def end(self) -> None:
        self._is_over.set()

    async def close(self) -> None:
        await self._client.aclose()

    async def _run_client(self) -> None:
        while not self._is_over.is_set():
            running = [router for router in self._cluster.routers.values() if router.is_ready]
            if running:
                await self._ask(self._chance.choice(running), self._body())
            else:
                await asyncio.sleep(0.2)

    def _body(self) -> dict[str, Any]:
        chance = self._chance
        streams = chance.random() < 0.7
        return {
            "model": "base", "prompt": [chance.randrange(5, 2000) for _ in range(chance.randrange(10, 150))],
            "max_tokens": chance.randrange(20, 160), "seed": chance.randrange(1 << 30),
            "temperature": chance.choice((0, 1.0)), "top_p": 1.0, "top_k": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": streams, "weights_change": "replay",
            **({"stream_options": {"include_usage": True}} if streams else {}),
        }  # fmt: skip

    async def _ask(self, router: ChildProcess, body: dict[str, Any]) -> None:
        report, started = self.report, time.monotonic()
        num_kills, was_ready = router.num_kills, router.is_ready
        label = f"seed {body['seed']} at {router.name}"
        try:
            async with asyncio.timeout(LIMIT_S):
                answer = await self._answer(router, body)
        except (AnswerFailed, httpx.HTTPError, TimeoutError) as error:
            what = f"{label} after {time.monotonic() - started:.1f} s: {type(error).__name__} {error}"
            is_refused = isinstance(error, NotAccepted | httpx.ConnectError) and not (was_ready and router.is_ready)
            if router.num_kills != num_kills or is_refused:
                report.excused.append(what)
            else:
                (report.hung if isinstance(error, TimeoutError | httpx.TimeoutException) else report.lost).append(what)
            return
        report.slowest_s = max(report.slowest_s, time.monotonic() - started)
        fault = await asyncio.to_thread(self._oracle.faults, body, answer)
        if not fault and answer.is_aborted and not self._aborts.has_one_since(started):
            fault = f"aborted without a pause that does so, with {len(answer.tokens)} tokens"
        if fault:
            report.wrong.append(f"{label}: {fault}")
        elif answer.is_aborted:
            self.aborted["with tokens" if answer.tokens else "before the first token"] += 1
        else:
            report.num_right += 1
            report.by_kind[" then ".join(_way(version) for _, _, version in answer.ranges)] += 1

    async def _answer(self, router: ChildProcess, body: dict[str, Any]) -> Ranged:
        if not body["stream"]:
            reply = await self._client.post(f"{router.url}/v1/completions", json=body)
            if reply.status_code != 200:
                raise AnswerFailed(f"{reply.status_code}: {reply.text[:500]}")
            found = reply.json()
            return _ranged(found["choices"][0]["token_ids"], found["choices"][0]["finish_reason"], found["usage"])
        tokens: list[int] = []
        reason, usage = "", None
        async with self._client.stream("POST", f"{router.url}/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise AnswerFailed(f"{reply.status_code}: {(await reply.aread())[:500]!r}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise AnswerFailed(f"stream: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                    reason = choice.get("finish_reason") or reason
        if usage is None:
            raise AnswerFailed("the stream ended without its usage")
        return _ranged(tokens, reason, usage)


def _ranged(tokens: Sequence[int], reason: str, usage: dict[str, Any]) -> Ranged:
    ranges = tuple((each["from"], each["to"], each["label"]) for each in usage["pdcluster"]["weights"])
    return Ranged(tuple(tokens), ranges, reason)


def _way(version: str) -> str:
    """The weights without the number of the push."""
    content, pushed, _ = version.partition(PUSHED)
    return f"{content} (pushed)" if pushed else content

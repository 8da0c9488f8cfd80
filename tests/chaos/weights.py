"""Weights that change under load and kills: A, B, A and so on. Each answer says which weights made which tokens, and
every range is compared with what transformers computes with them, in float32."""

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

import grpc
import httpx

from pdcluster.core.sampling import Sampling
from pdcluster.rpc import admin_pb2 as pb
from tests.chaos.cluster import ChaosCluster, ChildProcess, NodeKind
from tests.chaos.faults import Tell
from tests.chaos.load import LIMIT_S, AnswerFailed, LoadReport, NotAccepted
from tests.harness.models.weight_versions import network

WEIGHTS_KIND = NodeKind(flags=("--dtype", "float32", "--threads", "1", "--set=node.kv.memory_bytes=64MiB"))
# A token is right when its logit, or its border in the sum of shares, is that close. Versions differ by far more.
NEAR, NEAR_SHARE = 1e-3, 1e-5
STAGES = ("loading", "ending", "serving")
ROLL_S = 120.0


@dataclass(frozen=True)
class Ranged:
    """An answer: its tokens, and (first, end, label) of its ranges."""

    tokens: tuple[int, ...]
    ranges: tuple[tuple[int, int, str], ...]
    reason: str


class WeightsOracle:
    """What each version makes of a prompt and the tokens before, by its label."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self._directories = directories
        for directory in directories.values():
            network(directory)  # not by several threads at once

    def faults(self, body: dict[str, Any], answer: Ranged) -> str:
        """What is wrong with an answer; "" for nothing."""
        ends = [0, *(end for _, end, _ in answer.ranges)]
        if [first for first, _, _ in answer.ranges] != ends[:-1] or ends[-1] != len(answer.tokens):
            return f"ranges {answer.ranges} of {len(answer.tokens)} tokens"
        if len(answer.tokens) != body["max_tokens"]:
            return f"{len(answer.tokens)} tokens ({answer.reason}) instead of {body['max_tokens']}"
        for first, end, label in answer.ranges:
            if label not in self._directories:
                return f"unknown weights {label!r}"
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

    def __init__(self, cluster: ChaosCluster, oracle: WeightsOracle, seed: int) -> None:
        self._cluster, self._oracle = cluster, oracle
        self._chance = random.Random(seed)
        self.report = LoadReport()
        # Answers by the weights that made them.
        self.made: Counter[str] = Counter()
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
        if fault:
            report.wrong.append(f"{label}: {fault}")
        else:
            kind = " then ".join(range_label for _, _, range_label in answer.ranges)
            report.num_right += 1
            report.by_kind[kind] += 1

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


class WeightsChanger:
    """Rolls out one version after the other, and kills a process while it does, drawn by the seed."""

    def __init__(self, cluster: ChaosCluster, sources: Sequence[tuple[str, str]], seed: int, tell: Tell) -> None:
        """sources: (label, source), changed to in turn."""
        self._cluster, self._sources, self._tell = cluster, list(sources), tell
        self._chance = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float, *, kills: bool = True) -> None:
        until, turn = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            turn += 1
            label, source = self._sources[turn % len(self._sources)]
            await self._change(label, source, kills=kills and self._chance.random() < 0.7)
            await asyncio.sleep(self._chance.uniform(0.2, 2.0))

    async def _change(self, label: str, source: str, *, kills: bool) -> None:
        """Roll out, again after each failure, until it is done."""
        chance = self._chance
        request = pb.LoadWeightsRequest(
            source=source,
            label=label,
            max_unavailable=chance.choice((1, 1, 2, 0)),
            finish_s=chance.choice((0.0, 0.5, 20.0)),
        )
        victim = chance.choice(self._cluster.all()) if kills else None
        stage, later_s = chance.choice(STAGES), chance.uniform(0.0, 2.0)
        self.counts["rollouts"] += 1
        told = f", {victim.name} killed at {stage}" if victim else ""
        self._tell(f"{label} at {request.max_unavailable}, {request.finish_s:g} s to end{told}")
        killing: asyncio.Task[None] | None = None
        deadline = time.monotonic() + ROLL_S
        while True:
            try:
                async for progress in self._progress(request):
                    if victim is not None and killing is None and progress.stage == stage:
                        self.counts[f"{victim.name.partition('-')[0]} killed at {stage}"] += 1
                        killing = asyncio.create_task(self._kill(victim, later_s))
                break
            except (grpc.aio.AioRpcError, OSError) as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.counts["rollouts stopped"] += 1
                if time.monotonic() > deadline:
                    raise AssertionError(f"the rollout of {label} did not end: {details}") from error
                await asyncio.sleep(0.5)
        if killing is not None:
            await killing

    async def _progress(self, request: pb.LoadWeightsRequest):
        router = next((each for each in self._cluster.routers.values() if each.is_running and each.is_ready), None)
        if router is None:
            raise OSError("no router runs")
        async with self._cluster.admin(router) as stub:
            async for progress in stub.LoadWeights(request, timeout=ROLL_S):
                yield progress

    async def _kill(self, victim: ChildProcess, later_s: float) -> None:
        await victim.kill()
        await asyncio.sleep(later_s)
        deadline = time.monotonic() + ROLL_S
        while True:
            try:
                await self._cluster.restart(victim)
                return
            except AssertionError:  # refused; whoever supervises it starts it again
                if time.monotonic() > deadline:
                    raise
                self.counts["starts refused"] += 1
                await asyncio.sleep(1.0)

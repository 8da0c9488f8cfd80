"""Two prefill and two decode nodes that run vLLM: whatever process dies, and whenever, each request gets one right
answer or one error, no process is left, and no KV is held. Also clients that leave, drains, and KV that is read late.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import bootstrap_pb2
from tests.chaos.cluster import ChaosCluster, ChildProcess, ClusterShape, lease_flags
from tests.chaos.load import ChaosLoad
from tests.chaos.vllm_nodes import (
    LEASE_S,
    VLLM,
    GreedyOracle,
    Part,
    alive,
    greedy_requests_of,
    kill_part,
    parts_of,
)

LONG, SHORT = 3800, 60
LEFT_S = 5.0
HOLD_S = 300.0
# So long a process may stand still and is not given up.
PEER_LEASE_S = 20.0
STAGES = ("queued", "prefilling", "parked", "pulling", "decoding")
VICTIMS = (("prefill", "node"), ("prefill", "core"), ("decode", "node"), ("decode", "core"))
CASES = list(itertools.product(VICTIMS, STAGES))
# The others run in `make test-full`.
SAMPLE = random.Random(44).sample(CASES, 8)
ROLES = {"prefill": bootstrap_pb2.ROLE_PREFILL, "decode": bootstrap_pb2.ROLE_DECODE}
_PARKED = re.compile(r'pdcluster_node_kv_pages\{node="([^"]+)",role="[^"]+",state="parked"\} (\S+)')


@dataclass
class Asked:
    """A streamed completion while it runs, and what became of it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    finishes: list[str] = field(default_factory=list)

    @property
    def is_answered_once(self) -> bool:
        return len(self.finishes) + bool(self.error) == 1


class FaultyCluster:
    """Two nodes of each role, and one router, for tests that run one after the other."""

    def __init__(self, cluster: ChaosCluster, oracle: GreedyOracle) -> None:
        self.cluster, self.oracle = cluster, oracle
        (self.router,) = cluster.routers.values()
        self.client = httpx.AsyncClient(trust_env=False, timeout=HOLD_S + 60.0)
        self.model = ""

    async def learn(self) -> None:
        models = (await self.client.get(f"http://{self.router.address}/v1/models")).json()["data"]
        self.model = models[0]["id"]

    def prompt(self, length: int) -> list[int]:
        chance = random.Random()
        return [chance.randrange(5, 2000) for _ in range(length)]

    async def ask(self, asked: Asked, num_output: int = 200) -> None:
        body = {
            "model": self.model, "prompt": asked.prompt, "max_tokens": num_output, "temperature": 0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        url = f"http://{self.router.address}/v1/completions"
        try:
            async with self.client.stream("POST", url, json=body) as reply:
                if reply.status_code != 200:
                    asked.error = f"{reply.status_code}: {(await reply.aread())!r}"
                    return
                async for line in reply.aiter_lines():
                    self._take(asked, line)
        except httpx.HTTPError as error:
            asked.error = asked.error or f"{type(error).__name__}: {error}"

    def _take(self, asked: Asked, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            asked.error = str(event["error"])
            return
        for choice in event["choices"]:
            asked.tokens.extend(choice.get("token_ids") or ())
            if choice.get("finish_reason"):
                asked.finishes.append(choice["finish_reason"])

    def check(self, asked: Asked, num_output: int = 200) -> None:
        """One right answer or one error."""
        assert asked.is_answered_once, asked
        assert not self.oracle.wrong_tokens(asked.prompt, asked.tokens), asked
        if not asked.error:
            assert len(asked.tokens) == num_output

    @contextlib.asynccontextmanager
    async def only(self, *names: str) -> AsyncIterator[None]:
        """New requests go to these nodes."""
        others = [name for name in self.cluster.nodes if name not in names]
        await self._cordon(others, cordoned=True)
        try:
            yield
        finally:
            await self._cordon(others, cordoned=False)

    async def _cordon(self, names: list[str], *, cordoned: bool) -> None:
        async with self.cluster.admin(self.router) as stub:
            for name in names:
                await stub.Cordon(pb.CordonRequest(node=name, cordoned=cordoned), timeout=10)

    async def num_parked(self, node: str) -> float:
        found = dict(_PARKED.findall(await self.cluster.metrics(self.router)))
        return float(found.get(node, 0.0))

    async def until(self, condition: Any, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not await condition():
                await asyncio.sleep(0.02)

    async def is_idle_after(self, seconds: float) -> None:
        """No node holds KV for anybody, that long from now at the latest."""
        left: list[str] = ["not asked"]
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            left = await self.cluster.held()
            await asyncio.sleep(0.1)
        assert not left

    async def places(self, request: Asked) -> tuple[str, str]:
        """The nodes of the only request with that many tokens, when it has been placed."""
        found: list[tuple[str, str]] = []

        async def is_placed() -> bool:
            async with self.cluster.admin(self.router) as stub:
                reply = await stub.ListRequests(pb.ListRequestsRequest(), timeout=10)
            found.extend(
                (each.prefill, each.decode)
                for each in reply.requests
                if each.prompt_tokens == len(request.prompt) and each.prefill
            )
            return bool(found)

        await self.until(is_placed)
        return found[0]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def faulty(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    shape = ClusterShape(
        prefill=2, decode=2, routers=1, bootstraps=1, kind=VLLM, node=lease_flags(PEER_LEASE_S, "node"),
        router=(
            *lease_flags(PEER_LEASE_S, "router"), "--set=router.mode=remote", f"--set=router.hold.age_s={HOLD_S:g}",
        ),
    )  # fmt: skip
    cluster = ChaosCluster(shape, tmp_path_factory.mktemp("faulty"))
    runner.run(cluster.__aenter__())
    try:
        found = FaultyCluster(cluster, GreedyOracle())
        runner.run(found.learn())
        yield found
        runner.run(found.client.aclose())
    finally:
        runner.run(cluster.__aexit__())


@contextlib.asynccontextmanager
async def stage_of(
    faulty: FaultyCluster, stage: str, prefill: ChildProcess, decode: ChildProcess
) -> AsyncIterator[Asked]:
    """A request in that stage on these two nodes. When the block ends, what held it there goes on."""
    asked = Asked(faulty.prompt(SHORT if stage == "decoding" else LONG + random.Random().randrange(100)))
    before: list[asyncio.Task[None]] = []
    held: list[psutil.Process] = []
    if stage == "queued":
        before += [asyncio.create_task(faulty.ask(Asked(faulty.prompt(LONG - 200)), 2)) for _ in range(6)]
        await asyncio.sleep(0.3)
    if stage == "pulling":
        held.append(parts_of(decode)["worker"])
    if stage == "parked":
        held.append(psutil.Process(decode.pid))
    task = asyncio.create_task(faulty.ask(asked))
    try:
        await _reach(faulty, stage, asked, prefill, held)
        yield asked
    finally:
        for process in held:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        await asyncio.gather(task, *before)


async def _reach(
    faulty: FaultyCluster, stage: str, asked: Asked, prefill: ChildProcess, held: list[psutil.Process]
) -> None:
    """Wait until the request is in that stage. held: of the decode node, what must stand still for it."""
    await faulty.places(asked)
    if stage == "prefilling":
        await asyncio.sleep(0.15)
    if stage == "decoding":
        await faulty.until(lambda: _has_tokens(asked))
    if stage in ("parked", "pulling"):
        await asyncio.sleep(0.1)  # the decode node has reserved
        for process in held:
            process.suspend()
        await faulty.until(lambda: _is_parked(faulty, prefill.name))


async def _is_parked(faulty: FaultyCluster, node: str) -> bool:
    return await faulty.num_parked(node) > 0


async def _has_tokens(asked: Asked) -> bool:
    return len(asked.tokens) >= 3 or bool(asked.error)


def cases() -> Iterator[Any]:
    for victim, stage in CASES:
        marks = [] if (victim, stage) in SAMPLE else [pytest.mark.full]
        yield pytest.param(victim, stage, id=f"{victim[0]}-{victim[1]}-{stage}", marks=marks)


@pytest.mark.parametrize(("victim", "stage"), list(cases()))
def test_a_killed_process_costs_no_answer(
    runner: asyncio.Runner, faulty: FaultyCluster, victim: tuple[str, Part], stage: str
) -> None:
    async def run() -> None:
        role, part = victim
        nodes = faulty.cluster.nodes
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        killed = prefill if role == "prefill" else decode
        async with contextlib.AsyncExitStack() as stack:
            async with faulty.only(prefill.name, decode.name):
                asked = await stack.enter_async_context(stage_of(faulty, stage, prefill, decode))
            family = await kill_part(killed, part)
        began = time.monotonic()
        faulty.check(asked)
        await asyncio.sleep(max(LEFT_S - (time.monotonic() - began), 0.0))
        assert not list(alive(family))
        await faulty.is_idle_after(LEASE_S + 1.0)
        await killed.wait(1.0)
        await faulty.cluster.restart(killed)
        await faulty.cluster.until_ready()
        again = Asked(asked.prompt)
        await faulty.ask(again)
        assert not again.error
        faulty.check(again)

    runner.run(run())


def test_clients_that_leave_at_any_moment_leave_nothing_behind(runner: asyncio.Runner, faulty: FaultyCluster) -> None:
    async def run() -> None:
        chance = random.Random(30)
        for _ in range(30):
            task = asyncio.create_task(faulty.ask(Asked(faulty.prompt(chance.choice((SHORT, 600, LONG))))))
            await asyncio.sleep(chance.uniform(0.0, 1.5))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await faulty.is_idle_after(LEASE_S + 1.0)
        asked = Asked(faulty.prompt(LONG))
        await faulty.ask(asked)
        assert not asked.error
        faulty.check(asked)

    runner.run(run())


def test_a_read_that_comes_after_its_lease_gives_no_wrong_token(runner: asyncio.Runner, faulty: FaultyCluster) -> None:
    """The reader stands still while the lease runs out and other prompts take the blocks."""

    async def run() -> None:
        nodes = faulty.cluster.nodes
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with contextlib.AsyncExitStack() as stack:
            async with faulty.only(prefill.name, decode.name):
                asked = await stack.enter_async_context(stage_of(faulty, "pulling", prefill, decode))
            await faulty.until(lambda: _is_free(faulty, prefill.name), LEASE_S + 5.0)
            async with faulty.only(prefill.name, "decode-1"):
                others = [Asked(faulty.prompt(LONG)) for _ in range(12)]
                await asyncio.gather(*(faulty.ask(each, 2) for each in others))
        for each in others:
            faulty.check(each, 2)
        assert not asked.error
        faulty.check(asked)
        again = Asked(asked.prompt)
        async with faulty.only(prefill.name, decode.name):
            await faulty.ask(again)
        assert not again.error
        faulty.check(again)
        await faulty.is_idle_after(LEASE_S + 1.0)

    runner.run(run())


async def _is_free(faulty: FaultyCluster, node: str) -> bool:
    return await faulty.num_parked(node) == 0


@pytest.mark.timeout(1500)
def test_drains_moves_and_restarts_lose_no_request(runner: asyncio.Runner, faulty: FaultyCluster) -> None:
    async def run() -> None:
        cluster = faulty.cluster
        load = ChaosLoad(cluster, greedy_requests_of(1, 24), 1, faulty.oracle.is_right, limit_s=HOLD_S + 60.0)
        await load.learn()
        clients = asyncio.create_task(load.run(4))
        for name in ("prefill-0", "decode-0"):
            async with cluster.admin(faulty.router) as stub:
                for deadline_s in (0.0, 3.0):
                    async for _ in stub.Drain(pb.DrainRequest(node=name, deadline_s=deadline_s), timeout=60):
                        continue
                    await stub.Cordon(pb.CordonRequest(node=name, cordoned=False), timeout=10)
                    await asyncio.sleep(2.0)
                for role in (bootstrap_pb2.ROLE_MIXED, ROLES[name.partition("-")[0]]):
                    await stub.SetRole(pb.SetRoleRequest(node=name, role=role), timeout=10)
                    await asyncio.sleep(2.0)
            assert await cluster.nodes[name].terminate(60.0) == 0
            await cluster.restart(cluster.nodes[name])
            await cluster.until_ready()
        load.end()
        await clients
        await load.close()
        report = load.report
        assert report.is_clean, (report.wrong, report.lost, report.hung)
        assert report.num_right > 20 and not report.excused
        await faulty.is_idle_after(LEASE_S + 1.0)

    runner.run(run())

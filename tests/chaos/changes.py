"""Changes of weights by seed: loads and pushes, in each kind of pause and without one, and who is killed at which stage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdcluster.rpc import admin_pb2 as pb
from tests.chaos.cluster import ROOT, START_S, ChaosCluster, ChildProcess
from tests.chaos.edges import GuardedEdges
from tests.chaos.faults import Tell
from tests.chaos.trainer import ROLL_S, Order

KINDS = tuple((change, pause) for change in ("load", "push") for pause in ("", "abort", "wait", "keep"))
# What a change passes through, with a pause around it or not.
STAGES = {"load": ("loading", "ending", "serving"), "push": ("writing", "written", "loading", "serving")}
PAUSE_STAGES = ("paused", "changed")
ALL_STAGES = ("paused", "writing", "written", "loading", "ending", "serving", "changed")
OTHERS = ("prefill", "decode", "router", "bootstrap")
# So often each of the others is in the bag of victims, beside the trainer once at each stage. NOBODY: changes in peace.
OTHERS_TIMES, NOBODY_TIMES = 2, 4
LONG_PAUSE_S = 60.0
# What nodes keep for a trainer that died ends by itself, at the latest.
FREE_S = 60.0
PUSHED = "-pushed-"


@dataclass(frozen=True)
class Plan:
    """One change. victim: "trainer", one of OTHERS or "". which: of several, modulo.

    later_s: until the victim starts again; also, for a push while nodes load, until it is killed.
    gives_up: the change of a killed trainer is not tried again.
    """

    change: str
    pause: str
    content: str
    max_unavailable: int
    finish_s: float
    max_pause_s: float
    victim: str
    stage: str
    which: int
    later_s: float
    gives_up: bool

    @property
    def kind(self) -> str:
        return f"{self.change} in {self.pause}" if self.pause else self.change


def stages_of(change: str, pause: str) -> tuple[str, ...]:
    return (*STAGES[change], *(PAUSE_STAGES if pause else ()))


class Bag:
    """Draws each thing once before any comes again."""

    def __init__(self, chance: random.Random, things: Sequence[tuple[str, str]]) -> None:
        self._chance, self._things, self._left = chance, list(things), list[tuple[str, str]]()

    def draw(self) -> tuple[str, str]:
        if not self._left:
            self._left = self._chance.sample(self._things, len(self._things))
        return self._left.pop()


def plans(seed: int, contents: Sequence[str], *, kills: bool) -> Iterator[Plan]:
    """Without end. Nothing but the seed decides."""
    chance, used = random.Random(seed), Counter[tuple[str, str]]()
    nobody = [("", "")] * NOBODY_TIMES
    victims = Bag(
        chance,
        nobody if not kills else
        [*nobody, *(("trainer", stage) for stage in ALL_STAGES), *((other, "") for other in OTHERS * OTHERS_TIMES)],
    )  # fmt: skip
    stages, turn = Bag(chance, [("", stage) for stage in ALL_STAGES]), 0
    while True:
        turn += 1
        victim, stage = victims.draw()
        if victim and not stage:
            _, stage = stages.draw()
        fitting = [kind for kind in KINDS if not stage or stage in stages_of(*kind)]
        change, pause = min(fitting, key=lambda kind: (used[kind], chance.random()))
        used[change, pause] += 1
        yield Plan(
            change,
            pause,
            contents[turn % len(contents)],
            max_unavailable=chance.choice((1, 1, 2, 0)),
            finish_s=chance.choice((0.0, 0.5, 20.0)),
            max_pause_s=chance.uniform(2.0, 5.0) if victim == "trainer" else LONG_PAUSE_S,
            victim=victim,
            stage=stage,
            which=chance.randrange(100),
            later_s=chance.uniform(0.0, 2.0),
            gives_up=chance.random() < 0.5,
        )


class TrainerProcess:
    """`tests.chaos.trainer`. After it was killed, the next one starts at once. Use as `async with`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False

    async def __aenter__(self) -> TrainerProcess:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def order(self, order: Order, on_stage: Callable[[str], Awaitable[None]]) -> str | None:
        """Have it change the weights. Returns why it failed, "" when it is done, None when the trainer was killed."""
        process = self._running()
        if not self._is_ready:
            await self._said(process, START_S)
            self._is_ready = True
        await self._write(msgspec.json.encode(order))
        while "stage" in (said := await self._said(process, ROLL_S + LONG_PAUSE_S)):
            await on_stage(str(said["stage"]))
            if process is not self._process:
                return None
        return str(said.get("failed", ""))

    async def go_on(self) -> None:
        """After a stage at which it waits."""
        await self._write(b"")

    async def kill(self) -> None:
        await self._end()
        await self._start()

    async def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.chaos.trainer", stdin=PIPE, stdout=PIPE, stderr=log, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'router'}"}, start_new_session=True,
            )  # fmt: skip
        self._is_ready = False

    async def _end(self) -> None:
        process = self._running()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the trainer was not started"
        return self._process

    async def _write(self, line: bytes) -> None:
        pipe = self._running().stdin
        assert pipe is not None
        pipe.write(line + b"\n")
        await pipe.drain()

    async def _said(self, process: asyncio.subprocess.Process, within_s: float) -> Mapping[str, object]:
        """Its next line."""
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), within_s)
        except TimeoutError:
            raise AssertionError(f"the trainer hangs: it says nothing for {within_s:g} s; see {self._log}") from None
        if not line:
            raise AssertionError(f"the trainer ended by itself; see {self._log}")
        return dict(json.loads(line))


@dataclass
class AbortWindows:
    """When pauses ended requests with what they had. An answer that ends so at another time is not right."""

    _windows: list[list[float]] = field(default_factory=list)

    def begin(self) -> None:
        self._windows.append([time.monotonic(), float("inf")])

    def end(self) -> None:
        self._windows[-1][1] = time.monotonic()

    def has_one_since(self, moment: float) -> bool:
        return any(end >= moment for _, end in self._windows)


class WeightsChanger:
    """Makes one planned change after the other, each until it is done or given up."""

    def __init__(
        self,
        cluster: ChaosCluster,
        trainer: TrainerProcess,
        directories: Mapping[str, Path],
        aborts: AbortWindows,
        tell: Tell,
    ) -> None:
        """directories: by label. Nodes are started with the first one."""
        self._cluster, self._directories, self._first, self._tell = cluster, directories, next(iter(directories)), tell
        self._aborts, self._trainer = aborts, trainer
        self._turn = 0
        # Whom the plan names, in the change that runs.
        self._has_killed = False
        self._killing: asyncio.Task[None] | None = None
        self.counts = {what: Counter[str]() for what in ("changes", "killed", "what became of them")}

    def _count(self, kind: str) -> None:
        self.counts["what became of them"][kind] += 1

    async def run(self, seconds: float, seed: int, *, kills: bool) -> None:
        until, contents = time.monotonic() + seconds, list(self._directories)
        for plan in plans(seed, contents, kills=kills):
            await self._change(plan)
            if time.monotonic() > until:
                return
            await asyncio.sleep(plan.later_s)

    async def end(self) -> list[str]:
        """Load the nodes' first weights again. Returns what is left of other changes after a while."""
        plan = Plan("load", "", self._first, 0, 20.0, LONG_PAUSE_S, "", "", 0, 0.0, False)
        await self._change(plan)
        deadline = time.monotonic() + FREE_S
        while (left := [*self._images(), *await self._pauses()]) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        return left

    async def _change(self, plan: Plan) -> None:
        self._turn += 1
        label = plan.content if plan.change == "load" else f"{plan.content}{PUSHED}{self._turn}"
        self.counts["changes"][plan.kind] += 1
        told = f", {plan.victim} killed at {plan.stage}" if plan.victim else ""
        told += " for good" if plan.victim == "trainer" and plan.gives_up else ""
        self._tell(f"{plan.kind}: {label} at {plan.max_unavailable}, {plan.finish_s:g} s to end{told}")
        self._has_killed = False
        deadline = time.monotonic() + ROLL_S
        while (failure := await self._attempt(plan, label)) != "":
            if failure is None:
                await self._await_end_of_pause(plan)
                if plan.gives_up:
                    self._count("given up")
                    break
            else:
                self._count("failed and tried again")
            if time.monotonic() > deadline:
                raise AssertionError(f"{plan.kind} of {label} did not end: {failure}")
            await asyncio.sleep(0.5)
        if plan.victim and not self._has_killed:
            self._count("ended before the kill")
        if self._killing is not None:
            await self._killing
            self._killing = None

    async def _attempt(self, plan: Plan, label: str) -> str | None:
        """As TrainerProcess.order."""
        routers = [each for each in self._cluster.routers.values() if each.is_running and each.is_ready]
        if not routers:
            return "no router runs"
        edges = self._cluster.edges
        order = Order(
            plan.change,
            plan.pause,
            label,
            source="" if plan.content == self._first else str(self._directories[plan.content]),
            directory=str(self._directories[plan.content]),
            admins=tuple(router.facts["admin"] for router in routers),
            max_unavailable=plan.max_unavailable,
            finish_s=plan.finish_s,
            max_pause_s=plan.max_pause_s,
            ca=str(edges.certificate) if isinstance(edges, GuardedEdges) else "",
            wait_at="" if self._has_killed else plan.stage,
        )
        if plan.pause == "abort":
            self._aborts.begin()
        try:
            return await self._trainer.order(order, lambda stage: self._at_stage(plan, stage))
        finally:
            if plan.pause == "abort":
                self._aborts.end()

    async def _at_stage(self, plan: Plan, stage: str) -> None:
        """Kill whom the plan names."""
        is_loading_push = plan.change == "push" and plan.stage == "loading" and stage == "written"
        if not plan.victim or self._has_killed or (stage != plan.stage and not is_loading_push):
            return
        self._has_killed = True
        if is_loading_push:
            await asyncio.sleep(plan.later_s / 2)
        self.counts["killed"][f"{plan.victim} at {plan.stage}"] += 1
        if plan.victim == "trainer":
            await self._trainer.kill()
            return
        victims = [each for each in self._cluster.all() if each.name.startswith(plan.victim)]
        victim = victims[plan.which % len(victims)]
        await victim.kill()
        self._killing = asyncio.create_task(self._start_again(victim, plan.later_s))
        if not is_loading_push:
            await self._trainer.go_on()

    async def _await_end_of_pause(self, plan: Plan) -> None:
        """The trainer is dead. What it paused goes on by itself; the change is tried again at once, or when that is so."""
        if not plan.pause or not plan.gives_up:
            return
        deadline = time.monotonic() + 3 * plan.max_pause_s
        paused = await self._pauses()
        if paused:
            self._count("pauses that ended by themselves")
        while paused:
            if time.monotonic() > deadline:
                raise AssertionError(f"the pause of {plan.max_pause_s:.1f} s did not end: {', '.join(paused)}")
            await asyncio.sleep(0.2)
            paused = await self._pauses()

    async def _pauses(self) -> list[str]:
        """The routers that are paused."""
        found = []
        for router in self._cluster.routers.values():
            if router.is_running and router.is_ready:
                async with self._cluster.admin(router) as stub:
                    if (await stub.GetPause(pb.GetPauseRequest(), timeout=10.0)).is_paused:
                        found.append(f"{router.name} is paused")
        return found

    def _images(self) -> list[str]:
        """Nodes with the memory of more weights than those that they serve."""
        counts = {node.name: len(_images_of(node.pid)) for node in self._cluster.nodes.values()}
        return [f"{name}: {count} images of weights" for name, count in counts.items() if count > 1]

    async def _start_again(self, victim: ChildProcess, later_s: float) -> None:
        await asyncio.sleep(later_s)
        deadline = time.monotonic() + ROLL_S
        while True:
            try:
                await self._cluster.restart(victim)
                return
            except AssertionError:  # refused; whoever supervises it starts it again
                if time.monotonic() > deadline:
                    raise
                self._count("starts refused")
                await asyncio.sleep(1.0)


def _images_of(pid: int) -> set[int]:
    """The memory files with weights that a process has open, by their numbers."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:pdcluster-weights" in os.readlink(each):
                found.add(each.stat().st_ino)
    return found

"""The fault matrix on real media: node processes, real sockets and shared memory, and at each step of the protocol each
fault that the medium can express. A run is two requests in a cluster that stays up from run to run; the process at
whose step the fault is due is held there meanwhile.

Afterwards: every request ended with the tokens of one process or with a clear error, every node is idle with books that
add up, and the same prompt gives the right tokens.

    PYTHONPATH=.:router:tests/faults:$(echo tests/harness/* | tr " " :) python tests/faults/real_media_matrix.py BACKEND [SEED]
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fault_script import STEPS
from faulty_node import SEALED, WIDTH
from meddling_proxy import Order
from oracle import VOCAB, reference
from patient_loop import PatientLoop
from process_cluster import ProcessCluster, ProcessNode
from standstill import stop_child

from pdcluster.core.errors import PdclusterError
from pdcluster.core.messages import Role, Sampling
from pdcluster_router.core.generation import Done, Generation

ROLES: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
DEADLINE_S, IDLE_WITHIN_S, STEP_WITHIN_S = 20.0, 30.0, 8.0
FROZEN_S, DELAY_S = 1.6, 0.4
GONE_AFTER_S = 0.3
TRIES = 3
SPREAD_BYTES = {"tcp": 40_000, SEALED: 40_000, "mooncake": 400, "nixl": 400}
# A fault on the wire comes after up to so many bytes from the step on: a frame is about that long, and the last one is
# only one layer.
LAST_SPREAD_BYTES = {"tcp": 3000, SEALED: 3000, "mooncake": 100, "nixl": 100}

EVERYWHERE = (
    "writer killed",
    "reader killed",
    "half open",
    "cut",
    "delay",
    "duplicate connection",
    "stale incarnation",
)
ON_A_WIRE = (*EVERYWHERE, "truncated", "flipped")
# What somebody between two nodes may do on purpose.
ON_A_SEALED_WIRE = ("repeated", "swapped")
# Shared memory has no wire on which bytes could be flipped or a stream could end early. What goes over Mooncake's and
# NIXL's own sockets is not ours to touch; there the wire is the one on which their pieces are announced and answered.
FAULTS = {
    "shm": EVERYWHERE, "tcp": ON_A_WIRE, SEALED: (*ON_A_WIRE, *ON_A_SEALED_WIRE), "mooncake": ON_A_WIRE,
    "nixl": ON_A_WIRE,
}  # fmt: skip


# Orders to a proxy.
KINDS = {"truncated": "truncate", "flipped": "flip", "repeated": "repeat", "swapped": "swap"}


@dataclass(frozen=True, slots=True)
class Cell:
    backend: str
    fault: str
    step: str
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """reached: the step came while the fault was armed; acted: it happened, which one for the next bytes on the wire
    may not: none may come. The last four must stay empty."""

    cell: Cell
    reached: bool = False
    acted: bool = False
    right: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.leaked or self.hung or self.broken)


def cells(backend: str, seed: int = 0) -> list[Cell]:
    return [Cell(backend, fault, step, seed) for fault, step in itertools.product(FAULTS[backend], STEPS)]


async def run_cells(
    backend: str, todo: Iterable[Cell], tell: Callable[[Outcome], None] = lambda _: None, orders: tuple[str, ...] = ()
) -> list[Outcome]:
    """orders: for every node before each run, so that it breaks a rule on purpose."""
    outcomes = []
    async with ProcessCluster(ROLES, backend) as cluster:
        for cell in todo:
            for node, order in itertools.product(cluster.nodes.values(), orders):
                node.tell(order)
            began = time.monotonic()
            for _ in range(TRIES):
                outcome = await Run(cluster, cell).play()
                if outcome.reached or not outcome.is_good:
                    break  # else a stall of the machine cost the requests before they came to the step
            outcome.seconds = time.monotonic() - began
            tell(outcome)
            outcomes.append(outcome)
    return outcomes


class Run:
    def __init__(self, cluster: ProcessCluster, cell: Cell) -> None:
        self.cluster = cluster
        self.cell = cell
        self.rng = random.Random(f"{cell.backend}/{cell.fault}/{cell.step}/{cell.seed}")
        self.outcome = Outcome(cell)
        self.prompts = [[self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(90, 200))] for _ in range(2)]
        self.after: list[asyncio.Task[None]] = []

    async def play(self) -> Outcome:
        acts = self._acts()
        self._arm()
        watching = asyncio.create_task(self._watch())
        await self._ask_all()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.gather(*self.after)
        on_wire = self.cell.fault in ("cut", "delay", *KINDS) and bool(self.cluster.proxies)
        self.outcome.acted = self._acts() > acts if on_wire else self.outcome.reached
        await self._heal()
        self.outcome.leaked += await self.cluster.wait_idle(IDLE_WITHIN_S)
        await self._ask_again()
        self.outcome.leaked += await self.cluster.wait_idle(IDLE_WITHIN_S)
        return self.outcome

    def _acts(self) -> int:
        return sum(proxy.acted for proxy in self.cluster.proxies.values())

    # ------------------------------------------------------------ requests

    async def _ask_all(self) -> None:
        tasks = [asyncio.create_task(self._ask(f"r{number}", prompt, 4)) for number, prompt in enumerate(self.prompts)]
        done, pending = await asyncio.wait(tasks, timeout=DEADLINE_S + 10)
        for task in pending:
            self.outcome.hung.append("a request has no answer after its deadline")
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self.outcome.broken += [
            repr(task.exception()) for task in done if not task.cancelled() and task.exception() is not None
        ]

    async def _ask_again(self) -> None:
        """The cluster is as good as new: one answer of a few at the latest, as a stall of the machine may cost a
        request, too."""
        before = self.outcome.right
        for _ in range(TRIES):
            await self._ask("again", self.prompts[0], 3)
            if self.outcome.right > before:
                return
        self.outcome.broken.append(f"no right answer any more: {self.outcome.errors[-TRIES:]}")

    async def _ask(self, name: str, prompt: list[int], count: int) -> None:
        expected, tokens = reference(prompt, count, WIDTH), []
        try:
            async for token in self._stream(f"{name}-{next(self.cluster.versions)}", prompt, count):
                tokens.append(token)
            self.outcome.right += tokens == expected
            if len(tokens) != count:
                self.outcome.wrong.append(f"{name}: {len(tokens)} tokens instead of {count}")
        except PdclusterError as error:
            self.outcome.errors.append(f"{type(error).__name__}: {error}")
            if not str(error):
                self.outcome.broken.append(f"{name}: {error!r}")
        if tokens != expected[: len(tokens)]:
            self.outcome.wrong.append(f"{name}: {tokens} is no beginning of {expected}")

    async def _stream(self, name: str, prompt: list[int], count: int) -> AsyncIterator[int]:
        generation = Generation(name, "model", array("i", prompt), Sampling(max_tokens=count, seed=1), DEADLINE_S)
        async with aclosing(self.cluster.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return
                for token in event.token_ids:
                    yield token

    # ------------------------------------------------------------ the moment

    def _arm(self) -> None:
        role = "decode" if self.cell.step in ("reserve", "commit") else "prefill"
        self.armed = [node for node in self.cluster.nodes.values() if node.role == role]
        for node in self.armed:
            while not node.said.empty():
                node.said.get_nowait()
            node.tell("arm", step=self.cell.step)

    async def _watch(self) -> None:
        """The first process that comes to the step is held while the fault happens; the others go on."""
        waits = {asyncio.create_task(node.said.get()): node for node in self.armed}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            held = waits[next(iter(done))]
            for node in self.armed:
                if node is not held:
                    node.tell("disarm")
            self.outcome.reached = True
            await self._strike(next(iter(done)).result(), held)
        finally:
            for task in waits:
                task.cancel()

    async def _strike(self, said: dict[str, Any], held: ProcessNode) -> None:
        writer, reader = self.cluster.nodes[said["writer"]], self.cluster.nodes[said["reader"]]
        match self.cell.fault:
            case "writer killed" | "reader killed":
                await self._kill(writer if self.cell.fault == "writer killed" else reader, held)
                return
            case "stale incarnation":
                await self._replace(self.rng.choice((writer, reader)), held, reader)
                return
            case "half open":
                self._hold(writer, reader)
            case "duplicate connection":
                self._connect_twice(writer, reader)
            case _:
                self._meddle(writer, reader)
        held.tell("go")

    async def _kill(self, victim: ProcessNode, held: ProcessNode) -> None:
        """At the step, or a moment into what follows it."""
        if self.rng.random() < 0.5:
            held.tell("go")
            await asyncio.sleep(self.rng.choice((0.0, 0.0005, 0.002, 0.01)))
        victim.kill()
        held.tell("go")
        await asyncio.sleep(GONE_AFTER_S)
        self.cluster.declare_gone(victim.me)

    async def _replace(self, victim: ProcessNode, held: ProcessNode, reader: ProcessNode) -> None:
        """Killed and started again at once, where the old one was; then the wire says again what it said to or from the
        old one."""
        victim.kill()
        held.tell("go")
        await self.cluster.boot(victim.me.node)
        if reader.me.node in self.cluster.proxies:
            self.cluster.proxies[reader.me.node].repeat()
        await asyncio.sleep(GONE_AFTER_S)
        self.cluster.declare_gone(victim.me)

    def _hold(self, writer: ProcessNode, reader: ProcessNode) -> None:
        """Connections are there and carry nothing: by the wire, or because the process at the other end stands
        still."""
        proxy = self.cluster.proxies.get(reader.me.node)
        if proxy is not None and self.rng.random() < 0.6:
            proxy.hold()
            self._later(FROZEN_S, proxy.heal)
        else:
            self._freeze(self.rng.choice((writer, reader)), FROZEN_S)

    def _freeze(self, node: ProcessNode, seconds: float) -> None:
        stop_child(node.process.pid)
        self._later(seconds, lambda: node.signal(signal.SIGCONT))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        async def act() -> None:
            await asyncio.sleep(seconds)
            action()

        self.after.append(asyncio.create_task(act()))

    def _connect_twice(self, writer: ProcessNode, reader: ProcessNode) -> None:
        proxy = self.cluster.proxies.get(reader.me.node)
        if proxy is None:
            writer.tell("twice", node=reader.me.node)
        else:
            proxy.repeat()

    def _meddle(self, writer: ProcessNode, reader: ProcessNode) -> None:
        proxy = self.cluster.proxies.get(reader.me.node)
        kind = KINDS.get(self.cell.fault, self.cell.fault)
        if proxy is not None and kind in ("cut", "truncate") and self.cell.step in ("commit", "ack"):
            proxy.act_now(kind)  # all bytes have passed
        elif proxy is not None:
            spread = (LAST_SPREAD_BYTES if self.cell.step == "last chunk" else SPREAD_BYTES)[self.cell.backend]
            after = 0 if self.rng.random() < 0.2 else self.rng.randrange(spread)
            proxy.order(Order(kind, after, bit=self.rng.randrange(8), seconds=DELAY_S))
        elif kind == "delay":
            self._freeze(self.rng.choice((writer, reader)), DELAY_S)
        else:
            self.rng.choice((writer, reader)).tell("cut")

    async def _heal(self) -> None:
        for node in self.cluster.nodes.values():
            node.tell("disarm")
        for proxy in self.cluster.proxies.values():
            proxy.heal()
        await self.cluster.restart_dead()


# ---------------------------------------------------------------- the table


def table(outcomes: Iterable[Outcome]) -> str:
    """Per medium: fault × step → requests that were right / ended with a clear error (`·` where the fault did not
    happen); then the totals."""
    sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for outcome in outcomes:
        counts = Counter(
            runs=1, reached=outcome.reached, acted=outcome.acted, right=outcome.right, errors=len(outcome.errors),
            wrong=len(outcome.wrong),
            leaked=len(outcome.leaked), hung=len(outcome.hung), broken=len(outcome.broken),
        )  # fmt: skip
        sums[outcome.cell.backend, outcome.cell.fault, outcome.cell.step] += counts
        total += counts
    lines = []
    for backend in FAULTS:
        if any(key[0] == backend for key in sums):
            lines.append(f"{backend:<22}" + "".join(f"{step:>14}" for step in STEPS))
            faults = [fault for fault in FAULTS[backend] if any(key[:2] == (backend, fault) for key in sums)]
            lines += [
                f"  {fault:<20}" + "".join(f"{_entry(sums[backend, fault, step]):>14}" for step in STEPS)
                for fault in faults
            ]
    lines.append(
        f"{total['runs']} runs, the step came in {total['reached']} and the fault happened in {total['acted']}; "
        f"requests: {total['right']} right, "
        f"{total['errors']} with a clear error; "
        f"wrong tokens {total['wrong']}, leaks {total['leaked']}, hangs {total['hung']}, broken rules {total['broken']}"
    )
    return "\n".join(lines)


def _entry(counts: Counter[str]) -> str:
    if not counts["runs"]:
        return "-"
    return f"{counts['right']}/{counts['errors']}" if counts["acted"] else "·"


def main(backend: str, seed: str = "0", *only: str) -> int:
    def tell(outcome: Outcome) -> None:
        what = outcome.errors if outcome.is_good else outcome
        print(f"{outcome.cell.fault:<22}{outcome.cell.step:<14}{outcome.seconds:6.1f} s  {what}", flush=True)

    todo = [cell for cell in cells(backend, int(seed)) if not only or cell.fault in only]
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        outcomes = runner.run(run_cells(backend, todo, tell))
    print(table(outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The fault matrix on the scripted medium: each fault at each step of the protocol, alone and with up to two more,
under several requests at once.

A run is a whole simulated cluster. Every token depends on every byte of KV, so: a request ends with the tokens of one
process or with a clear error; once the network is good again, no node holds a page, and the same prompts give the right
tokens from whatever was cached.

    PYTHONPATH=.:router:$(echo tests/harness/* | tr " " :) python tests/faults/fault_matrix.py [RUNS]
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import random
import sys
import traceback
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from fault_script import FAULTS, STEPS, Script, Trigger
from oracle import VOCAB, reference
from simulated_cluster import SimulatedCluster
from virtual_time import Stuck, VirtualLoop, run_virtually

from pdcluster.core.errors import PdclusterError
from pdcluster.core.messages import Role, Sampling
from pdcluster_router.core.generation import Done, Generation

TOPOLOGIES: tuple[dict[str, Role], ...] = (
    {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"},
    {"p0": "prefill", "d0": "decode"},
    {"p0": "prefill", "d0": "decode", "d1": "decode"},
    {"p0": "prefill", "p1": "prefill", "d0": "decode"},
)
DEADLINE_S = 40.0
# Late writes land up to 70 s after they were submitted, and unknown ones are only asked for after their ticket's
# deadline.
IDLE_WITHIN_S = 200.0


@dataclass(frozen=True, slots=True)
class Cell:
    fault: str
    step: str
    seed: int


@dataclass(slots=True)
class Outcome:
    """fired: how often the cell's own fault happened. The last four must stay empty."""

    cell: Cell
    fired: int = 0
    right: int = 0
    errors: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.leaked or self.hung or self.broken)


def cells(runs: int, first_seed: int = 0) -> list[Cell]:
    """So many runs, all cells in turn."""
    order = itertools.product(range(first_seed, first_seed + runs), FAULTS, STEPS)
    return [Cell(fault, step, seed) for seed, fault, step in itertools.islice(order, runs)]


def run_cell(cell: Cell) -> Outcome:
    with quiet_logs():
        try:
            return run_virtually(lambda loop: Scenario(loop, cell).play())
        except Stuck as error:
            return Outcome(cell, hung=[str(error)])
        except Exception as error:  # the top of a run: one that breaks must not end the others, and is counted
            return Outcome(cell, broken=[repr(error), *traceback.format_exc(limit=-3).splitlines()])


def run_cells(todo: list[Cell], processes: int = 1) -> Iterator[Outcome]:
    if processes == 1:
        yield from map(run_cell, todo)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_cell, todo, chunksize=20)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Thousands of warnings about faults that were made on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class Scenario:
    def __init__(self, loop: VirtualLoop, cell: Cell) -> None:
        self.loop = loop
        self.rng = rng = random.Random(f"{cell.fault}/{cell.step}/{cell.seed}")
        self.outcome = Outcome(cell)
        self.own = Trigger(cell.fault, cell.step, skip=rng.choice((0, 0, 0, 1, 2)), times=rng.choice((1, 1, 1, 2, 5)))
        others = [
            Trigger(rng.choice(FAULTS), rng.choice(STEPS), skip=rng.randrange(4), times=rng.choice((1, 1, 3)))
            for _ in range(rng.choice((0, 0, 1, 2)))
        ]  # fmt: skip
        self.cluster = SimulatedCluster(
            loop,
            rng.choice(TOPOLOGIES),
            num_pages=rng.choice((40, 64, 96)),
            checks_permits=rng.random() < 0.5,
            group_s=rng.choice((1e-12, 0.0004)),
        )
        self.script = Script(self.cluster, rng, [self.own, *others])
        shared = [rng.randrange(VOCAB) for _ in range(30)]
        self.prompts = [self._prompt(shared, number) for number in range(rng.choice((2, 3, 4)))]

    def _prompt(self, shared: list[int], number: int) -> list[int]:
        own = [
            self.rng.randrange(VOCAB)
            for _ in range(self.rng.choice((40, 55, 70)) if number == 0 else self.rng.randrange(1, 60))
        ]
        return own if number == 0 else shared[: self.rng.choice((0, 0, 12, 30))] + own

    async def play(self) -> Outcome:
        self.loop.set_exception_handler(self._on_exception)
        async with self.cluster:
            self.script.install()
            await self._ask_all()
            self.script.heal()
            self.cluster.announce()
            await self._end_idle()
            await self._ask_again()
            self.outcome.broken += self.cluster.problems + self.cluster.crashed_tasks()
        self.outcome.fired = self.own.fired
        return self.outcome

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.outcome.broken.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ------------------------------------------------------------ requests

    async def _ask_all(self) -> None:
        for number, prompt in enumerate(self.prompts):
            talking = self._talk(
                f"r{number}",
                prompt,
                self.rng.randrange(2, 9),
                self.rng.choice((0.0, 0.001, 0.01)),
                self.rng.choice((1, 1, 2)),
            )
            self.script.tasks[f"r{number}"] = self.script.tasks[f"r{number}+"] = self.loop.create_task(talking)
        done, pending = await asyncio.wait(self.script.tasks.values(), timeout=2 * DEADLINE_S + 10)
        for task in pending:
            self.outcome.hung.append("a request has no answer after its deadline")
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                self.outcome.broken.append(f"an answer that is no error of ours: {task.exception()!r}")

    async def _talk(self, name: str, prompt: list[int], count: int, after_s: float, turns: int) -> None:
        """A second turn goes on from the first one's answer, which decode has and prefill can pull."""
        answer = await self._ask(name, prompt, count, after_s)
        if turns == 2 and len(answer) == count:
            await self._ask(f"{name}+", prompt + answer + prompt[:3], count, 0.1)

    async def _ask(self, name: str, prompt: list[int], count: int, after_s: float) -> list[int]:
        expected, tokens = reference(prompt, count), []
        try:
            await asyncio.sleep(after_s)
            async for token in self._stream(name, prompt, count):
                tokens.append(token)
            self.outcome.right += tokens == expected
            if len(tokens) != count:
                self.outcome.wrong.append(f"{name}: {len(tokens)} tokens instead of {count}")
        except asyncio.CancelledError:
            self.outcome.cancelled += 1
        except PdclusterError as error:
            self.outcome.errors += 1
            if not str(error):
                self.outcome.broken.append(f"{name}: {type(error).__name__} says nothing")
        if tokens != expected[: len(tokens)]:
            self.outcome.wrong.append(f"{name}: {tokens} is no beginning of {expected}")
        return tokens

    async def _stream(self, name: str, prompt: list[int], count: int) -> AsyncIterator[int]:
        generation = Generation(name, "model", array("i", prompt), Sampling(max_tokens=count, seed=1), DEADLINE_S)
        position = 0
        async with aclosing(self.cluster.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return
                if event.position != position:
                    self.outcome.wrong.append(f"{name}: position {event.position} after {position}")
                position += len(event.token_ids)
                for token in event.token_ids:
                    yield token

    # ------------------------------------------------------------ afterwards

    async def _end_idle(self) -> None:
        """Idle means: 0 pages in use, 0 slots, 0 quarantined, 0 pinned, and books that add up; no request left at the
        router."""
        busy = await self._wait_idle()
        if busy and self._awaits_proof():
            for name in self.cluster.roles:  # any of them may have written: decode nodes for pulls
                await self.cluster.crash(name, restart_s=0.3)
            await asyncio.sleep(5.0)  # the router hears of the deaths
            await self.cluster.until(
                lambda: len(self.cluster.router.view().nodes) == len(self.cluster.roles), timeout_s=60.0
            )
            busy = await self._wait_idle()
        self.outcome.leaked += busy
        for node in self.cluster.nodes.values():
            if node.is_alive and not busy:
                node.parts.scheduler.check_integrity()
                node.parts.pages.check_integrity()
                node.parts.reader.check_integrity()
                node.parts.writer.check_integrity()

    async def _wait_idle(self) -> list[str]:
        until = self.loop.time() + IDLE_WITHIN_S
        while (busy := self._busy()) and self.loop.time() < until:
            await asyncio.sleep(0.1)
        return busy

    def _awaits_proof(self) -> bool:
        """A write that was lost on a medium without fences may land as long as its process lives: only that is left,
        and that is right."""
        nodes = [
            node
            for node in [*self.cluster.nodes.values(), *self.cluster.graves]
            if not self.cluster.network.checks_permits
        ]
        lost = any(node.parts.writer.counters["lost_writes"] for node in nodes)
        return lost and not any(node.parts.pages.num_used or node.side.num_pinned for node in nodes if node.is_alive)

    def _busy(self) -> list[str]:
        waiting = self.cluster.router.ledger.num_requests()
        found = [f"the router waits for {waiting} requests"] if waiting else []
        for node in self.cluster.nodes.values():
            parts = node.parts
            if node.is_alive and not (
                node.is_idle() and parts.writer.is_idle() and not parts.scheduler.load().slots_used
            ):
                found.append(
                    f"{node.me.node}: {parts.pages.num_used} used, {parts.pages.num_quarantined} quarantined, "
                    f"{node.side.num_pinned} pinned, "
                    f"{parts.scheduler.load().slots_used} slots, {parts.reader.open_tickets} tickets"
                )
        return found

    async def _ask_again(self) -> None:
        """What the faults left in the caches gives the right tokens."""
        await self.cluster.until(lambda: len(self.cluster.router.view().nodes) == len(self.cluster.roles), timeout_s=30)
        for number, prompt in enumerate(self.prompts[:2]):
            tokens = [token async for token in self._stream(f"again{number}", prompt, 4)]
            if tokens != reference(prompt, 4):
                self.outcome.wrong.append(f"asked again on a good network: {tokens} instead of {reference(prompt, 4)}")


# ---------------------------------------------------------------- the table


# By "fault, step".
Sums = dict[str, Counter[str]]


def summed(outcomes: Iterable[Outcome]) -> Sums:
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        sums[f"{outcome.cell.fault}, {outcome.cell.step}"] += Counter(
            runs=1, fired=bool(outcome.fired), right=outcome.right, errors=outcome.errors, cancelled=outcome.cancelled,
            wrong=len(outcome.wrong), leaked=len(outcome.leaked), hung=len(outcome.hung), broken=len(outcome.broken),
        )  # fmt: skip
    return dict(sums)


def joined(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> Sums:
    """Sums of several parts of a matrix, which may have been plain dicts on their way between processes."""
    whole: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        for cell, counts in part.items():
            whole[cell] += Counter(counts)
    return dict(whole)


def table(outcomes: Iterable[Outcome]) -> str:
    return table_of(summed(outcomes))


def table_of(sums: Sums) -> str:
    """fault × step → runs of the cell, and its requests that were right / ended with an error / left; then the totals
    that must be 0."""
    total = sum(sums.values(), Counter())
    lines = ["fault × step: runs, requests right/error/left", " " * 12 + "".join(f"{step:>19}" for step in STEPS)]
    for fault in FAULTS:
        row = [sums.get(f"{fault}, {step}", Counter[str]()) for step in STEPS]
        lines.append(
            f"{fault:<12}"
            + "".join(f"{c['runs']:>5} {c['right']}/{c['errors']}/{c['cancelled']}".rjust(19) for c in row)
        )
    lines.append(
        f"{total['runs']} runs, their own fault fired in {total['fired']}; requests: {total['right']} right, "
        f"{total['errors']} with a clear error, "
        f"{total['cancelled']} left; wrong tokens {total['wrong']}, leaks {total['leaked']}, hangs {total['hung']}, "
        f"broken rules {total['broken']}"
    )
    never = [cell for cell, counts in sums.items() if not counts["fired"]]
    return "\n".join([*lines, *(["the fault never happened in: " + "; ".join(never)] if never else [])])


def main(arguments: list[str]) -> int:
    outcomes = []
    for outcome in run_cells(cells(int(arguments[0]) if arguments else 10_000), processes=multiprocessing.cpu_count()):
        outcomes.append(outcome)
        if not outcome.is_good:
            print(outcome)
    print(table(outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Child processes that are kept alive: start and wait until ready, forward their output, restart what crashes, stop in
order.

One Supervisor lives in one asyncio loop on the main thread.

Requirement: after `stop` returned no child is left, and nothing that a child left in its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdcluster.core.errors import PdclusterError
from pdcluster.processes import ready
from pdcluster.processes.child_process import Spawned, describe, kill_group, lines, spawn
from pdcluster.processes.spare import Spare
from pdcluster.processes.tasks import watched

TAIL_LINES = 15
CRASH_WINDOW_S = 60.0
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
KILL_WAIT_S = 5.0

Facts = dict[str, object]
Say = Callable[[str], None]
# Takes (child's name, one line of its output).
Forward = Callable[[str, str], None]


class StartFailed(PdclusterError):
    """A child did not become ready."""

    code = "start_failed"


class ChildGaveUp(PdclusterError):
    """A child crashed more often than allowed."""

    code = "gave_up"


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run. address_flags: (fact, flag) pairs. A restart passes the first start's addresses by them, so that
    others still find the child. environment: None: this process's own.
    """

    name: str
    argv: tuple[str, ...]
    drain_s: float
    address_flags: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] | None = None


class RestartPolicy:
    """How long to wait before the next start after a crash: doubling, and at most `limit` crashes within
    CRASH_WINDOW_S."""

    def __init__(
        self, limit: int, clock: Callable[[], float] = time.monotonic, first_delay_s: float = FIRST_DELAY_S
    ) -> None:
        self._limit = limit
        self._first_delay_s = first_delay_s
        self._clock = clock
        self._crashes: deque[float] = deque()

    def crashed(self) -> float | None:
        """Seconds to wait, or None to give up."""
        now = self._clock()
        while self._crashes and now - self._crashes[0] > CRASH_WINDOW_S:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self._limit:
            return None
        return float(min(LONGEST_DELAY_S, self._first_delay_s * 2 ** (len(self._crashes) - 1)))


@dataclass(slots=True)
class Child:
    """One spec and its present process. `facts` is what that process announced, or the one before while it starts."""

    spec: Spec
    policy: RestartPolicy
    process: Process | None = None
    facts: Facts = field(default_factory=dict)
    is_ready: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    output: asyncio.Task[None] | None = None

    def argv(self) -> tuple[str, ...]:
        known = [(flag, str(self.facts[fact])) for fact, flag in self.spec.address_flags if self.facts.get(fact)]
        return (*self.spec.argv, *(part for pair in known for part in pair))


class Supervisor:
    """Owns its children and the tasks that watch them; all methods run in one loop."""

    def __init__(
        self, say: Say, forward: Forward, ready_s: float, restarts: int, first_delay_s: float = FIRST_DELAY_S
    ) -> None:
        self._say = say
        self._forward = forward
        self._ready_s = ready_s
        self._restarts = restarts
        self._first_delay_s = first_delay_s
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()
        self._spare: Spare | None = None
        # Names of children that had to be killed by `stop`.
        self.killed: list[str] = []

    async def start(self, spec: Spec) -> Facts:
        """Run a child and wait until it is ready; from then on it is kept alive."""
        child = Child(spec, RestartPolicy(self._restarts, first_delay_s=self._first_delay_s))
        self._children[spec.name] = child
        await self._launch(child)
        self._keepers[spec.name] = watched(
            self._keep(child), f"keep {spec.name}", lambda error: self._give_up(child, f"its keeper failed: {error}")
        )
        return child.facts

    async def failed(self) -> str:
        """Returns when a child is given up, with the reason: for ChildGaveUp."""
        return await asyncio.shield(self._failure)

    def pid(self, name: str) -> int | None:
        """The process id of a running child."""
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    def facts(self, name: str) -> Facts:
        """What the child's present process announced; empty while it starts."""
        child = self._children[name]
        return child.facts if child.is_ready else {}

    def last_facts(self, name: str) -> Facts:
        """What the child last announced, also after that process ended."""
        return self._children[name].facts

    async def stop(self, order: Iterable[Iterable[str]]) -> None:
        """Stop group after group: SIGTERM, the child's drain time, then SIGKILL. Names that never started are
        skipped."""
        for keeper in self._keepers.values():
            keeper.cancel()  # first, so that nothing is restarted behind our back
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        if self._spare is not None:
            await self._spare.close()
        for group in order:
            await asyncio.gather(*(self._stop(self._children[name]) for name in group if name in self._children))

    def hurry(self) -> None:
        """Do not wait for drains any more. Takes effect in a `stop` that is under way, too."""
        self._hurry.set()

    async def _launch(self, child: Child) -> None:
        """Start the child's process, or let the spare one be it, and wait until it is ready."""
        child.is_ready = False
        spawned = self._take_spare(child)
        if spawned is None:
            try:
                spawned = await spawn(child.argv(), environment=child.spec.environment)
            except OSError as error:
                raise StartFailed(f"{child.spec.name} could not be started: {error}") from error
        child.process = spawned.process
        child.output = watched(self._forward_output(child, spawned.output), f"output of {child.spec.name}")
        child.facts = await self._until_ready(child, spawned.process, spawned.ready)
        child.is_ready = True

    def _take_spare(self, child: Child) -> Spawned | None:
        return self._spare.take(child.argv()) if self._spare is not None else None

    async def keep_spare(self, argv: Sequence[str]) -> None:
        """From now on keep one process of this program. It becomes the next child that has to be started."""
        self._spare = Spare(argv)
        await self._prepare_spare()

    async def _prepare_spare(self) -> None:
        if self._spare is None:
            return
        try:
            await self._spare.prepare()
        except OSError as error:
            self._say(f"there is no spare process, so that a restart will take longer: {error}")

    async def _until_ready(self, child: Child, process: Process, descriptor: int) -> Facts:
        name = child.spec.name
        try:
            async with lines(descriptor) as stream:
                line = await asyncio.wait_for(stream.readline(), self._ready_s)
        except TimeoutError as error:
            await self._kill(child)
            raise StartFailed(
                self._explain(child, f"{name} was not ready within {self._ready_s:g} s (up.ready_s)")
            ) from error
        if line:
            return ready.parse(line)
        with contextlib.suppress(TimeoutError):  # it closed the descriptor and lives on: killed below
            await asyncio.wait_for(process.wait(), 1.0)
        await self._kill(child)
        raise StartFailed(self._explain(child, f"{name} ended before it was ready ({describe(process.returncode)})"))

    def _explain(self, child: Child, what: str) -> str:
        lines = "".join(f"\n  {line}" for line in child.tail)
        return f"{what}; its last output:{lines}" if lines else f"{what}, without any output"

    async def _forward_output(self, child: Child, descriptor: int) -> None:
        async with lines(descriptor) as stream:
            while True:
                try:
                    raw = await stream.readline()
                except ValueError:
                    raw = b"(a line of more than 1 MiB was dropped)\n"
                if not raw:
                    return
                line = raw.decode(errors="backslashreplace").rstrip("\n")
                child.tail.append(line)
                self._forward(child.spec.name, line)

    async def _keep(self, child: Child) -> None:
        """Restart the child whenever it ends, however it ended, until it ends too often or `stop` cancels this.

        A child that was asked to stop by somebody else ends well, and is missed all the same.
        """
        name = child.spec.name
        while child.process is not None:
            code = await child.process.wait()
            kill_group(child.process.pid)
            self._say(f"{name} ended by itself" if code == 0 else f"{name} crashed ({describe(code)})")
            if not await self._revive(child):
                return

    async def _revive(self, child: Child) -> bool:
        """Start a crashed child again, with as many tries as the policy allows; False when it crashed too often."""
        name = child.spec.name
        while (delay := child.policy.crashed()) is not None:
            await asyncio.sleep(delay)
            began = time.monotonic()
            try:
                await self._launch(child)
            except PdclusterError as error:
                self._say(f"{name} did not come back: {error}")
                continue
            self._say(f"{name} is back (ready in {time.monotonic() - began:.1f} s)")
            await self._prepare_spare()  # not sooner, so that the two do not share a core while the one is missed
            return True
        self._give_up(child, f"it ended more than {self._restarts} times within a minute (up.restarts)")
        return False

    def _give_up(self, child: Child, why: str) -> None:
        if not self._failure.done():
            self._failure.set_result(self._explain(child, f"{child.spec.name} is given up: {why}"))

    async def _stop(self, child: Child) -> None:
        process = child.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                process.terminate()
            if not await self._ends(process, child.spec.drain_s):
                if not self._hurry.is_set():
                    self._say(f"{child.spec.name} did not stop within {child.spec.drain_s:g} s and is killed")
                self.killed.append(child.spec.name)
        await self._kill(child)

    async def _ends(self, process: Process, seconds: float) -> bool:
        ended = asyncio.create_task(process.wait())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({ended, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        ended.cancel()
        return process.returncode is not None

    async def _kill(self, child: Child) -> None:
        """The child's process, whatever is left of its process group, and the end of its output."""
        if child.process is None:
            return
        kill_group(child.process.pid)
        try:
            await asyncio.wait_for(child.process.wait(), KILL_WAIT_S)
        except TimeoutError:
            self._say(
                f"{child.spec.name} (pid {child.process.pid}) is stuck in the kernel and did not die; look at it "
                "with ps"
            )
        if child.output is not None:
            await asyncio.wait({child.output}, timeout=KILL_WAIT_S)
            child.output.cancel()

"""Requests that wait at the gate, each with a callback. An asyncio adapter over `gate`, which decides.

One task runs only while requests wait. It offers room when a node reports, a request ends or a wait is over. It also
looks now and then, because a node that wants to be left alone does not report the end of that. It releases one request
at a time and lets it start, so the next one is scored against a view that counts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pdcluster.core import errors
from pdcluster.processes.tasks import watched
from pdcluster.telemetry.metrics import HoldMetrics
from pdcluster_router.policy.base import Decision
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.gate import Gate, Released
from pdcluster_router.queueing.pauses import Pause

logger = logging.getLogger(__name__)

# What the policy would do with one request, at a time, preferring other nodes than those of the second argument.
Decide = Callable[[float, frozenset[str]], Decision]

# Receives where a waiting request goes, or why it cannot go.
Answer = Callable[[Decision | errors.PdclusterError], None]


@dataclass(frozen=True, slots=True)
class GateWaiter:
    decide: Decide
    answer: Answer
    since: float
    is_batch: bool = False


class ClusterChanges(Protocol):
    """Reports that the cluster changed."""

    version: int

    async def wait_for_change(self, seen: int) -> None: ...


class WaitingRequests:
    """Waiting requests and their callbacks. Owned by the router's event loop.

    tick_s: longest pause between two looks.
    """

    def __init__(self, gate: Gate, metrics: HoldMetrics, clock: Callable[[], float], tick_s: float = 0.05) -> None:
        self.gate = gate
        self.pause = Pause()
        self._metrics = metrics
        self._clock = clock
        self._tick_s = tick_s
        self.waiters: dict[str, GateWaiter] = {}
        self._poked = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_held(self) -> int:
        return len(self.gate.queue)

    def held(self) -> list[QueuedRequest]:
        """The requests, in the order they came."""
        return self.gate.queue.waiting()

    def poke(self) -> None:
        """Room may have appeared for one of the `waiters`."""
        if self.waiters:
            self._poked.set()

    async def follow(self, nodes: ClusterChanges) -> None:
        """Call `poke` on every change of the cluster, until cancelled."""
        while True:
            await nodes.wait_for_change(nodes.version)
            self.poke()

    def note_refusal(self, error: errors.Overloaded, tenant: str) -> None:
        self._metrics.refused(error.reason, tenant)

    def hold(self, held: QueuedRequest, decision: Decision, decide: Decide, answer: Answer) -> None:
        """Hold a request. `answer` is called when it is its turn, unless it leaves before.

        decision: what `decide` just returned.
        """
        try:
            self.gate.hold(held, decision, held.arrived)
        except errors.Overloaded as error:
            self._metrics.refused(error.reason, held.tenant)
            raise
        self._wait(held, decide, answer)

    def park(self, held: QueuedRequest, cause: errors.Unavailable, decide: Decide, answer: Answer) -> None:
        """Hold a request that no node takes. Raises Unavailable when it may not be parked."""
        self.gate.park(held, cause, held.arrived)
        self._wait(held, decide, answer)

    def _wait(self, held: QueuedRequest, decide: Decide, answer: Answer) -> None:
        self.waiters[held.request] = GateWaiter(decide, answer, held.arrived, held.is_batch)
        self._count_held()
        self._keep_pumping()

    def pass_over(self, since: float, now: float) -> None:
        """A pause began then and is over. It counts for none of the requests that waited."""
        self.gate.pass_over(since, now)
        self.poke()

    def leave(self, request: str) -> None:
        """Its client left: free its place in the queue at once. Idempotent."""
        if request in self.waiters:
            self._gone(request, "left")
            self.poke()

    def _tell(self, request: str, outcome: str, answer: Decision | errors.PdclusterError) -> None:
        """Call `answer`, unless the request left. Bad news may make its siblings (other choices) leave, which may be
        next.
        """
        if request in self.waiters:
            self._gone(request, outcome).answer(answer)

    def _gone(self, request: str, outcome: str) -> GateWaiter:
        waiter = self.waiters.pop(request)
        now = self._clock()
        self.gate.leave(request, now)
        self._count_held()
        if not waiter.is_batch:
            self._metrics.wait_seconds.labels(outcome).observe(now - waiter.since)
        return waiter

    def _count_held(self) -> None:
        num_batch = self.gate.queue.num_batch
        self._metrics.held.set(self.num_held - num_batch)
        self._metrics.held_batch.set(num_batch)

    # ------------------------------------------------------------ the pump

    def _keep_pumping(self) -> None:
        self._poked.set()
        if self._pump is None or self._pump.done():
            self._pump = watched(self._run(), "hold queue")

    async def _run(self) -> None:
        try:
            while self.waiters:
                self._poked.clear()
                await self._release_all()
                if self.waiters:
                    await self._pause()
        except Exception as error:  # the top of this task: every waiting request must get a bug of ours as its answer
            logger.exception("the hold queue failed")
            self._pump = None  # a request that comes during these answers needs a new task
            for request in list(self.waiters):
                self._tell(request, "refused", errors.PdclusterError(f"internal error in the hold queue: {error}"))

    async def _release_all(self) -> None:
        if self.pause.is_on:
            return
        for late in self.gate.expire(self._clock()):
            self._tell_released(late)
        while self.num_held:
            now = self._clock()
            released = self.gate.release(partial(self._decide, now), now)
            if not released:
                return
            self._tell_released(released[0])
            await asyncio.sleep(0)  # it has started; let others run

    def _decide(self, now: float, held: QueuedRequest, others: frozenset[str]) -> Decision:
        return self.waiters[held.request].decide(now, others)

    def _tell_released(self, released: Released) -> None:
        request = released.held.request
        if released.error is None:
            assert released.decision is not None
            self._tell(request, "placed", released.decision)
            return
        if isinstance(released.error, errors.Overloaded) and request in self.waiters:
            self._metrics.refused(released.error.reason, released.held.tenant)
        self._tell(request, "refused", released.error)

    async def _pause(self) -> None:
        moment = None if self.pause.is_on else self.gate.queue.next_expiry()
        until_s = self._tick_s if moment is None else min(self._tick_s, max(moment - self._clock(), 0.0))
        try:
            async with asyncio.timeout(until_s):
                await self._poked.wait()
        except TimeoutError:
            return  # time to look again

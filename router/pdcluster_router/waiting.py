"""Requests that wait at the gate, as coroutines: a thin asyncio adapter over `gate`. Who goes when is decided there.

One task, alive only while requests wait, offers places whenever it is poked (a node reported, a request ended) and when a wait is over; and now and
then besides, because a node that asked to be left alone for a while does not say when the while is over. It releases one request at a time and lets
it start, so that the next one is scored against a view that counts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pdcluster import errors
from pdcluster.metrics import HoldMetrics
from pdcluster_router.chooser import Decision
from pdcluster_router.fairness import Held
from pdcluster_router.gate import Gate, Released

logger = logging.getLogger(__name__)

Decide = Callable[[float], Decision]
"""What the policy would do with one request, at a moment."""


class Nodes(Protocol):
    """What tells that something changed."""

    version: int

    async def wait_for_change(self, seen: int) -> None: ...


class Waiting:
    """Owned by the router's event loop. tick_s: longest pause between two looks at those that wait."""

    def __init__(self, gate: Gate, metrics: HoldMetrics, clock: Callable[[], float], tick_s: float = 0.05) -> None:
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._tick_s = tick_s
        self._deciders: dict[str, Decide] = {}
        self._places: dict[str, asyncio.Future[Decision]] = {}
        self._poked = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_held(self) -> int:
        return len(self._gate.queue)

    def poke(self) -> None:
        """Something may have freed."""
        if self._places:
            self._poked.set()

    async def follow(self, nodes: Nodes) -> None:
        """Poke whenever a node came, went or reported, until cancelled."""
        while True:
            await nodes.wait_for_change(nodes.version)
            self.poke()

    async def place(self, held: Held, decide: Decide) -> Decision:
        """Where the request goes, at once or when it is its turn. Raises Overloaded, Unavailable, BadRequest or DeadlineExceeded; cancelling it
        gives up the place in the queue at once."""
        now = self._clock()
        try:
            decision = self._gate.knock(held, lambda _: decide(now), now)
            if decision is not None:
                return decision
            return await self._wait(held, decide)
        except errors.Overloaded as error:
            self._metrics.refused(error.reason, held.tenant)
            raise

    async def _wait(self, held: Held, decide: Decide) -> Decision:
        started = self._clock()
        place: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._deciders[held.request], self._places[held.request] = decide, place
        self._metrics.held.set(self.num_held)
        outcome = "left"
        try:
            self._keep_pumping()
            decision = await place
            outcome = "placed"
            return decision
        except errors.PdclusterError:
            outcome = "refused"
            raise
        finally:
            del self._deciders[held.request], self._places[held.request]
            self._gate.leave(held.request, self._clock())
            if outcome == "left":
                self.poke()  # it may have been given a place that it does not use
            self._metrics.held.set(self.num_held)
            self._metrics.wait_seconds.labels(outcome).observe(self._clock() - started)

    # ------------------------------------------------------------ the pump

    def _keep_pumping(self) -> None:
        self._poked.set()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="hold queue")

    async def _run(self) -> None:
        try:
            while self._places:
                self._poked.clear()
                await self._release_all()
                if self._places:
                    await self._pause()
        except Exception as error:  # the top of this task: a bug of ours, which everyone who waits must hear of
            logger.exception("the hold queue failed")
            for place in self._places.values():
                if not place.done():
                    place.set_exception(errors.PdclusterError(f"internal error in the hold queue: {error}"))

    async def _release_all(self) -> None:
        for late in self._gate.expire(self._clock()):
            self._tell(late)
        while self.num_held:
            now = self._clock()
            released = self._gate.release(lambda held, now=now: self._deciders[held.request](now), now)  # type: ignore[misc]
            if not released:
                return
            self._tell(released[0])
            await asyncio.sleep(0)  # it starts now: its future's callbacks run before this task does

    def _tell(self, released: Released) -> None:
        place = self._places[released.held.request]
        if place.done():
            return  # it was cancelled, and its coroutine has not run yet
        if released.error is not None:
            place.set_exception(released.error)
        elif released.decision is not None:
            place.set_result(released.decision)

    async def _pause(self) -> None:
        moment = self._gate.queue.next_expiry()
        until_s = self._tick_s if moment is None else min(self._tick_s, max(moment - self._clock(), 0.0))
        try:
            async with asyncio.timeout(until_s):
                await self._poked.wait()
        except TimeoutError:
            return  # time to look again

"""Draining a node, for one router or several workers: cordon it, report what is left, and move that at the deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdcluster.core.errors import BadRequest, Cancelled, DeadlineExceeded
from pdcluster_router.admin.operations import DrainProgress, NodeStatus
from pdcluster_router.cluster.events import EventLog

# Time for a node to end what it still has after its requests moved.
MOVED_S = 10.0


class Cordoning(Protocol):
    async def node(self, name: str) -> NodeStatus: ...

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus: ...

    async def move(self, name: str) -> int: ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another look is worth it, at most so long."""
        ...


def _happened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class OpenDrain:
    """One node's drain, whoever asked for it and how often."""

    # Of each call that waits for it. The earliest one counts.
    deadlines: dict[int, float] = field(default_factory=dict)
    num_moved: int = 0
    # When the node must be empty, once its requests moved.
    empty_by: float | None = None
    # Set while nothing is being moved, so that every call counts what moved.
    is_counted: asyncio.Event = field(default_factory=_happened)


class Drains:
    """The drains of one router. Two calls for one node share a drain. An uncordon ends it."""

    def __init__(self, nodes: Cordoning, log: EventLog, clock: Callable[[], float]) -> None:
        self._nodes, self._log, self._clock = nodes, log, clock
        self._open: dict[str, OpenDrain] = {}
        self._num_calls = 0

    def end(self, incarnation: str) -> None:
        """The node was uncordoned here."""
        self._open.pop(incarnation, None)

    async def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]:
        """Drain a node, yielding its progress. What is left after deadline_s moves to other nodes.

        Raises DeadlineExceeded when the node is still at work MOVED_S later; it stays cordoned. Raises Cancelled when
        it takes work again.
        """
        if not 0.0 <= deadline_s < math.inf:
            raise BadRequest(f"deadline_s is {deadline_s:g}; it must be a number of seconds, 0 or more", "deadline_s")
        found = await self._nodes.cordon(name, cordoned=True)
        shared = self._open.setdefault(found.incarnation, OpenDrain())
        self._num_calls += 1
        number = self._num_calls
        shared.deadlines[number] = self._clock() + deadline_s
        self._log.add("drain", found.name, f"within {deadline_s:g} s")
        try:
            async for progress in self._watch(found, shared):
                yield progress
        finally:
            del shared.deadlines[number]
            if not shared.deadlines and self._open.get(found.incarnation) is shared:
                del self._open[found.incarnation]

    async def _watch(self, found: NodeStatus, shared: OpenDrain) -> AsyncIterator[DrainProgress]:
        told: DrainProgress | None = None
        while True:
            node = await self._nodes.node(found.incarnation)
            if not shared.is_counted.is_set():
                await shared.is_counted.wait()
                continue
            is_late = min(shared.deadlines.values()) <= self._clock()
            # Until the node's first report after the cordon, another worker may not know of it.
            is_taken_back = node.state == "ready" and (told is not None or is_late)
            if is_taken_back or self._open.get(found.incarnation) is not shared:
                raise Cancelled(f"node {found.name} takes work again, so its drain ended; drain it again to empty it")
            progress = progress_of(node, shared.num_moved)
            if progress is not None and progress != told:
                told = progress
                yield progress
            if progress is not None and progress.is_done:
                self._log.add("drained", found.name, "nothing runs there; it may be stopped")
                return
            if not is_late:
                await self._nodes.wait_for_change(min(shared.deadlines.values()) - self._clock())
            else:
                await self._move(found, shared)

    async def _move(self, found: NodeStatus, shared: OpenDrain) -> None:
        """The deadline passed: once, the node gives away what it still has."""
        if shared.empty_by is None:
            shared.empty_by = self._clock() + MOVED_S
            shared.is_counted.clear()
            try:
                shared.num_moved = await self._nodes.move(found.incarnation)
            finally:
                shared.is_counted.set()
            self._log.add("moved", found.name, f"{shared.num_moved} requests go on elsewhere")
        elif self._clock() < shared.empty_by:
            await self._nodes.wait_for_change(shared.empty_by - self._clock())
        else:
            raise DeadlineExceeded(
                f"node {found.name} is still at work {MOVED_S:g} s after its requests moved; it stays cordoned; see "
                "its log, or stop it",
                "request",
            )


def progress_of(node: NodeStatus, num_moved: int) -> DrainProgress | None:
    """What is left on a node; None while it has not reported since it was cordoned."""
    load = node.load
    if load is None or not load.draining:
        return None
    is_done = not (load.waiting or load.running or load.pages_parked or load.slots_used or node.in_flight)
    return DrainProgress(load.waiting, load.running, load.pages_parked, is_done, num_moved)

"""Draining a node, for one router or several workers: cordon it, report what is left, and move that at the deadline."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from pdcluster.core.errors import BadRequest, DeadlineExceeded
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


async def drain(
    nodes: Cordoning, name: str, deadline_s: float, log: EventLog, clock: Callable[[], float]
) -> AsyncIterator[DrainProgress]:
    """Drain a node, yielding its progress. What is left after deadline_s moves to other nodes. Raises DeadlineExceeded
    when the node is still at work MOVED_S later; it stays cordoned.
    """
    if not 0.0 <= deadline_s < math.inf:
        raise BadRequest(f"deadline_s is {deadline_s:g}; it must be a number of seconds, 0 or more", "deadline_s")
    deadline, num_moved = clock() + deadline_s, 0
    has_moved = False
    found = await nodes.cordon(name, cordoned=True)
    log.add("drain", found.name, f"within {deadline_s:g} s")
    told: DrainProgress | None = None
    while True:
        progress = progress_of(await nodes.node(found.incarnation), num_moved)
        if progress is not None and progress != told:
            told = progress
            yield progress
        if progress is not None and progress.is_done:
            log.add("drained", found.name, "nothing runs there; it may be stopped")
            return
        left = deadline - clock()
        if left > 0:
            await nodes.wait_for_change(left)
        elif has_moved:
            raise DeadlineExceeded(
                f"node {found.name} is still at work {MOVED_S:g} s after its requests moved; it stays cordoned; see "
                "its log, or stop it",
                "request",
            )
        else:
            num_moved, has_moved, deadline = await nodes.move(found.incarnation), True, clock() + MOVED_S
            log.add("moved", found.name, f"{num_moved} requests go on elsewhere")


def progress_of(node: NodeStatus, num_moved: int) -> DrainProgress | None:
    """What is left on a node; None while it has not reported since it was cordoned."""
    load = node.load
    if load is None or not load.draining:
        return None
    is_done = not (load.waiting or load.running or load.pages_parked or load.slots_used or node.in_flight)
    return DrainProgress(load.waiting, load.running, load.pages_parked, is_done, num_moved)

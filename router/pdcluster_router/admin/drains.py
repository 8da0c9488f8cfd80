"""Draining a node, for one router or several workers: cordon it, then report what is left until nothing is."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from pdcluster.core.errors import BadRequest, DeadlineExceeded
from pdcluster_router.admin.operations import DrainProgress, NodeStatus
from pdcluster_router.cluster.events import EventLog


class Cordoning(Protocol):
    async def node(self, name: str) -> NodeStatus: ...

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus: ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another look is worth it, at most so long."""
        ...


async def drain(
    nodes: Cordoning, name: str, deadline_s: float, log: EventLog, clock: Callable[[], float]
) -> AsyncIterator[DrainProgress]:
    """Drain a node, yielding its progress. Raises DeadlineExceeded when work is left after deadline_s; the node stays
    cordoned.
    """
    if not 0.0 <= deadline_s < math.inf:
        raise BadRequest(f"deadline_s is {deadline_s:g}; it must be a number of seconds, 0 or more", "deadline_s")
    deadline = clock() + deadline_s
    found = await nodes.cordon(name, cordoned=True)
    log.add("drain", found.name, f"within {deadline_s:g} s")
    told: DrainProgress | None = None
    while True:
        progress = progress_of(await nodes.node(found.incarnation))
        if progress is not None and progress != told:
            told = progress
            yield progress
        if progress is not None and progress.is_done:
            log.add("drained", found.name, "nothing runs there; it may be stopped")
            return
        left = deadline - clock()
        if left <= 0:
            way_out = "it stays cordoned; drain it again, or cancel its requests"
            raise DeadlineExceeded(f"node {found.name} is still at work at the deadline; {way_out}", "request")
        await nodes.wait_for_change(left)


def progress_of(node: NodeStatus) -> DrainProgress | None:
    """What is left on a node; None while it has not reported since it was cordoned."""
    load = node.load
    if load is None or not load.draining:
        return None
    is_done = not (load.waiting or load.running or load.pages_parked or load.slots_used or node.in_flight)
    return DrainProgress(load.waiting, load.running, load.pages_parked, is_done)

"""Sleep and waking of a whole cluster, as trainers want them: a pause around nodes without weights."""

from __future__ import annotations

from pdcluster.core.errors import PdclusterError
from pdcluster_router.admin.operations import Operations
from pdcluster_router.queueing.pauses import PauseMode


async def put_to_sleep(operations: Operations, mode: PauseMode, max_pause_s: float, finish_s: float = 0.0) -> list[str]:
    """Pause all requests, then have all nodes give their memory back. Returns the nodes that fell asleep.

    finish_s: for what runs for other routers. Where no node sleeps in the end, the pause is taken back.
    """
    was_paused = await operations.is_paused()
    await operations.pause(mode, max_pause_s)
    try:
        return await operations.sleep(finish_s)
    except PdclusterError:
        if not was_paused and not await is_sleeping(operations):
            await operations.resume()
        raise


async def wake(operations: Operations) -> list[str]:
    """Have all nodes that sleep serve the weights that they had, then end the pause. Returns which nodes."""
    names = await operations.wake()
    await operations.resume()
    return names


async def is_sleeping(operations: Operations) -> bool:
    """Whether any node sleeps."""
    return any(node.state == "sleeping" for node in await operations.nodes())

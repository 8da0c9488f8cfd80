"""Sleep and waking of a whole cluster, as trainers want them: a pause around nodes without weights."""

from __future__ import annotations

from pdcluster_router.admin.operations import Operations
from pdcluster_router.admin.rollouts import check_sleep
from pdcluster_router.queueing.pauses import PauseMode


async def put_to_sleep(operations: Operations, mode: PauseMode, max_pause_s: float, finish_s: float = 0.0) -> list[str]:
    """Pause all requests, then have all nodes give their memory back. Returns the nodes that fell asleep.

    finish_s: for what runs for other routers. Where no node sleeps in the end, the pause is taken back, also for a
    caller that goes. Raises BadRequest before anything is touched.
    """
    check_sleep(await operations.nodes())
    was_paused = await operations.is_paused()
    try:
        await operations.pause(mode, max_pause_s)
        return await operations.sleep(finish_s)
    except BaseException:
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

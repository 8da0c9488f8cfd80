"""Tasks that run in the background and that nobody awaits. Their failures are logged, and something follows from them.

`watched` tells its owner, who may stop the process. `restarted` begins anew. A task whose result its starter awaits
needs neither; `tests/repo` lists those.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

log = logging.getLogger(__name__)

Work = Coroutine[None, None, None]
# Hears of a failure, after it was logged.
OnFailure = Callable[[BaseException], object]

# Before a task that failed begins anew.
PAUSE_S = 0.5

# The loop itself keeps tasks only weakly.
_running: set[asyncio.Task[None]] = set()


def watched(work: Work, name: str, on_failure: OnFailure | None = None) -> asyncio.Task[None]:
    """A task whose failure is logged."""
    task = asyncio.create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(partial(_ended, on_failure=on_failure))
    return task


def _ended(task: asyncio.Task[None], on_failure: OnFailure | None) -> None:
    _running.discard(task)
    if task.cancelled() or (error := task.exception()) is None:
        return
    log.error("a task failed: %s", task.get_name(), exc_info=error)
    if on_failure is not None:
        on_failure(error)


async def restarted(make: Callable[[], Work], name: str, pause_s: float = PAUSE_S) -> None:
    """Run what `make` returns. It begins anew after a failure, and ends when it ends."""
    while True:
        try:
            await make()
            return
        except Exception:
            log.exception("a task failed and begins anew in %g s: %s", pause_s, name)
        await asyncio.sleep(pause_s)


@asynccontextmanager
async def running(make: Callable[[], Work], name: str, pause_s: float = PAUSE_S) -> AsyncIterator[None]:
    """Keep what `make` returns running while the block runs."""
    async with beside(restarted(make, name, pause_s), name):
        yield


@asynccontextmanager
async def beside(work: Work, name: str, on_failure: OnFailure | None = None) -> AsyncIterator[None]:
    """Run `work` while the block runs."""
    task = watched(work, name, on_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})

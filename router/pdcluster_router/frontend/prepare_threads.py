"""Threads in which long requests are prepared, so that streams go on. Tenants take turns.

A thread cannot be ended: who left keeps its thread until the work is done, which is bounded (`template_bounds.py`). So
one thread is always left for other tenants.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

# More would wait for the GIL, and the event loop with them.
LEAST_THREADS, MOST_THREADS = 4, 8


class PrepareThreads:
    """Belongs to one event loop. What waits is bounded by the places of requests."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, "prepare")
        self._queues: OrderedDict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run work in a thread. Cancelled before its turn it does not begin; later its result is dropped."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting: tuple[asyncio.Future[Any], Callable[[], Any]] = (result, work)
        self._queues.setdefault(tenant, deque()).append(waiting)
        self._start()
        try:
            return await result
        except asyncio.CancelledError:
            self._forget(tenant, waiting)
            raise

    def _forget(self, tenant: str, waiting: tuple[asyncio.Future[Any], Callable[[], Any]]) -> None:
        """Its place is given back, so nothing else bounds what it holds."""
        queue = self._queues.get(tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._queues[tenant]

    def _start(self) -> None:
        while self._running.total() < self._num_threads and (tenant := self._next()) is not None:
            queue = self._queues[tenant]
            result, work = queue.popleft()
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            if result.cancelled():
                continue
            self._running[tenant] += 1
            working = asyncio.get_running_loop().run_in_executor(self._executor, work)
            working.add_done_callback(partial(self._done, tenant, result))

    def _next(self) -> str | None:
        return next((tenant for tenant in self._queues if self._running[tenant] < self._num_threads - 1), None)

    def _done(self, tenant: str, result: asyncio.Future[Any], working: asyncio.Future[Any]) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        error = None if working.cancelled() else working.exception()
        if not result.done():
            if working.cancelled():
                result.cancel()
            elif error is not None:
                result.set_exception(error)
            else:
                result.set_result(working.result())
        self._start()


_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, PrepareThreads] = WeakKeyDictionary()


def prepare_threads() -> PrepareThreads:
    """Those of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _OF_LOOPS.get(loop)
    if found is None:
        num_threads = min(max(os.cpu_count() or 1, LEAST_THREADS), MOST_THREADS)
        found = _OF_LOOPS[loop] = PrepareThreads(num_threads)
    return found

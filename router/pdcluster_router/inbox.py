"""A queue for one reader whose waits have deadlines that keep moving: one timer per inbox, set anew only when it went off too early."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Belongs to one loop; one task reads. Not bounded: whoever opens it knows how much can come."""

    __slots__ = ("_deadline", "_items", "_timer", "_waiter")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    async def get(self, seconds: float) -> T | None:
        """The next item, or None when none comes within `seconds`."""
        if not self._items:
            await self._wait(seconds)
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Stop the timer; what is still in it is dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + max(seconds, 0.0)
        if self._timer is None or self._timer.when() > self._deadline:
            self._arm(loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._deadline, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() < self._deadline:
            self._arm(loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

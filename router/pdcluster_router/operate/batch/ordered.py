"""Answers in the order of their lines, with a bounded number that waits for an earlier one. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdcluster_router.operate.batch.answers import LineAnswer, LineFailure


class OrderedAnswers:
    """Passes answers on in the order of their turns.

    most: turns that may begin beyond the one that is waited for.
    """

    def __init__(self, write: Callable[[LineAnswer | LineFailure], None], most: int) -> None:
        self._write, self._most = write, most
        self._waiting: dict[int, LineAnswer | LineFailure] = {}
        self._next = self._num_begun = 0
        self._moved = asyncio.Condition()

    async def begin(self) -> int:
        """The turn of the next line, once not too many wait."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._num_begun - self._next < self._most)
            self._num_begun += 1
            return self._num_begun - 1

    async def put(self, turn: int, answer: LineAnswer | LineFailure) -> None:
        async with self._moved:
            self._waiting[turn] = answer
            while self._next in self._waiting:
                self._write(self._waiting.pop(self._next))
                self._next += 1
            self._moved.notify_all()

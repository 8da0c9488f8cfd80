"""An asyncio loop whose clock jumps: nothing ever waits, the next timer is simply due. So ten minutes of timeouts take
milliseconds, and a run with the same seed is the same run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

Result = TypeVar("Result")

MAX_IDLE_TURNS = 200_000


class Stuck(AssertionError):
    """Nothing will ever happen again, or things happen for ever without time passing."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting for descriptors, moves the clock on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no timer is set and nobody is ready")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > MAX_IDLE_TURNS:
            raise Stuck(f"{MAX_IDLE_TURNS} turns of the loop at {self.now}")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`readers`: callbacks of simulated descriptors; whoever simulates them calls `notify`."""

    def __init__(self) -> None:
        self._jump = _Jump()
        self.readers: dict[int, Callable[[], None]] = {}
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def add_reader(self, fd: int, callback: Callable[[], None], *args: object) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> bool:
        return self.readers.pop(fd, None) is not None

    def notify(self, fd: int) -> None:
        callback = self.readers.get(fd)
        if callback is not None:
            self.call_soon(callback)


def run_virtually(main: Callable[[VirtualLoop], Coroutine[object, object, Result]]) -> Result:
    """`main` to its end in a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

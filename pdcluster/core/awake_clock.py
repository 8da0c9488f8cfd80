"""A clock that counts only time in which its owner looked at it often.

Leases are judged by it. Who was stopped, or computed for long, could not hear anybody meanwhile. What others sent waits
unread, or they were stopped too. So that time says nothing about them.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Owned by one thread, which reads it at least every `most_s` seconds while it is awake.

    most_s: the most that the clock moves from one reading to the next.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._read_at = clock()
        self._lost_s = 0.0

    def __call__(self) -> float:
        """Seconds. They start as those of the clock behind it."""
        now = self._clock()
        passed_s = now - self._read_at
        if passed_s > self._most_s:
            self._lost_s += passed_s - self._most_s
        self._read_at = now
        return now - self._lost_s

"""Timers of many requests on one timer of the loop.

Most deadlines are never reached, so setting and dropping one must be cheap. Times are rounded up to a tick, and to a
coarser tick beyond a second. A timer is a reason to look, not a proof that time is over: whoever moved its deadline
sets another.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pdcluster.core.errors import IntegrityError

TICK_S = 0.005
# Ticks of one coarse tick, for times FAR_S away or more.
COARSE_TICKS = 32
FAR_S = 1.0

Ring = Callable[[], None]


class Timers:
    """Owned by one event loop, found when the first timer is set.

    tick_s: how late a near timer may fire.
    """

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._loop: asyncio.AbstractEventLoop | None = None
        # By tick. Dicts, so that timers of one tick fire in the order in which they were set.
        self._rings: dict[int, dict[Ring, None]] = {}
        # A heap of these ticks, also of those whose timers were all dropped.
        self._ticks: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._rings.values()))

    def set(self, seconds: float, ring: Ring) -> int:
        """Call `ring` after so many seconds. Returns what `drop` needs."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # found once: finding it is a system call
        tick = int((self._loop.time() + seconds) / self._tick_s) + 1
        if seconds >= FAR_S:
            tick += -tick % COARSE_TICKS
        rings = self._rings.get(tick)
        if rings is None:
            rings = self._rings[tick] = {}
            heapq.heappush(self._ticks, tick)
            if self._ticks[0] == tick:
                self._arm()
        rings[ring] = None
        return tick

    def drop(self, tick: int, ring: Ring) -> None:
        """Idempotent. The tick's entry stays until its time, so that the loop's timer need not move."""
        rings = self._rings.get(tick)
        if rings is not None:
            rings.pop(ring, None)

    def close(self) -> None:
        """No timer fires any more."""
        self._rings.clear()
        self._ticks.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ticks:
            assert self._loop is not None  # a timer was set
            self._timer = self._loop.call_at(self._ticks[0] * self._tick_s, self._look, self._loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time() + 1e-9
        while self._ticks and self._ticks[0] * self._tick_s <= now:
            for ring in self._rings.pop(heapq.heappop(self._ticks)):
                loop.call_soon(ring)  # so that an error of one does not stop the others
        if self._timer is None:
            self._arm()

    def check_integrity(self) -> None:
        """Raises IntegrityError when a tick would never be looked at."""
        if sorted(self._ticks) != sorted(self._rings) or bool(self._ticks) != (self._timer is not None):
            raise IntegrityError(
                f"alarms wait at {sorted(self._rings)}, {sorted(self._ticks)} are looked at; timer {self._timer}"
            )


# Timer buckets: timers that many requests share, so that joining and leaving are dict operations.
#
# They fit callers that only want a look before so many seconds are over. A bucket may fire a little early.

# How long a bucket takes members. As exact as timers that far away.
OPEN_S = COARSE_TICKS * TICK_S


class Member(Protocol):
    def ring(self) -> None: ...


# Members in the order they joined. A member that leaves removes itself.
Round = dict[Member, None]


class TimerBuckets:
    """Owned by one event loop.

    seconds: from a bucket's start until it fires.
    """

    def __init__(self, timers: Timers, seconds: float) -> None:
        self.seconds = seconds
        self._timers = timers
        self._open_s = min(OPEN_S, seconds / 4)
        self._round: Round = {}
        self._until = -math.inf

    def join(self, member: Member, now: float) -> Round:
        """Join the bucket that fires before `seconds` are over, as exactly as any timer.

        now: on the members' clock.
        """
        if now >= self._until:
            self._round, self._until = {}, now + self._open_s
            self._timers.set(self.seconds - self._open_s, partial(self._ring, self._round))
        self._round[member] = None
        return self._round

    def _ring(self, members: Round) -> None:
        if members is self._round:
            self._until = -math.inf  # the next member needs a new bucket
        try:
            while members:
                member = next(iter(members))
                del members[member]
                member.ring()
        finally:
            if members:  # an error of one member must not stop the others
                self._timers.set(0.0, partial(self._ring, members))


class Timed:
    """One timer of its own, in a bucket where that is early enough. Implements Member, but for `ring`."""

    _tick: int | None = None
    _bucket: Round | None = None
    # When it rings.
    timer_due = math.inf

    def ring(self) -> None:
        raise NotImplementedError

    def set_timer(self, due: float, now: float, timers: Timers, buckets: TimerBuckets) -> None:
        """Ring at `due`, or a little earlier where the buckets do."""
        if self.timer_due != math.inf:
            self.drop_timer(timers)
        seconds = due - now
        if seconds >= buckets.seconds:
            self.timer_due, self._bucket = now + buckets.seconds, buckets.join(self, now)
        else:
            self.timer_due, self._tick = due, timers.set(max(seconds, 0.0), self.ring)

    def drop_timer(self, timers: Timers) -> None:
        """Idempotent."""
        if self._bucket is not None:
            self._bucket.pop(self, None)
        elif self._tick is not None:
            timers.drop(self._tick, self.ring)
        self._bucket = self._tick = None
        self.timer_due = math.inf

"""Moments at which something is to be looked at again, for many at a time: one timer of the loop for all of them.

Nearly every deadline of a request is never reached, so what counts is that setting and dropping one costs next to
nothing. Moments are rounded up to a tick, those that are more than a second away to a coarser one. An alarm is a reason
to look, not a proof that time is over: whoever moved its deadline meanwhile sets another one.
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
# So many make a tick of moments that are FAR_S away or more.
COARSE_TICKS = 32
FAR_S = 1.0

Ring = Callable[[], None]


class Timers:
    """Owned by one event loop, which it finds when an alarm is set. tick_s: how late a near one may ring."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._loop: asyncio.AbstractEventLoop | None = None
        # By tick. Dicts, so that those of one tick ring in the order in which they were set.
        self._rings: dict[int, dict[Ring, None]] = {}
        # A heap of the ticks above, those included whose alarms were all dropped.
        self._ticks: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._rings.values()))

    def set(self, seconds: float, ring: Ring) -> int:
        """Ring after so many seconds; the answer is what `drop` needs."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # found once: to find it costs a system call
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
        """Idempotent; the tick's entry goes when its time comes, so that the loop's timer need not be moved."""
        rings = self._rings.get(tick)
        if rings is not None:
            rings.pop(ring, None)

    def close(self) -> None:
        """Nothing rings any more."""
        self._rings.clear()
        self._ticks.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ticks:
            assert self._loop is not None  # an alarm was set
            self._timer = self._loop.call_at(self._ticks[0] * self._tick_s, self._look, self._loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time() + 1e-9
        while self._ticks and self._ticks[0] * self._tick_s <= now:
            for ring in self._rings.pop(heapq.heappop(self._ticks)):
                loop.call_soon(ring)  # so that what one of them raises does not cost the others theirs
        if self._timer is None:
            self._arm()

    def check_integrity(self) -> None:
        """Raises IntegrityError when some tick would never be looked at."""
        if sorted(self._ticks) != sorted(self._rings) or bool(self._ticks) != (self._timer is not None):
            raise IntegrityError(
                f"alarms wait at {sorted(self._rings)}, {sorted(self._ticks)} are looked at; timer {self._timer}"
            )


# Alarms that many requests share: who joins within a while waits for the same one, so that to join and to leave are a
# dict's.
#
# For those that only want to be looked at before so many seconds are over: a round may ring for them a little sooner.

# For so long a round takes in more: as exact as alarms are that are so far away.
OPEN_S = COARSE_TICKS * TICK_S


class Member(Protocol):
    def ring(self) -> None: ...


# In the order in which they came. Whoever leaves takes itself out.
Round = dict[Member, None]


class TimerBuckets:
    """Owned by one event loop. seconds: until a round rings, from its start on."""

    def __init__(self, timers: Timers, seconds: float) -> None:
        self.seconds = seconds
        self._timers = timers
        self._open_s = min(OPEN_S, seconds / 4)
        self._round: Round = {}
        self._until = -math.inf

    def join(self, member: Member, now: float) -> Round:
        """The round that rings for the member before `seconds` are over, as exactly as any alarm; now: a moment of the
        members' clock."""
        if now >= self._until:
            self._round, self._until = {}, now + self._open_s
            self._timers.set(self.seconds - self._open_s, partial(self._ring, self._round))
        self._round[member] = None
        return self._round

    def _ring(self, members: Round) -> None:
        if members is self._round:
            self._until = -math.inf  # who joins now needs another one
        try:
            while members:
                member = next(iter(members))
                del members[member]
                member.ring()
        finally:
            if members:  # what one of them raises does not cost the others theirs
                self._timers.set(0.0, partial(self._ring, members))

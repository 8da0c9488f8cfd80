"""Alarms that many requests share: who joins within a while waits for the same one, so that to join and to leave are a dict's.

For those that only want to be looked at before so many seconds are over: a round may ring for them a little sooner.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

from pdcluster_router.request.timers import COARSE_TICKS, TICK_S, Alarms

OPEN_S = COARSE_TICKS * TICK_S
"""For so long a round takes in more: as exact as alarms are that are so far away."""


class Member(Protocol):
    def ring(self) -> None: ...


Round = dict[Member, None]
"""In the order in which they came. Whoever leaves takes itself out."""


class Rounds:
    """Owned by one event loop. seconds: until a round rings, from its start on."""

    def __init__(self, alarms: Alarms, seconds: float) -> None:
        self.seconds = seconds
        self._alarms = alarms
        self._open_s = min(OPEN_S, seconds / 4)
        self._round: Round = {}
        self._until = -math.inf

    def join(self, member: Member, now: float) -> Round:
        """The round that rings for the member before `seconds` are over, as exactly as any alarm; now: a moment of the members' clock."""
        if now >= self._until:
            self._round, self._until = {}, now + self._open_s
            self._alarms.set(self.seconds - self._open_s, partial(self._ring, self._round))
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
                self._alarms.set(0.0, partial(self._ring, members))

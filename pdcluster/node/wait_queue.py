"""The wait queue of a full decode node: it keeps large prompts from starving, while small ones pass for a while.

A refused request holds a position, no memory. It asks again. Until it gets its slot, at most `max_overtakes` later
ones may pass it. It loses its position when it ends, when its router is lost, and when it does not ask within
`late_s` after it was told to. Pure; the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from pdcluster.transfer.backends.base import Peer


@dataclass(slots=True)
class _Place:
    router: Peer
    until: float
    overtaken: int = 0


class WaitQueue:
    """Positions, oldest first. Bounded: beyond `capacity` requests get none, and may be overtaken for ever."""

    def __init__(self, *, max_overtakes: int = 8, late_s: float = 2.0, capacity: int = 1024) -> None:
        self._max_overtakes = max_overtakes
        self._late_s = late_s
        self._capacity = capacity
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def may_try(self, request: str, now: float) -> bool:
        """Whether the request may take room now. False while one before it was overtaken often enough."""
        for waiting, place in list(self._places.items()):
            if now > place.until:
                del self._places[waiting]
            elif waiting == request:
                return True
            elif place.overtaken >= self._max_overtakes:
                return False
        return True

    def refused(self, request: str, router: Peer, now: float, retry_after_s: float) -> None:
        """The request got no room, and was told when to ask again. It takes or keeps its position."""
        until, place = now + retry_after_s + self._late_s, self._places.get(request)
        if place is not None:
            place.until = until
        elif len(self._places) < self._capacity:
            self._places[request] = _Place(router, until)

    def leave(self, request: str) -> None:
        """It asks no more. Idempotent."""
        self._places.pop(request, None)

    def leave_router(self, router: Peer, awaited: Set[str] = frozenset()) -> None:
        """Requests of a router ask no more, but for those that it still awaits here."""
        for request in [each for each, place in self._places.items() if place.router == router]:
            if request not in awaited:
                del self._places[request]

    def served(self, request: str) -> None:
        """The request got its slot, and so overtook all before it."""
        for waiting, place in self._places.items():
            if waiting == request:
                break
            place.overtaken += 1
        self._places.pop(request, None)

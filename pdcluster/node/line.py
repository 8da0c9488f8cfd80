"""Who asked for a slot first: keeps large prompts from starving at a full decode node, while small ones still slip through for a while.

A refused request holds no memory here, only a place: it asks again, and until it gets its slot no more than `max_overtakes` later ones may pass
it. A place is given up by not asking for `patience_s`. Pure; the caller brings the clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Place:
    asked_at: float
    overtaken: int = 0


class Line:
    """Oldest place first. Bounded: more requests than `capacity` get no place, and may be overtaken for ever."""

    def __init__(self, *, max_overtakes: int = 8, patience_s: float = 2.0, capacity: int = 1024) -> None:
        self._max_overtakes = max_overtakes
        self._patience_s = patience_s
        self._capacity = capacity
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def may_try(self, request: str, now: float) -> bool:
        """Whether the request may take room now; False while somebody before it was overtaken often enough."""
        for waiting, place in list(self._places.items()):
            if now - place.asked_at > self._patience_s:
                del self._places[waiting]
            elif waiting == request:
                return True
            elif place.overtaken >= self._max_overtakes:
                return False
        return True

    def refused(self, request: str, now: float) -> None:
        """It got no room: it takes or keeps its place."""
        place = self._places.get(request)
        if place is not None:
            place.asked_at = now
        elif len(self._places) < self._capacity:
            self._places[request] = _Place(now)

    def served(self, request: str) -> None:
        """It got its slot, and so overtook all who were before it."""
        for waiting, place in self._places.items():
            if waiting == request:
                break
            place.overtaken += 1
        self._places.pop(request, None)

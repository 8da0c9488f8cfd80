"""Finished KV that waits in a prefill node's own pool until a decode node takes it: how much there is, and when that is too much.

Up to a limit the node goes on computing while decode nodes are full; beyond it new remote prefills are refused by message, so that the router holds
them or sends them elsewhere. The limit leaves pages for whatever else runs here, above all the slots without which two mixed nodes that are full
of finished KV for each other would wait for ever. A pool in host memory needs no second place to park in; one in device memory could move
parked pages to the host, which is not built: there the limit is the same share of the device's pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

SHORTEST_S = 0.02
LONGEST_S = 1.0
WEIGHT = 0.3


class Parking:
    """Pages shared by several parked requests count once. Owned by the node loop's thread; the pages belong to the scheduler's sequences."""

    def __init__(self, limit_pages: int, clock: Callable[[], float]) -> None:
        self.limit_pages = limit_pages
        self._clock = clock
        self._parked: dict[str, tuple[int, ...]] = {}
        self._holders: Counter[int] = Counter()
        self._moved_at = clock()
        """When KV was last taken, or came into an empty parking."""
        self._gap_s = 0.0

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_requests(self) -> int:
        return len(self._parked)

    @property
    def is_full(self) -> bool:
        return len(self._holders) >= self.limit_pages

    def enter(self, key: str, pages: Sequence[int]) -> None:
        if not self._parked:
            self._moved_at = self._clock()
        self._parked[key] = tuple(pages)
        self._holders.update(pages)

    def leave(self, key: str) -> None:
        """Taken or given up; nothing happens when it does not park here."""
        pages = self._parked.pop(key, None)
        if pages is None:
            return
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
        now = self._clock()
        self._gap_s += WEIGHT * (now - self._moved_at - self._gap_s)
        self._moved_at = now

    def retry_after_s(self) -> float:
        """When to ask again: at the pace at which KV was taken lately, and less often the longer none was."""
        return min(max(self._gap_s, self._clock() - self._moved_at, SHORTEST_S), LONGEST_S)

"""Parked KV: finished KV that waits in the node's own pool for a decode node.

Up to a limit the node computes on while decode nodes are full. Beyond it new remote prefills are refused by message,
so that the router holds them or sends them elsewhere. The limit leaves pages for other work, above all slots: without
them two mixed nodes full of finished KV for each other would wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from pdcluster.core import errors

SHORTEST_S = 0.02
LONGEST_S = 1.0
GAP_WEIGHT = 0.3


class ParkedKV:
    """Pages that several parked requests share count once. Owned by the node loop's thread; the pages belong to
    sequences.
    """

    def __init__(self, limit_pages: int, clock: Callable[[], float], deadline_s: float) -> None:
        """deadline_s: how long a request's KV may wait for a decode node."""
        self.limit_pages = limit_pages
        self.deadline_s = deadline_s
        self._clock = clock
        self._parked: dict[str, tuple[int, ...]] = {}
        self._holders: Counter[int] = Counter()
        # When KV was last taken, or came into an empty parking.
        self._moved_at = clock()
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

    def enter(self, key: str, pages: Collection[int]) -> None:
        if not self._parked:
            self._moved_at = self._clock()
        self._parked[key] = tuple(pages)
        self._holders.update(pages)

    def leave(self, key: str) -> None:
        """The KV was taken or given up. Nothing happens when it is not parked here."""
        pages = self._parked.pop(key, None)
        if pages is None:
            return
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
        now = self._clock()
        self._gap_s += GAP_WEIGHT * (now - self._moved_at - self._gap_s)
        self._moved_at = now

    def retry_after_s(self) -> float:
        """When to ask again: at the recent rate of KV being taken, and later the longer none was."""
        return min(max(self._gap_s, self._clock() - self._moved_at, SHORTEST_S), LONGEST_S)

    def check_room(self) -> None:
        """Raises Overloaded when it is full."""
        if self.is_full:
            raise errors.Overloaded(
                f"finished KV of {self.num_requests} requests waits here in {self.num_pages} pages, "
                f"{self.limit_pages} may; decode nodes are full, retry later",
                self.retry_after_s(),
            )

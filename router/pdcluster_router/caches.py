"""What nodes say of their caches, put in order: numbered deltas into the prefix index, gaps noticed, snapshots asked for.

A node's first word is a snapshot; deltas follow, numbered. A number that is missing means that something was lost: what is known of the node stays,
as the best guess there is, until the snapshot comes that is asked for at once, and again while none comes. Owned by the router's event loop; it
sends nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.messages import CacheDelta
from pdcluster_router.index import PrefixIndex

ASK_AGAIN_S = 1.0
"""A snapshot that was asked for may take so long."""


@dataclass(slots=True)
class _Feed:
    """sequence: of the last delta that is in the index, None while a snapshot is awaited; asked_at: when for one was asked last."""

    sequence: int | None = None
    asked_at: float | None = None


class Caches:
    """num_deltas, num_snapshots: taken in; num_gaps: times when deltas were missing; num_stale: deltas that an awaited snapshot will contain."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.num_deltas = self.num_snapshots = self.num_gaps = self.num_stale = 0
        self._feeds: dict[str, _Feed] = {}

    def apply(self, incarnation: str, delta: CacheDelta, now: float) -> bool:
        """Take in a node's delta or snapshot. True when its sender must be asked for a snapshot now."""
        feed = self._feeds.setdefault(incarnation, _Feed())
        if delta.snapshot:
            self.index.snapshot(incarnation, delta.added)
            self.num_snapshots += 1
            feed.sequence, feed.asked_at = delta.sequence, None
            return False
        if feed.sequence is not None and delta.sequence <= feed.sequence:
            self.num_stale += 1  # it is in the snapshot
            return False
        if feed.sequence is None or delta.sequence != feed.sequence + 1:
            return self._miss(feed, now)
        self.index.remove(incarnation, delta.removed)
        self.index.add(incarnation, delta.added)
        self.num_deltas += 1
        feed.sequence = delta.sequence
        return False

    def _miss(self, feed: _Feed, now: float) -> bool:
        if feed.sequence is not None:
            self.num_gaps += 1
            feed.sequence = None
        else:
            self.num_stale += 1
        return self._ask(feed, now)

    def _ask(self, feed: _Feed, now: float) -> bool:
        if feed.asked_at is not None and now < feed.asked_at + ASK_AGAIN_S:
            return False
        feed.asked_at = now
        return True

    def is_overdue(self, incarnation: str, now: float) -> bool:
        """Whether the node must be asked (again), because its snapshot does not come. Asked whenever the node says anything."""
        feed = self._feeds.get(incarnation)
        return feed is not None and feed.sequence is None and self._ask(feed, now)

    def is_exact(self, incarnation: str) -> bool:
        """Whether the index holds what the node last said, all of it."""
        feed = self._feeds.get(incarnation)
        return feed is not None and feed.sequence is not None and not self.index.is_partial(incarnation)

    def lose(self, incarnation: str) -> None:
        """The link is gone: what the node holds it will say anew, if it comes back."""
        self._feeds.pop(incarnation, None)
        self.index.drop(incarnation)

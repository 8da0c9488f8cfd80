"""Cache reports of nodes, taken into the prefix index in order.

A node's first report is a snapshot. Numbered deltas follow. A missing number means that something was lost. The router
then asks for a snapshot at once, and again while none comes. Until it comes, the index keeps the old state as the best
guess.

Large reports are taken in by slices, so the event loop does other work between them. Later reports of the node wait
behind its slices, and the node looks shorter meanwhile. Owned by the router's event loop. It sends nothing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pdcluster.core.messages import HASH_BYTES, CacheDelta
from pdcluster_router.prefix_index.index import PrefixIndex

# Pause before a snapshot is asked for again.
ASK_AGAIN_S = 1.0


# Blocks of one slice: a few milliseconds with the index's upkeep (bench.index).
SLICE_BLOCKS = 512

Piece = tuple[Literal["snapshot", "remove", "add"], bytes]


@dataclass(slots=True)
class _Feed:
    """The reports of one node."""

    # Of the last delta that was taken in; None while a snapshot is awaited.
    sequence: int | None = None
    # When the router last asked for a snapshot.
    asked_at: float | None = None
    # Slices that are not in the index yet.
    pieces: deque[Piece] = field(default_factory=deque)


class CacheUpdates:
    """The cache reports of all nodes. Owned by the router's event loop."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        # Deltas and snapshots that were taken in, times when deltas were missing, and deltas that a snapshot contains
        # or will contain.
        self.num_deltas = self.num_snapshots = self.num_gaps = self.num_stale = 0
        self._feeds: dict[str, _Feed] = {}
        # Feeds with slices left.
        self._waiting: dict[str, _Feed] = {}

    @property
    def has_pieces(self) -> bool:
        """Whether `take_piece` has work."""
        return bool(self._waiting)

    def take_piece(self) -> None:
        """Take in one slice. Nodes take turns."""
        incarnation = next(iter(self._waiting))
        feed = self._waiting.pop(incarnation)
        kind, hashes = feed.pieces.popleft()
        self._take(incarnation, kind, hashes)
        if feed.pieces:
            self._waiting[incarnation] = feed

    def apply(self, incarnation: str, delta: CacheDelta, now: float) -> bool:
        """Take in a delta or snapshot. True when its sender must be asked for a snapshot now."""
        feed = self._feeds.setdefault(incarnation, _Feed())
        if delta.snapshot:
            feed.pieces.clear()
            self._put(incarnation, feed, delta)
            self.num_snapshots += 1
            feed.sequence, feed.asked_at = delta.sequence, None
            return False
        if feed.sequence is not None and delta.sequence <= feed.sequence:
            self.num_stale += 1  # the snapshot contains it
            return False
        if feed.sequence is None or delta.sequence != feed.sequence + 1:
            return self._miss(feed, now)
        self._put(incarnation, feed, delta)
        self.num_deltas += 1
        feed.sequence = delta.sequence
        return False

    def _put(self, incarnation: str, feed: _Feed, delta: CacheDelta) -> None:
        """Take in a small report at once when no slice is before it."""
        pieces = list(_pieces(delta))
        if len(delta.added) + len(delta.removed) <= SLICE_BLOCKS * HASH_BYTES and not feed.pieces:
            for kind, hashes in pieces:
                self._take(incarnation, kind, hashes)
            self._waiting.pop(incarnation, None)
            return
        feed.pieces.extend(pieces)
        self._waiting[incarnation] = feed

    def _take(self, incarnation: str, kind: str, hashes: bytes) -> None:
        match kind:
            case "snapshot":
                self.index.snapshot(incarnation, hashes)
            case "remove":
                self.index.remove(incarnation, hashes)
            case _:
                self.index.add(incarnation, hashes)

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
        """Whether to ask the node again for its snapshot. True starts a new pause of ASK_AGAIN_S."""
        feed = self._feeds.get(incarnation)
        return feed is not None and feed.sequence is None and self._ask(feed, now)

    def is_exact(self, incarnation: str) -> bool:
        """Whether the index holds all that the node last reported."""
        feed = self._feeds.get(incarnation)
        return (
            feed is not None
            and feed.sequence is not None
            and not feed.pieces
            and not self.index.is_partial(incarnation)
        )

    def lose(self, incarnation: str) -> None:
        """The link is gone. A node that comes back reports everything anew."""
        self._feeds.pop(incarnation, None)
        self._waiting.pop(incarnation, None)
        self.index.drop(incarnation)


def _pieces(delta: CacheDelta) -> Iterator[Piece]:
    """Slices of a report. Parents come before children."""
    size = SLICE_BLOCKS * HASH_BYTES
    if delta.snapshot:
        yield "snapshot", delta.added[:size]
        yield from (("add", delta.added[begin : begin + size]) for begin in range(size, len(delta.added), size))
        return
    yield from (("remove", delta.removed[begin : begin + size]) for begin in range(0, len(delta.removed), size))
    yield from (("add", delta.added[begin : begin + size]) for begin in range(0, len(delta.added), size))

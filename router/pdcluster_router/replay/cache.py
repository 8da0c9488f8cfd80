"""A simulated node's KV pool: an LRU of blocks, leaves first, beside blocks of running requests.

A prompt's blocks are touched from last to first, so a block is never older than one behind it. So evicted blocks are
leaves, and cached blocks are closed under prefixes, as on a real node. It only counts blocks; `check_integrity`
recounts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdcluster.core.errors import IntegrityError
from pdcluster_router.replay.trace import Blocks


@dataclass(slots=True)
class Hold:
    """What one request keeps from eviction: its first num_shared cached blocks, and num_private others."""

    blocks: Blocks
    num_shared: int
    num_private: int


@dataclass(slots=True)
class PrefixCache:
    """The pool.

    changes: blocks that came (True) or went (False) since the owner last took them, in order.
    """

    capacity: int
    changes: dict[bytes, bool] = field(default_factory=dict)
    # Called when `changes` may be no longer empty.
    changed: Callable[[], None] = lambda: None
    _kept: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _num_private: int = 0
    _num_pinned: int = 0

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_pinned(self) -> int:
        return self._num_pinned

    @property
    def num_busy(self) -> int:
        """Blocks that cannot be evicted."""
        return self._num_pinned + self._num_private

    def clear(self) -> None:
        """The node goes: it must be idle."""
        if self.num_busy:
            raise IntegrityError(f"a node with {self.num_busy} blocks in use cannot go")
        if self._kept:
            self.changed()
        for block in self._kept:
            self.changes.pop(block, None)
            self.changes[block] = False
        self._kept.clear()

    def names(self) -> list[bytes]:
        """Cached blocks, parents before children."""
        return list(reversed(self._kept))

    def take_changes(self) -> dict[bytes, bool]:
        changes, self.changes = self.changes, {}
        return changes

    def depth(self, blocks: Blocks) -> int:
        """Number of leading blocks that are cached."""
        kept = self._kept
        if not blocks or blocks[0] not in kept:
            return 0
        low, high = 1, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in kept:
                low = middle
            else:
                high = middle - 1
        return low

    def open(self, blocks: Blocks, num_blocks: int) -> Hold | None:
        """Reserve num_blocks for a request, of which `blocks` are full; None while others leave too little."""
        depth = self.depth(blocks)
        newly_pinned = sum(1 for block in blocks[:depth] if not self._kept[block])
        if self.num_busy + newly_pinned + num_blocks - depth > self.capacity:
            return None
        self._pin(blocks, 0, depth)
        self._num_private += num_blocks - depth
        self._evict()
        return Hold(blocks, depth, num_blocks - depth)

    def publish(self, hold: Hold, blocks: Blocks) -> None:
        """All of `blocks` are computed: the hold's private blocks become shared ones."""
        known = hold.num_shared
        kept, changes = self._kept, self.changes
        if len(blocks) > known:
            self.changed()
        for block in blocks[known:]:
            if block not in kept:
                kept[block] = 0
                changes.pop(block, None)
                changes[block] = True
        self._pin(blocks, known, len(blocks))
        spent = min(len(blocks) - known, hold.num_private)
        hold.blocks, hold.num_shared, hold.num_private = blocks, len(blocks), hold.num_private - spent
        self._num_private -= spent
        self._evict()

    def close(self, hold: Hold) -> None:
        """The request needs nothing more. Its shared blocks stay for reuse."""
        kept = self._kept
        for block in reversed(hold.blocks[: hold.num_shared]):
            left = kept[block] = kept[block] - 1
            kept.move_to_end(block)
            if not left:
                self._num_pinned -= 1
        self._num_private -= hold.num_private
        hold.blocks, hold.num_shared, hold.num_private = (), 0, 0
        self._evict()

    def _pin(self, blocks: Blocks, begin: int, end: int) -> None:
        kept = self._kept
        for position in range(end - 1, begin - 1, -1):
            block = blocks[position]
            before = kept[block]
            if not before:
                self._num_pinned += 1
            kept[block] = before + 1
        for position in range(end - 1, -1, -1):
            kept.move_to_end(blocks[position])

    def _evict(self) -> None:
        kept = self._kept
        if len(kept) + self._num_private > self.capacity:
            self.changed()
        while len(kept) + self._num_private > self.capacity:
            block, pins = kept.popitem(last=False)
            if pins:
                kept[block] = pins
            else:
                self.changes.pop(block, None)
                self.changes[block] = False

    def check_integrity(self) -> None:
        pinned = sum(1 for pins in self._kept.values() if pins)
        if pinned != self._num_pinned or self._num_private < 0 or len(self._kept) + self._num_private > self.capacity:
            raise IntegrityError(
                f"{pinned} blocks are pinned, {self._num_pinned} counted, {self._num_private} private, "
                f"{len(self._kept)} kept"
            )


def pooled_depths(requests: Iterable[tuple[Blocks, Blocks]], capacity: int) -> list[int]:
    """Leading blocks that each request finds in one LRU that serves all in order: the oracle of a cluster's caches.

    A request is what it asks for and what it leaves. Of more than `capacity`, the beginning stays.
    """
    cache = PrefixCache(capacity)
    depths = []
    for asked, left in requests:
        depths.append(cache.depth(asked))
        whole = left[:capacity]
        hold = cache.open(whole, len(whole))
        if hold is None:
            raise IntegrityError(f"an idle cache of {capacity} blocks has no room for {len(whole)}")
        cache.publish(hold, whole)
        cache.close(hold)
        cache.changes.clear()
    return depths

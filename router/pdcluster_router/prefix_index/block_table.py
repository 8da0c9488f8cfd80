"""An open-addressing table from block hashes to ids of holder sets.

It is two flat arrays: 20 bytes a slot, and no object per row. Its size is fixed: `index` moves rows into a larger table
piece by piece, and this one returns its memory as they go. Probing is linear from the hash itself, which is uniform
(SHA-256). numpy probes many rows at once. The few rows left after some rounds, and single lookups, go one by one
through memoryviews.

Two set ids have a meaning here. FREE was never used and ends a probe. GONE is a removed row and does not end it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.messages import HASH_BYTES

# Memory for large tables: zeroed, and the system gives and takes it page by page.
#
# numpy asks for huge pages. A new table's rows then touch every page within a few thousand rows, and the system zeroes
# hundreds of megabytes at once: 700 ms for 23 M slots, where small pages take a few. Freeing a large table in one piece
# takes 130 ms, so `clear` returns it in parts. A system without memory advice moves larger pieces at once.


class ZeroedMemory:
    def __init__(self, num_bytes: int) -> None:
        self._pages = _anonymous(num_bytes)
        self.octets: NDArray[np.uint8] = np.frombuffer(self._pages, np.uint8)

    def clear(self, start: int, stop: int) -> None:
        """Zero the bytes from start up to stop. The system gets back the whole pages among them."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform != "linux" or first >= last:  # elsewhere, unused pages may keep their content
            self.octets[start:stop] = 0
            return
        self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.octets[start:first] = 0
        self.octets[last:stop] = 0


def _anonymous(num_bytes: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages refuses the advice, and gives none
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


FREE = 0
GONE = 1
SET_BYTES = 4
SLOT_BYTES = HASH_BYTES + SET_BYTES

# Up to so many rows, a loop is cheaper than another round over arrays.
FEW = 24

Words = NDArray[np.uint64]
Slots = NDArray[np.int64]
Sets = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Keys:
    """Block hashes as two words each."""

    low: Words
    high: Words

    @classmethod
    def of(cls, hashes: bytes) -> Keys:
        """Each hash once. Raises ValueError when the bytes are no whole number of hashes."""
        if len(hashes) % HASH_BYTES:
            raise ValueError(f"{len(hashes)} bytes are no whole number of block hashes of {HASH_BYTES} bytes")
        words = np.frombuffer(hashes, np.uint64).reshape(-1, 2)
        ordered = np.sort(words[:, 0])
        if (ordered[1:] == ordered[:-1]).any():
            words = words[np.sort(np.unique(words, axis=0, return_index=True)[1])]
        return cls(words[:, 0], words[:, 1])

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.low.tolist(), self.high.tolist(), strict=True)

    def __len__(self) -> int:
        return len(self.low)

    def take(self, chosen: NDArray[np.bool_] | Slots) -> Keys:
        return Keys(self.low[chosen], self.high[chosen])


class BlockTable:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Slots that are not FREE. GONE slots count: they lengthen probes.
        self.num_rows = 0
        self._num_cleared = 0
        self._hash_memory, self._set_memory = ZeroedMemory(num_slots * HASH_BYTES), ZeroedMemory(num_slots * SET_BYTES)
        words: Words = self._hash_memory.octets.view(np.uint64)
        self._low, self._high = words[0::2], words[1::2]  # interleaved: a new row touches one page less
        self.sets: Sets = self._set_memory.octets.view(np.uint32)
        self._low_view = self._low.data
        self._high_view = self._high.data
        self._sets_view = self.sets.data

    @property
    def num_bytes(self) -> int:
        return self.num_slots * SLOT_BYTES

    def _homes(self, low: Words) -> Slots:
        """Where a probe begins. A larger hash begins later in a table of any size, so rows move between tables in
        order.
        """
        return ((low >> np.uint64(32)) * np.uint64(self.num_slots) >> np.uint64(32)).astype(np.int64)

    def set_of(self, low: int, high: int) -> int:
        """The set id of one block; GONE when it has no row."""
        size = self.num_slots
        slot = (low >> 32) * size >> 32
        lows, highs, sets = self._low_view, self._high_view, self._sets_view
        while found := sets[slot]:
            if lows[slot] == low and highs[slot] == high and found != GONE:
                return found
            slot = slot + 1 if slot + 1 < size else 0
        return GONE

    def find(self, keys: Keys) -> Slots:
        """The slot of each key; -1 for keys without a row."""
        slots = self._homes(keys.low)
        result: Slots = np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        while len(left) > FEW:
            at = slots[left]
            held = self.sets[at]
            is_here = (self._low[at] == keys.low[left]) & (held != GONE)
            alike = np.flatnonzero(
                is_here
            )  # compare the second word only where the first is equal: a probe waits for memory
            is_here[alike] = self._high[at[alike]] == keys.high[left[alike]]
            result[left[is_here]] = at[is_here]
            left = left[~is_here & (held != FREE)]
            slots[left] = (slots[left] + 1) % self.num_slots
        for row in left.tolist():
            result[row] = self.find_one(int(keys.low[row]), int(keys.high[row]), int(slots[row]))
        return result

    def find_one(self, low: int, high: int, slot: int | None = None) -> int:
        """The slot of one key; -1 when it has no row.

        slot: where to begin, when the slots before were searched.
        """
        slot = (low >> 32) * self.num_slots >> 32 if slot is None else slot
        lows, highs, sets = self._low_view, self._high_view, self._sets_view
        while found := sets[slot]:
            if lows[slot] == low and highs[slot] == high and found != GONE:
                return slot
            slot = (slot + 1) % self.num_slots
        return -1

    def insert(self, keys: Keys, sets: Sets) -> int:
        """Add rows for keys that have none, each key once. Returns the number of rows added."""
        slots = self._homes(keys.low)
        left = np.arange(len(keys))
        made = 0
        while len(left) > FEW:
            at = slots[left]
            held = self.sets[at]
            is_open = held <= GONE
            claimed, into = left[is_open], at[is_open]
            # When several keys claim a slot, the last write wins. The others see it and go on.
            self._low[into], self._high[into], self.sets[into] = keys.low[claimed], keys.high[claimed], sets[claimed]
            is_made = is_open & (self._low[at] == keys.low[left]) & (self._high[at] == keys.high[left])
            made += int(np.count_nonzero(is_made))
            self.num_rows += int(np.count_nonzero(held[is_made] == FREE))
            left = left[~is_made]
            slots[left] = (slots[left] + 1) % self.num_slots
        for row in left.tolist():
            self.insert_one(int(keys.low[row]), int(keys.high[row]), int(sets[row]), int(slots[row]))
        return made + len(left)

    def insert_one(self, low: int, high: int, set_id: int, slot: int | None = None) -> None:
        """Add a row for a key that has none."""
        slot = (low >> 32) * self.num_slots >> 32 if slot is None else slot
        lows, highs, sets = self._low_view, self._high_view, self._sets_view
        while (found := sets[slot]) > GONE:
            slot = (slot + 1) % self.num_slots
        self.num_rows += found == FREE
        lows[slot], highs[slot], sets[slot] = low, high, set_id

    def clear(self, stop: int) -> None:
        """Return the memory of slots before `stop`, once no row is left in them.

        Cleared slots are FREE, which ends probes. So it clears only up to the last slot that was never used. That slot
        ends the probes of all rows behind it anyway.
        """
        free = np.flatnonzero(self.sets[self._num_cleared : stop] == FREE)
        if len(free):
            start, end = self._num_cleared, self._num_cleared + int(free[-1])
            self.num_rows -= int(np.count_nonzero(self.sets[start:end]))
            self._hash_memory.clear(start * HASH_BYTES, end * HASH_BYTES)
            self._set_memory.clear(start * SET_BYTES, end * SET_BYTES)
            self._num_cleared = end

    def rows(self, start: int, stop: int) -> tuple[Slots, Keys]:
        """Slots from start up to stop that hold a row, and their keys."""
        slots = np.flatnonzero(self.sets[start:stop] > GONE) + start
        return slots, Keys(self._low[slots], self._high[slots])

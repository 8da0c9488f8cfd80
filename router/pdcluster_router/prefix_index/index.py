"""The prefix index: which node holds which blocks.

One look-up answers for a whole prompt and all nodes.

A row per block (`block_table`) carries the id of the set of nodes that hold it (`holder_sets`). Nodes evict leaves
first, so a node holds a prefix of each prompt, and sets only shrink along it. Where both ends of a stretch have the
same set, so have all blocks between. `depths` halves stretches whose ends differ: it looks at O(log blocks × distinct
depths) rows.

A full table grows by moving its rows into a larger one, some with each change. Until then both are searched. At
`max_blocks` new blocks are dropped and counted, and their node is marked partial until its next snapshot. The
holdings of a partial node are no longer prefix-closed here, so it may look shorter. Rows that only nodes that left held
are not moved.

Owned by one thread. Blocks that a request will create are in `expected`. `updates` reads the reports of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import HASH_BYTES
from pdcluster_router.prefix_index.block_table import GONE, SLOT_BYTES, BlockTable, Keys, Sets, Slots
from pdcluster_router.prefix_index.expected import ExpectedBlocks
from pdcluster_router.prefix_index.holder_sets import EMPTY, HolderSets

MAX_LOAD = 0.75
GROWTH = 1.3
FIRST_SLOTS = 4096

MOVED_PER_BLOCK = 8
# Slots of the old table to move for each changed block. They add up until LEAST_MOVED is worth a move.
LEAST_MOVED = 4096

COUNTED = 1 << 18
# Rows are uniform over slots. So an estimate from COUNTED slots is off by less than this share, almost surely.
SPARE = 0.02

# Sets that each change sweeps while dead numbers are left.
SWEPT_SETS = 64

# Up to so many blocks, a loop is cheaper than arrays.
FEW_BLOCKS = 48

# A table of the largest size is rebuilt only when this share of `max_blocks` may be unused.
FREED_SHARE = 0.125

# Distinct blocks. Their rows need at most ENTRY_BYTES each.
MAX_BLOCKS = 16 << 20

# Most bytes of a row: while rows move, both tables exist. A row holds at least one (block, node) entry.
ENTRY_BYTES = SLOT_BYTES * (1 + GROWTH) / MAX_LOAD

KEPT_NAMES = 512


@dataclass(slots=True)
class Holdings:
    """One node's share of the index."""

    # The node's number in the holder sets.
    number: int
    # Blocks that the node holds.
    num_blocks: int = 0
    # Blocks were dropped for want of room.
    is_partial: bool = False


class PrefixIndex:
    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        # Entries that found no room, in total.
        self.num_dropped = 0
        self.expected = ExpectedBlocks()
        self._nodes: dict[str, Holdings] = {}
        self._names: list[str] = []
        self._sets = HolderSets()
        self._table = BlockTable(min(FIRST_SLOTS, int(max_blocks / MAX_LOAD) + 1))
        self._former: BlockTable | None = None
        # Slots of the old table that are done, and an upper bound of the rows that are still to move.
        self._moved = self._num_to_move = 0
        # Slots that should have been moved by now.
        self._num_owed = 0
        # Entries that ended since the table was built: an upper bound of its unused rows.
        self._num_freed = 0
        self._most_slots = int(max_blocks / MAX_LOAD) + 1
        self._members: dict[int, tuple[str, ...]] = {}
        self._asked = b""
        # The answer for the hashes in `_asked`, until something changes. A request looks them up again for each node
        # that it is sent to.
        self._answer: dict[str, int] = {}

    # ------------------------------------------------------------ what nodes tell

    def snapshot(self, node: str, hashes: bytes) -> None:
        """The node holds exactly these blocks."""
        keys = Keys.of(hashes)
        self._asked = b""
        self._forget(node)
        self._add(self._enter(node), keys)

    def add(self, node: str, hashes: bytes) -> None:
        """The node also holds these blocks. Parents come before children."""
        keys = Keys.of(hashes)
        self._asked = b""
        self.expected.confirm(node, hashes)
        self._add(self._enter(node), keys)

    def remove(self, node: str, hashes: bytes) -> None:
        """The node no longer holds these blocks."""
        keys = Keys.of(hashes)
        holdings = self._nodes.get(node)
        if holdings is None:
            return
        self._asked = b""
        self._upkeep(len(keys))
        before = holdings.num_blocks
        if len(keys) <= FEW_BLOCKS:
            self._remove_few(holdings, keys)
        else:
            for table in self._tables():
                slots = table.find(keys)
                holdings.num_blocks -= self._change(table, slots[slots >= 0], holdings.number, is_added=False)
        self._num_freed += before - holdings.num_blocks

    def drop(self, node: str) -> None:
        """The node left, with all its blocks."""
        self._asked = b""
        self._forget(node)
        self.expected.drop(node)

    def expect(self, node: str, hashes: bytes, until: float) -> None:
        """A request in flight will create these blocks on the node, until that time."""
        self.expected.add(node, hashes, until)

    # ------------------------------------------------------------ what is asked

    def depths(self, hashes: bytes, now: float | None = None) -> dict[str, int]:
        """Leading blocks of the prompt on each node that holds the first one.

        now: also count the blocks that are expected at this time; None: only reported ones.
        """
        if not hashes:
            return {}
        if hashes is not self._asked:
            self._answer = self._held(hashes)
            self._asked = hashes
        found = self._answer.copy()
        if now is not None:
            for node, num_blocks in self.expected.depths(hashes, now).items():
                if num_blocks > found.get(node, 0):
                    found[node] = num_blocks
        return found

    def _held(self, hashes: bytes) -> dict[str, int]:
        words, table_set_of = memoryview(hashes).cast("Q"), self._table.set_of
        last = len(words) // 2 - 1
        first = table_set_of(words[0], words[1])
        if (
            first != GONE and first not in self._sets.forwarding and table_set_of(words[-2], words[-1]) == first
        ):  # the usual case: one set holds the whole prompt
            return dict.fromkeys(self._names_of(first), last + 1)
        first = self._set_of(words, 0)
        if first == EMPTY:
            return {}
        found: dict[str, int] = {}
        for set_id, num_blocks in self._levels(words, first, last):
            # Later levels are subsets of earlier ones.
            found.update(dict.fromkeys(self._names_of(set_id), num_blocks))
        return found

    def depth(self, node: str, hashes: bytes) -> int:
        """Leading blocks of the prompt on one node."""
        if hashes and hashes is self._asked:
            return self._answer.get(node, 0)
        holdings = self._nodes.get(node)
        words = memoryview(hashes).cast("Q")
        low, high = 0, len(words) // 2 if holdings is not None else 0
        while holdings is not None and low < high:
            middle = (low + high + 1) // 2
            if self._sets.has_node(self._set_of(words, middle - 1), holdings.number):
                low = middle
            else:
                high = middle - 1
        return low

    def _levels(self, words: memoryview[int], set_id: int, last: int) -> list[tuple[int, int]]:
        """(set, leading blocks that it holds) wherever the set changes along the prompt.

        set_id: of the first block.
        last: last block to look at.
        """
        set_of, left = self._set_of, 0
        levels: list[tuple[int, int]] = []
        further = [(set_of(words, last), last)]
        while set_id != EMPTY:
            while further and further[-1][0] == set_id:
                left = further.pop()[1]
            if not further:
                levels.append((set_id, left + 1))
                break
            right = further[-1][1]
            if right > left + 1:
                middle = (left + right) // 2
                further.append((set_of(words, middle), middle))
            else:
                levels.append((set_id, left + 1))
                set_id, left = further.pop()
        return levels

    def _set_of(self, words: memoryview[int], block: int) -> int:
        low, high = words[2 * block], words[2 * block + 1]
        found = self._table.set_of(low, high)
        if found == GONE and self._former is not None:
            found = self._former.set_of(low, high)
        return self._sets.resolve(found) if found in self._sets.forwarding else found

    def _names_of(self, set_id: int) -> tuple[str, ...]:
        names = self._members.get(set_id)
        if names is None:
            if len(self._members) >= KEPT_NAMES:
                self._members.clear()
            names = self._members[set_id] = tuple(self._names[number] for number in self._sets.members(set_id))
        return names

    @property
    def num_entries(self) -> int:
        """(block, node) pairs."""
        return sum(holdings.num_blocks for holdings in self._nodes.values())

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self._tables()) + self._sets.num_bytes + self.expected.num_bytes

    @property
    def num_sets(self) -> int:
        return self._sets.num_sets

    def num_blocks(self, node: str) -> int:
        holdings = self._nodes.get(node)
        return holdings.num_blocks if holdings is not None else 0

    def is_partial(self, node: str) -> bool:
        """Whether blocks of the node were dropped. Only a snapshot repairs that."""
        holdings = self._nodes.get(node)
        return holdings is not None and holdings.is_partial

    def holdings(self, node: str) -> set[bytes]:
        """All blocks of one node, from every row. For tests and people."""
        found: set[bytes] = set()
        for chosen in self._keys_of(node):
            packed = np.stack((chosen.low, chosen.high), axis=1).tobytes()
            found.update(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES))
        return found

    def digest(self, node: str) -> str:
        """A digest of the node's blocks, in any order. Reads every row. `digest_of` makes the same of hashes."""
        low = high = count = 0
        for keys in self._keys_of(node):
            low ^= int(np.bitwise_xor.reduce(keys.low))
            high ^= int(np.bitwise_xor.reduce(keys.high))
            count += len(keys)
        return _digest(count, low, high)

    def _keys_of(self, node: str) -> Iterator[Keys]:
        number = self._nodes[node].number if node in self._nodes else None
        for table in self._tables():
            slots, keys = table.rows(0, table.num_slots)
            sets = self._sets.resolve_many(table.sets[slots])
            holding = [
                set_id
                for set_id in np.unique(sets).tolist()
                if number is not None and self._sets.has_node(set_id, number)
            ]
            yield keys.take(np.isin(sets, np.array(holding, np.uint32)))

    # ------------------------------------------------------------ rows

    def _tables(self) -> tuple[BlockTable, ...]:
        return (self._table,) if self._former is None else (self._table, self._former)

    def _enter(self, node: str) -> Holdings:
        holdings = self._nodes.get(node)
        if holdings is None:
            holdings = self._nodes[node] = Holdings(self._sets.enter())
            self._names += [""] * (holdings.number + 1 - len(self._names))
            self._names[holdings.number] = node
        return holdings

    def _forget(self, node: str) -> None:
        holdings = self._nodes.pop(node, None)
        if holdings is not None:
            self._sets.leave(holdings.number)
            self._num_freed += holdings.num_blocks
            self._members.clear()
            self._upkeep(0)

    def _add(self, holdings: Holdings, keys: Keys) -> None:
        self._upkeep(len(keys))
        if len(keys) <= FEW_BLOCKS:
            self._add_few(holdings, keys)
            return
        for table in self._tables():
            slots = table.find(keys)
            is_here = slots >= 0
            holdings.num_blocks += self._change(table, slots[is_here], holdings.number, is_added=True)
            keys = keys.take(~is_here)
        if len(keys):
            self._insert(holdings, keys)

    def _insert(self, holdings: Holdings, keys: Keys) -> None:
        room = self._make_room(len(keys))
        if len(keys) > room:
            self.num_dropped += len(keys) - room
            holdings.is_partial = True
            keys = keys.take(np.arange(room))
        if not len(keys):
            return  # a set without rows would stay for ever
        alone = self._sets.with_node(EMPTY, holdings.number)
        made = self._table.insert(keys, np.full(len(keys), alone, np.uint32))
        self._sets.hold(alone, made)
        holdings.num_blocks += made

    def _add_few(self, holdings: Holdings, keys: Keys) -> None:
        alone = self._sets.with_node(EMPTY, holdings.number)
        self._sets.hold(alone, 1)  # keep it alive until it is used
        for low, high in keys.pairs():
            table, slot = self._find(low, high)
            if slot >= 0:
                holdings.num_blocks += self._change_one(table, slot, holdings.number, is_added=True)
            elif self._make_room(1):
                self._table.insert_one(low, high, alone)
                self._sets.hold(alone, 1)
                holdings.num_blocks += 1
            else:
                self.num_dropped += 1
                holdings.is_partial = True
        self._let_go(alone, 1)

    def _remove_few(self, holdings: Holdings, keys: Keys) -> None:
        for low, high in keys.pairs():
            table, slot = self._find(low, high)
            if slot >= 0:
                holdings.num_blocks -= self._change_one(table, slot, holdings.number, is_added=False)

    def _find(self, low: int, high: int) -> tuple[BlockTable, int]:
        slot = self._table.find_one(low, high)
        if slot < 0 and self._former is not None:
            return self._former, self._former.find_one(low, high)
        return self._table, slot

    def _change_one(self, table: BlockTable, slot: int, number: int, *, is_added: bool) -> bool:
        carried = int(table.sets[slot])
        set_id = self._sets.resolve(carried)
        if self._sets.has_node(set_id, number) == is_added:
            return False
        changed = self._sets.with_node(set_id, number) if is_added else self._sets.without_node(set_id, number)
        if changed != EMPTY:
            self._sets.hold(changed, 1)
        table.sets[slot] = changed
        self._let_go(carried, 1)
        return True

    def _change(self, table: BlockTable, slots: Slots, number: int, *, is_added: bool) -> int:
        """Add the node to the sets of these rows, or remove it. Returns how many changed."""
        if not len(slots):
            return 0
        carried = table.sets[slots]
        former, of_row = np.unique(self._sets.resolve_many(carried), return_inverse=True)
        change = self._sets.with_node if is_added else self._sets.without_node
        changed = np.zeros(len(former), np.bool_)
        sets: Sets = np.zeros(len(former), np.uint32)
        for i, set_id in enumerate(former.tolist()):
            changed[i] = self._sets.has_node(set_id, number) != is_added
            sets[i] = change(set_id, number) if changed[i] else set_id
            self._sets.hold(int(sets[i]), 1)  # no set may end while rows change over to it
        table.sets[slots] = sets[of_row]
        self._recount(carried, sets[of_row])
        for set_id in sets.tolist():
            self._let_go(set_id, 1)
        return int(np.count_nonzero(changed[of_row]))

    def _recount(self, former: Sets, now: Sets) -> None:
        """Count rows again after they changed ids. Rows of the empty set are GONE and not counted."""
        for set_id, count in zip(*_counts(now), strict=True):
            self._sets.hold(set_id, count)
        for set_id, count in zip(*_counts(former), strict=True):
            self._let_go(set_id, count)

    def _let_go(self, set_id: int, count: int) -> None:
        behind = self._sets.resolve(set_id)  # may end too, with the last row whose id forwards to it
        self._sets.let_go(set_id, count)
        self._members.pop(set_id, None)
        self._members.pop(behind, None)

    # ------------------------------------------------------------ room

    def _make_room(self, num_blocks: int) -> int:
        """How many of `num_blocks` new rows there is room for, after growing the table if it may grow."""
        if num_blocks > self._room() and (
            self._table.num_slots < self._most_slots or self._num_freed > FREED_SHARE * self.max_blocks
        ):
            self._rebuild(num_blocks)
        return max(min(num_blocks, self._room()), 0)

    def _room(self) -> int:
        return int(MAX_LOAD * self._table.num_slots) - self._table.num_rows - self._num_to_move

    def _rebuild(self, num_new: int) -> None:
        """Begin to move live rows into a table with room for `num_new` more, or into the largest allowed.

        It also has room for rows that come meanwhile, so all rows have moved before it is full.
        """
        if self._former is not None:
            self._move(self._former.num_slots)
        live = self._num_alive()
        wanted = max((live + num_new) * GROWTH, live + num_new + GROWTH * self._table.num_slots / MOVED_PER_BLOCK)
        self._former, self._table = self._table, BlockTable(min(int(wanted / MAX_LOAD) + FIRST_SLOTS, self._most_slots))
        self._num_to_move, self._moved, self._num_freed, self._num_owed = live, 0, 0, 0

    def _num_alive(self) -> int:
        """Rows that some node still holds. A large table is estimated from COUNTED slots, rounded up."""
        size = self._table.num_slots
        sets = self._table.sets[:COUNTED]
        found = int(np.count_nonzero(self._sets.resolve_many(sets) > EMPTY))
        return found if size <= COUNTED else min(int(found * size / COUNTED * (1 + SPARE)) + 1, self._table.num_rows)

    def _upkeep(self, num_blocks: int) -> None:
        """Move some rows, sweep some sets, and begin to shrink a table that few rows use."""
        for set_id in self._sets.sweep(SWEPT_SETS):
            self._members.pop(set_id, None)
        if self._former is not None:
            self._num_owed += MOVED_PER_BLOCK * (num_blocks + 1)
            if self._num_owed >= LEAST_MOVED:
                self._move(self._num_owed)
                self._num_owed = 0
        elif 2 * self._num_freed > self._table.num_rows and self._table.num_slots > 2 * FIRST_SLOTS:
            self._rebuild(0)

    def _move(self, num_slots: int) -> None:
        """Move the rows of so many slots of the old table."""
        former = self._former
        if former is None:
            return
        stop = min(self._moved + num_slots, former.num_slots)
        slots, keys = former.rows(self._moved, stop)
        carried = former.sets[slots]
        sets = self._sets.resolve_many(carried)
        is_live = sets > EMPTY
        self._table.insert(keys.take(is_live), sets[is_live])
        former.sets[slots] = GONE
        former.clear(stop)
        self._recount(carried, sets)
        self._moved = stop
        self._num_to_move -= int(np.count_nonzero(is_live))
        if stop == former.num_slots:
            self._former, self._num_to_move = None, 0

    # ------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Recount everything. Raises IntegrityError that names what does not add up."""
        carried = np.zeros(1, np.int64)
        seen: set[bytes] = set()
        num_rows = 0
        for table in self._tables():
            slots, keys = table.rows(0, table.num_slots)
            counts = np.bincount(table.sets[slots], minlength=len(carried))
            counts[: len(carried)] += carried
            carried = counts
            num_rows += len(slots)
            packed = np.stack((keys.low, keys.high), axis=1).tobytes()
            seen.update(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES))
            found = table.find(keys)
            _require(bool(np.array_equal(found, slots)), "a row is not found by its hash")
            _require(int(np.count_nonzero(table.sets)) == table.num_rows, "the rows are miscounted")
        _require(len(seen) == num_rows, "a block has two rows")
        self._sets.check_integrity(carried)
        for node, holdings in self._nodes.items():
            held = len(self.holdings(node))
            _require(held == holdings.num_blocks, f"node {node} holds {held} blocks, {holdings.num_blocks} are counted")
        self.expected.check_integrity()


def _counts(sets: Sets) -> tuple[list[int], list[int]]:
    """How often each set occurs, without the empty one."""
    found, counts = np.unique(sets[sets > EMPTY], return_counts=True)
    return found.tolist(), counts.tolist()


def digest_of(hashes: bytes) -> str:
    """Equal for equal sets of blocks, in any order."""
    keys = Keys.of(hashes)
    return _digest(len(keys), int(np.bitwise_xor.reduce(keys.low)), int(np.bitwise_xor.reduce(keys.high)))


def _digest(count: int, low: int, high: int) -> str:
    return f"{count}:{high:016x}{low:016x}"


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise IntegrityError(f"prefix index: {complaint}")

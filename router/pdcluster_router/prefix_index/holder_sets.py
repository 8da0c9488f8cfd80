"""Sets of nodes that hold a block, each stored once.

Blocks of one conversation share a set, so a row of the index needs only an id. A set is its members' numbers, sorted,
two bytes each. Rows that carry an id are counted. An id with no rows is reused.

A node that leaves costs O(1) at once: its number is dead, and `members` leaves it out. A sweep over a few sets at a
time then replaces each set with a dead number by one without. The old id *forwards* to the new one, because rows still
carry it. Requirements:

1. No set made after a number died holds it, so one pass over the ids is enough.
2. A number is reused only after a whole pass that began after it died.
3. A forwarding id counts as one row of its target, so the target lives as long.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import IntegrityError
from pdcluster_router.prefix_index.block_table import FREE, GONE, Sets

# The id of the empty set. A row with it counts as removed.
EMPTY = GONE

MAX_NODES = 1 << 16
# Bytes of an id beside its members: its entries in the lists, and two objects in a dict. Measured by bench.index,
# rounded up.
SET_BYTES = 200


class HolderSets:
    def __init__(self) -> None:
        # None for an id that is unused or forwards.
        self._members: list[bytes | None] = [b"", b""]
        self._ids: dict[bytes, int] = {b"": EMPTY}
        self._rows: list[int] = [0, 0]
        self._forward: Sets = np.arange(1024, dtype=np.uint32)
        # Ids that stand for another one. Use `resolve` on them.
        self.forwarding: set[int] = set()
        self._unused: list[int] = []
        self._member_bytes = 0
        self._numbers: list[int] = []
        self._num_numbers = 0
        self._dead: set[int] = set()
        # Dead numbers that the current pass removes. It ends at `_sweep_end`.
        self._swept: set[int] = set()
        self._cursor = self._sweep_end = 0

    # ------------------------------------------------------------ nodes

    def enter(self) -> int:
        """A number for a node. Raises IntegrityError when 65,536 are in use."""
        if not self._numbers and self._num_numbers == MAX_NODES:
            self.sweep(2 * len(self._members))
        if self._numbers:
            return self._numbers.pop()
        if self._num_numbers == MAX_NODES:
            raise IntegrityError(f"the index knows {MAX_NODES} nodes already; run more routers with fewer nodes each")
        self._num_numbers += 1
        return self._num_numbers - 1

    def leave(self, number: int) -> None:
        """From now on, no set contains the node."""
        self._dead.add(number)

    # ------------------------------------------------------------ sets

    @property
    def num_sets(self) -> int:
        return len(self._ids) - 1

    @property
    def num_bytes(self) -> int:
        return self._member_bytes + SET_BYTES * len(self._members) + self._forward.nbytes

    def resolve(self, set_id: int) -> int:
        """The id that stands for `set_id` now. The ids of the chain then forward to it directly."""
        if set_id not in self.forwarding:
            return set_id
        passed = []
        while set_id in self.forwarding:
            passed.append(set_id)
            set_id = int(self._forward[set_id])
        for earlier in passed[:-1]:
            if earlier in self.forwarding:  # else it ended with the one before it
                self.hold(set_id, 1)
                former, self._forward[earlier] = int(self._forward[earlier]), set_id
                self.let_go(former, 1)
        return set_id

    def resolve_many(self, sets: Sets) -> Sets:
        if not self.forwarding:
            return sets
        while True:
            further = self._forward[sets]
            if np.array_equal(further, sets):
                return sets
            sets = further

    def members(self, set_id: int) -> array[int]:
        """Numbers of the living nodes in a resolved set, ascending."""
        held = self._members[set_id]
        assert held is not None, f"set {set_id} is not in use"
        found = array("H", held)
        if self._dead and not self._dead.isdisjoint(found):
            return array("H", [number for number in found if number not in self._dead])
        return found

    def with_node(self, set_id: int, number: int) -> int:
        found = self.members(set_id)
        at = bisect_left(found, number)
        if at == len(found) or found[at] != number:
            found.insert(at, number)
        return self._id_of(found.tobytes())

    def without_node(self, set_id: int, number: int) -> int:
        found = self.members(set_id)
        at = bisect_left(found, number)
        if at < len(found) and found[at] == number:
            del found[at]
        return self._id_of(found.tobytes())

    def has_node(self, set_id: int, number: int) -> bool:
        found = self.members(set_id)
        at = bisect_left(found, number)
        return at < len(found) and found[at] == number

    def hold(self, set_id: int, num_rows: int) -> None:
        """Count `num_rows` more rows that carry the id."""
        self._rows[set_id] += num_rows

    def let_go(self, set_id: int, num_rows: int) -> None:
        """Count `num_rows` fewer rows that carry the id. The last row ends the id."""
        self._rows[set_id] -= num_rows
        if self._rows[set_id] < 0:
            raise IntegrityError(f"set {set_id} is carried by {self._rows[set_id]} rows")
        if not self._rows[set_id] and set_id != EMPTY:
            self._end(set_id)

    def _end(self, set_id: int) -> None:
        held, self._members[set_id] = self._members[set_id], None
        if held is not None:
            del self._ids[held]
            self._member_bytes -= len(held)
        else:
            self.forwarding.discard(set_id)
            target, self._forward[set_id] = int(self._forward[set_id]), set_id
            self.let_go(target, 1)
        self._unused.append(set_id)

    def _id_of(self, held: bytes) -> int:
        known = self._ids.get(held)
        if known is not None:
            return known
        set_id = self._unused.pop() if self._unused else self._new_id()
        self._members[set_id] = held
        self._ids[held] = set_id
        self._member_bytes += len(held)
        return set_id

    def _new_id(self) -> int:
        self._members.append(None)
        self._rows.append(0)
        if len(self._members) > len(self._forward):
            grown: Sets = np.arange(2 * len(self._forward), dtype=np.uint32)
            grown[: len(self._forward)] = self._forward
            self._forward = grown
        return len(self._members) - 1

    # ------------------------------------------------------------ sweeping

    def sweep(self, num_sets: int) -> list[int]:
        """Sweep `num_sets` sets. Returns the ids that now forward. It does nothing while no number is dead."""
        changed: list[int] = []
        for _ in range(num_sets):
            if self._cursor >= self._sweep_end:
                if not self._next_pass():
                    break
                continue
            if self._replace_dead(self._cursor):
                changed.append(self._cursor)
            self._cursor += 1
        return changed

    def _next_pass(self) -> bool:
        for number in self._swept:
            self._dead.discard(number)
            self._numbers.append(number)
        self._swept = set(self._dead)
        self._cursor, self._sweep_end = EMPTY + 1, len(self._members) if self._swept else 0
        return bool(self._swept)

    def _replace_dead(self, set_id: int) -> bool:
        held = self._members[set_id]
        if held is None or self._swept.isdisjoint(array("H", held)):
            return False
        target = self._id_of(self.members(set_id).tobytes())
        del self._ids[held]
        self._member_bytes -= len(held)
        self._members[set_id] = None
        self.forwarding.add(set_id)
        self._forward[set_id] = target
        self.hold(target, 1)
        return True

    # ------------------------------------------------------------ integrity

    def check_integrity(self, carried: NDArray[np.int64]) -> None:
        """Raises IntegrityError that names what does not add up.

        carried: how many rows of the tables carry each id.
        """
        expected = np.zeros(len(self._members), np.int64)
        expected[: len(carried)] += carried
        for set_id in self.forwarding:
            expected[self._forward[set_id]] += 1
        unused = set(self._unused)
        for set_id in range(EMPTY + 1, len(self._members)):
            held = self._members[set_id]
            _require(
                self._rows[set_id] == expected[set_id],
                f"set {set_id} counts {self._rows[set_id]} rows, {expected[set_id]} carry it",
            )
            _require(
                (set_id in unused) == (not self._rows[set_id]),
                f"set {set_id} has {self._rows[set_id]} rows and is in the wrong list",
            )
            _require(held is None or self._ids.get(held) == set_id, f"set {set_id} is not found by its members")
            _require(
                (held is None) == (set_id in unused or set_id in self.forwarding),
                f"set {set_id} has members, or none, wrongly",
            )
        _require(
            len(self._ids) - 1 == len(self._members) - 2 - len(unused) - len(self.forwarding),
            "a set is found that is not there",
        )
        _require(self._member_bytes == sum(map(len, self._ids)), "the bytes of the sets are miscounted")
        _require(self._rows[FREE] == 0, "rows carry the id of free slots")


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise IntegrityError(f"holder sets: {complaint}")

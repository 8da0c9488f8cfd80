"""Blocks that requests in flight are expected to create.

These are optimistic and short-lived. They are separate from the blocks that nodes reported.

A request's chain of hashes is stored once. Marks at some of its positions find it: each of the first 32 blocks, then 16
in each doubling of the depth. A chain that holds a block holds all before it. So bisection over a prompt's positions
finds its deepest marks, and the chains there are compared exactly. An answer is never longer than what the node is
expected to hold, and at most a sixteenth too short. A chain of 100,000 tokens has 150 marks.

An expectation ends when its node reports the last block (hit), when its time is over (missed) or when its node leaves.
It also ends when newer ones need room. A mark names only the newest chain of a node. When that one ends first, the node
has the shared blocks, unless it was withdrawn. When a chain is expected again, and all its marks still name it, only
its time is extended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import HASH_BYTES

MAX_MARKS = 1 << 18
# Bytes of a mark: its hash, its place in the dict and the dict of its chains. Rounded up.
MARK_BYTES = 400

# Marked positions in each doubling of the depth.
FINE = 16

# Chains at a prompt's deepest mark that are compared exactly, at most.
COMPARED = 8

# A node and the last block of a chain.
Key = tuple[str, bytes]


@dataclass(slots=True, eq=False)
class ExpectedChain:
    """The blocks that one request will create on a node."""

    node: str
    hashes: bytes
    until: float
    # Marks that name it, and no newer chain of its node.
    num_named: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def num_common(self, hashes: bytes, known: int) -> int:
        """Leading blocks that it shares with `hashes`, of which the first `known` are known to be shared."""
        low, high = known, min(self.num_blocks, len(hashes) // HASH_BYTES)
        while low < high:
            middle = (low + high + 1) // 2
            if _block(self.hashes, middle) == _block(hashes, middle):
                low = middle
            else:
                high = middle - 1
        return low


class ExpectedBlocks:
    """All expected chains. Owned by one thread."""

    def __init__(self, *, max_marks: int = MAX_MARKS) -> None:
        # Expectations that came true, that did not in time, and that ended for want of room.
        self.num_hits = self.num_missed = self.num_crowded_out = 0
        self._max_marks = max_marks
        self._marks: dict[bytes, dict[str, ExpectedChain]] = {}
        self._num_marks = 0
        self._chains: dict[Key, ExpectedChain] = {}
        # The last blocks of each node's chains.
        self._of_node: dict[str, set[bytes]] = {}
        # Heap of end times, as of when each chain was last checked. A chain that ended earlier stays until its time.
        self._ends: list[tuple[float, int, ExpectedChain]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def num_bytes(self) -> int:
        return MARK_BYTES * self._num_marks + sum(len(chain.hashes) for chain in self._chains.values())

    def add(self, node: str, hashes: bytes, until: float) -> None:
        """Expect the node to hold these blocks, until the time `until`."""
        if not hashes:
            return
        key, cuts = (node, hashes[_LAST]), _cuts(len(hashes) // HASH_BYTES)
        known = self._chains.pop(key, None)
        if known is not None:
            if known.num_named == len(cuts) and known.until <= until and known.hashes == hashes:
                known.until = until
                self._chains[key] = known  # behind the others again
                return
            self._chains[key] = known
            self._end(key)
        self._enter(key, cuts, ExpectedChain(node, hashes, until))

    def _enter(self, key: Key, cuts: Sequence[slice], chain: ExpectedChain) -> None:
        node, hashes, marks = chain.node, chain.hashes, self._marks
        self._chains[key] = chain
        self._of_node.setdefault(node, set()).add(key[1])
        heappush(self._ends, (chain.until, next(self._order), chain))
        for cut in cuts:
            held = marks.setdefault(hashes[cut], {})
            former = held.get(node)
            if former is None:
                self._num_marks += 1
            else:
                former.num_named -= 1
            held[node] = chain
        chain.num_named = len(cuts)
        while self._num_marks > self._max_marks:
            self._end(next(iter(self._chains)))
            self.num_crowded_out += 1

    def confirm(self, node: str, hashes: bytes) -> None:
        """The node reported that it holds these blocks."""
        expected = self._of_node.get(node)
        if not expected:
            return
        for block in [block for block in expected if _has_block(hashes, block)]:
            self._end((node, block))
            self.num_hits += 1

    def withdraw(self, node: str, hashes: bytes) -> None:
        """The node will not compute them. Blocks that its other chains share stay expected."""
        if not self._end((node, hashes[_LAST])):
            return
        others = [
            chain
            for block in self._of_node.get(node, ())
            if (chain := self._chains[node, block]).hashes[_FIRST] == hashes[_FIRST]
        ]
        marks, known = self._marks, 0
        for chain in sorted(others, key=attrgetter("until", "hashes"), reverse=True):
            for cut in _cuts(chain.num_common(hashes, 1))[
                known:
            ]:  # marks of the withdrawn chain; an earlier chain of the loop named those before
                held = marks.setdefault(hashes[cut], {})
                if node not in held:
                    held[node] = chain
                    chain.num_named += 1
                    self._num_marks += 1
                known += 1

    def drop(self, node: str) -> None:
        """The node left. Its expectations count neither as hits nor as misses."""
        for block in list(self._of_node.get(node, ())):
            self._end((node, block))

    def expire(self, now: float) -> None:
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, order, chain = heappop(ends)
            key = (chain.node, chain.hashes[-HASH_BYTES:])
            if self._chains.get(key) is not chain:
                continue
            if chain.until > now:
                heappush(ends, (chain.until, order, chain))  # it was expected again
            else:
                self._end(key)
                self.num_missed += 1

    def depths(self, hashes: bytes, now: float) -> dict[str, int]:
        """Leading blocks of the prompt that each node is expected to hold."""
        if self._ends and self._ends[0][0] <= now:
            self.expire(now)
        if not self._chains:
            return {}
        whole = self._marks.get(hashes[_LAST])
        if whole is not None and len(self._marks.get(hashes[_FIRST], ())) == len(whole):  # the usual case
            return dict.fromkeys(whole, len(hashes) // HASH_BYTES)
        found: dict[str, int] = {}
        levels = self._levels(hashes)
        for held, num_blocks in levels:
            found.update(dict.fromkeys(held, num_blocks))
        if levels:
            held, known = levels[-1]
            for chain in list(held.values())[-COMPARED:]:
                found[chain.node] = chain.num_common(hashes, known)
        return found

    def _levels(self, hashes: bytes) -> list[tuple[dict[str, ExpectedChain], int]]:
        """(chains, position) of the deepest mark of each group of nodes, shallow first.

        A deeper mark has no more nodes than a shallower one. So where two have equally many, all between have as many.
        """
        left, last = 1, _rank(len(hashes) // HASH_BYTES)
        held = self._at(hashes, 1) if last else {}
        levels: list[tuple[dict[str, ExpectedChain], int]] = []
        further = [(last, self._at(hashes, last))] if held else []
        while held:
            while further and len(further[-1][1]) >= len(held):
                left, held = further.pop()
            if not further:
                levels.append((held, _position(left)))
                break
            right = further[-1][0]
            if right > left + 1:
                middle = (left + right) // 2
                further.append((middle, self._at(hashes, middle)))
            else:
                levels.append((held, _position(left)))
                left, held = further.pop()
        return levels

    def _at(self, hashes: bytes, rank: int) -> dict[str, ExpectedChain]:
        return self._marks.get(_block(hashes, _position(rank)), {})

    def _end(self, key: Key) -> bool:
        """End a chain. False when it is gone."""
        chain = self._chains.pop(key, None)
        if chain is None:
            return False
        node, block = key
        self._of_node[node].discard(block)
        if not self._of_node[node]:
            del self._of_node[node]
        hashes, marks = chain.hashes, self._marks
        for cut in _cuts(len(hashes) // HASH_BYTES):
            mark = hashes[cut]
            held = marks.get(mark)
            if held is not None and held.get(node) is chain:
                del held[node]
                self._num_marks -= 1
                if not held:
                    del marks[mark]
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError when marks of ended chains are left, or are miscounted."""
        marks = [(mark, node, chain) for mark, held in self._marks.items() for node, chain in held.items()]
        _require(len(marks) == self._num_marks, f"{len(marks)} marks are there, {self._num_marks} are counted")
        named = {(node, block) for node, blocks in self._of_node.items() for block in blocks}
        _require(named == set(self._chains), "a node's chains are not those that are there")
        _require(all(self._marks.values()), "a mark without a chain is left")
        for mark, node, chain in marks:
            _require(
                self._chains.get((node, chain.hashes[-HASH_BYTES:])) is chain,
                f"mark {mark.hex()} names a chain that ended",
            )
        times_named = Counter(chain for _, _, chain in marks)
        _require(
            all(chain.num_named == times_named[chain] for chain in self._chains.values()),
            "marks that name a chain are miscounted",
        )
        ends = Counter(chain for _, _, chain in self._ends)
        _require(all(ends[chain] == 1 for chain in self._chains.values()), "a chain has no end, or several")


def _block(hashes: bytes, position: int) -> bytes:
    """The hash of the block at `position`, counted from 1."""
    return hashes[(position - 1) * HASH_BYTES : position * HASH_BYTES]


def _has_block(hashes: bytes, block: bytes) -> bool:
    """Whether the block is among the hashes.

    A node has few chains, but a report may have thousands of blocks. Searching bytes is faster than cutting them.
    """
    at = hashes.find(block)
    while at >= 0 and at % HASH_BYTES:
        at = hashes.find(block, at + 1)
    return at >= 0


def _position(rank: int) -> int:
    """The position of the mark of that rank. Both count from 1."""
    if rank <= FINE:
        return rank
    doublings, step = divmod(rank - FINE - 1, FINE)
    return (FINE + 1 + step) << doublings


def _rank(num_blocks: int) -> int:
    """The rank of the last mark within so many blocks."""
    if num_blocks <= FINE:
        return num_blocks
    doublings = num_blocks.bit_length() - FINE.bit_length()
    return FINE * doublings + (num_blocks >> doublings)


_kept_cuts: list[slice] = []
_FIRST, _LAST = slice(HASH_BYTES), slice(-HASH_BYTES, None)


def _cuts(num_blocks: int) -> list[slice]:
    """A slice for each mark, to cut it out of the hashes of so many blocks."""
    num_marks = _rank(num_blocks)
    for rank in range(len(_kept_cuts) + 1, num_marks + 1):
        end = _position(rank) * HASH_BYTES
        _kept_cuts.append(slice(end - HASH_BYTES, end))
    return _kept_cuts[:num_marks]


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise IntegrityError(f"expected blocks: {complaint}")

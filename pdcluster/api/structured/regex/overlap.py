"""Whether some text matches two regular expressions, found by walking both at once."""

from __future__ import annotations

from itertools import islice

from pdcluster.api.structured.regex.characters import ANY, Ranges, intersection
from pdcluster.api.structured.regex.tree import Alternation, Anchor, Chars, Node, Repeat, sequence

MAX_STATES = 2_000
MAX_PAIRS = 20_000

ANYTHING = Repeat(Chars(ANY), 0, None)


class TooIntricate(Exception):
    """The check would take too long."""


class _Machine:
    """An automaton. State 0 is the start, state 1 the end."""

    def __init__(self, node: Node) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = [[], []]
        self.jumps: list[list[int]] = [[], []]
        self._build(node, 0, 1)

    def _new(self) -> int:
        if len(self.steps) >= MAX_STATES:
            raise TooIntricate
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def _build(self, node: Node, begin: int, end: int) -> None:
        assert not isinstance(node, Anchor)
        if isinstance(node, Chars):
            self.steps[begin].append((node.ranges, end))
        elif isinstance(node, Alternation):
            for option in node.options:
                self._build(option, begin, end)
        elif isinstance(node, Repeat):
            self._repeat(node, begin, end)
        else:
            for item in node.items:
                after = self._new()
                self._build(item, begin, after)
                begin = after
            self.jumps[begin].append(end)

    def _repeat(self, node: Repeat, begin: int, end: int) -> None:
        for _ in range(node.least):
            after = self._new()
            self._build(node.item, begin, after)
            begin = after
        if node.most is None:
            again = self._new()
            self.jumps[begin].append(again)
            self._build(node.item, again, again)
            self.jumps[again].append(end)
            return
        for _ in range(node.most - node.least):
            self.jumps[begin].append(end)
            after = self._new()
            self._build(node.item, begin, after)
            begin = after
        self.jumps[begin].append(end)


def overlap(one: Node, other: Node) -> bool:
    """Raises TooIntricate."""
    left, right = _Machine(one), _Machine(other)
    seen, waiting = {(0, 0)}, [(0, 0)]
    while waiting:
        if len(seen) > MAX_PAIRS:
            raise TooIntricate
        a, b = waiting.pop()
        if (a, b) == (1, 1):
            return True
        nexts = [(jump, b) for jump in left.jumps[a]] + [(a, jump) for jump in right.jumps[b]]
        nexts += [(c, d) for these, c in left.steps[a] for those, d in right.steps[b] if intersection(these, those)]
        waiting += [pair for pair in dict.fromkeys(nexts) if pair not in seen]
        seen.update(nexts)
    return False


def of_text(text: str) -> Node:
    """An automaton of this text alone."""
    return sequence([Chars(((ord(char), ord(char)),)) for char in islice(text, None)])

r"""Regular expressions of requests as trees. Only what Python and ECMAScript read alike is accepted; the rest is
refused by name.

Where they differ, the smaller set counts: \d is 0 to 9, and \D excludes every script's digits. ^ and $ are the
beginning and the end of the text; `Sides` tells which of them a part requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdcluster.api.structured.regex.characters import Ranges


@dataclass(frozen=True, slots=True)
class Chars:
    """One character."""

    ranges: Ranges
    has_anchor = False


@dataclass(frozen=True, slots=True)
class Anchor:
    """^ or $."""

    is_start: bool
    has_anchor = True


@dataclass(frozen=True, slots=True)
class Concatenation:
    items: tuple[Node, ...]
    has_anchor: bool = False


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of the options. Without any, nothing matches."""

    options: tuple[Node, ...]
    has_anchor: bool = False


@dataclass(frozen=True, slots=True)
class Repeat:
    """most None: unbounded. It contains no anchor."""

    item: Node
    least: int
    most: int | None
    has_anchor = False


Node = Chars | Anchor | Concatenation | Alternation | Repeat
EMPTY = Concatenation(())

# Whether a text must stand at the beginning, and at the end.
Sides = tuple[bool, bool]


def sequence(items: list[Node]) -> Node:
    items = [item for item in items if item != EMPTY]
    return items[0] if len(items) == 1 else Concatenation(tuple(items), any(item.has_anchor for item in items))


def choice(options: list[Node]) -> Node:
    return (
        options[0] if len(options) == 1 else Alternation(tuple(options), any(option.has_anchor for option in options))
    )


def lengths(node: Node) -> tuple[int, int | None]:
    """The least and the most characters of a match."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Anchor):
        return 0, 0
    if isinstance(node, Repeat):
        least, most = lengths(node.item)
        if most == 0 or node.most == 0:
            return 0, 0
        return least * node.least, None if most is None or node.most is None else most * node.most
    bounds = [lengths(each) for each in (node.items if isinstance(node, Concatenation) else node.options)]
    ends = [most for _, most in bounds if most is not None]
    if isinstance(node, Concatenation):
        return sum(least for least, _ in bounds), sum(ends) if len(ends) == len(bounds) else None
    return min((least for least, _ in bounds), default=0), max(ends, default=0) if len(ends) == len(bounds) else None


# ---------------------------------------------------------------- anchors


def without_anchors(node: Node) -> Mapping[Sides, Node]:
    """The matches by whether they must stand at the beginning and at the end; {} for none."""
    if not node.has_anchor:
        return {(False, False): node}
    if isinstance(node, Anchor):
        return {(node.is_start, not node.is_start): EMPTY}
    assert isinstance(node, Concatenation | Alternation)
    if isinstance(node, Alternation):
        return _joined(pair for option in node.options for pair in without_anchors(option).items())
    states: Mapping[Sides, list[Node]] = {(False, False): []}
    for item in node.items:
        if not item.has_anchor:
            states = {
                sides: nodes if sides[1] else [*nodes, item]
                for sides, nodes in states.items()
                if not sides[1] or lengths(item)[0] == 0
            }
            continue
        found = without_anchors(item)
        after = [_after(sides, nodes, more, part) for sides, nodes in states.items() for more, part in found.items()]
        states = {sides: [part] for sides, part in _joined(pair for pair in after if pair is not None).items()}
    return {sides: sequence(nodes) for sides, nodes in states.items()}


def _after(sides: Sides, nodes: list[Node], more: Sides, part: Node) -> tuple[Sides, Node] | None:
    """A part behind others. One that stands at the beginning has nothing before it, and nothing follows one that stands
    at the end.
    """
    (starts, ends), (part_starts, part_ends) = sides, more
    if part_starts:
        if any(lengths(node)[0] for node in nodes):
            return None
        starts, nodes = True, []
    if not ends:
        return (starts, part_ends), sequence([*nodes, part])
    return ((starts, True), sequence(nodes)) if lengths(part)[0] == 0 else None


def _joined(pairs: Iterator[tuple[Sides, Node]] | list[tuple[Sides, Node]]) -> dict[Sides, Node]:
    by_sides: dict[Sides, list[Node]] = {}
    for sides, node in pairs:
        by_sides.setdefault(sides, []).append(node)
    return {sides: choice(nodes) for sides, nodes in by_sides.items()}


# ---------------------------------------------------------------- lengths


def with_length(node: Node, least: int, most: int | None) -> Node | None:
    """Texts of this length of a node without anchors; None when there are none. Where several parts vary, each gets a
    share of the room. So fewer texts match, but none that is too short or too long.
    """
    shortest, longest = lengths(node)
    if least <= shortest and (most is None or (longest is not None and longest <= most)):
        return node
    if (most is not None and (shortest > most or least > most)) or (longest is not None and longest < least):
        return None
    if isinstance(node, Alternation):
        options = [fit for option in node.options if (fit := with_length(option, least, most)) is not None]
        return choice(options) if options else None
    if isinstance(node, Repeat):
        return _repeat_with_length(node, least, most)
    assert isinstance(node, Concatenation)
    return _sequence_with_length(node, least, most)


def _sequence_with_length(node: Concatenation, least: int, most: int | None) -> Node | None:
    bounds = [lengths(item) for item in node.items]
    num_variable = sum(low != high for low, high in bounds)
    room = None if most is None else most - sum(low for low, _ in bounds)
    missing = max(least - sum(low for low, _ in bounds), 0)
    items: list[Node] = []
    for item, (low, high) in zip(node.items, bounds, strict=True):
        if low == high:
            items.append(item)
            continue
        can = None if high is None else high - low
        share = can if room is None else room // num_variable if can is None else min(can, room // num_variable)
        if num_variable == 1 and room is not None:
            share = room if can is None else min(can, room)
        wanted = missing if share is None else min(missing, share)
        fit = with_length(item, low + wanted, None if share is None else low + share)
        if fit is None:
            return None
        got_least, got_most = lengths(fit)
        missing = max(missing - (got_least - low), 0)
        room = None if room is None else room - ((got_most or 0) - low)
        num_variable -= 1
        items.append(fit)
    return None if missing else sequence(items)


def _repeat_with_length(node: Repeat, least: int, most: int | None) -> Node | None:
    low, high = lengths(node.item)
    item: Node | None = node.item
    if low == 0 and node.item != EMPTY:  # an empty iteration adds nothing
        item, low = with_length(node.item, 1, None), 1
        node = Repeat(node.item, 0, node.most)
    if most is not None and (high is None or high * max(node.least, 1) > most):
        high = max(most // max(node.least, 1, 2 if node.most is None or node.most > 1 else 1), low)
        item = None if item is None else with_length(item, 1 if node.least == 0 else 0, high)
    if item is None or low == 0:
        return EMPTY if least == 0 and node.least == 0 else None
    low, high = lengths(item)
    fewest = max(node.least, -(-least // low))
    turns = None if most is None else most // (high or most)
    if node.most is not None:
        turns = node.most if turns is None else min(turns, node.most)
    if turns and turns < fewest and (longer := with_length(item, -(-least // turns), high)) is not None:
        item = longer
        fewest = max(node.least, -(-least // lengths(item)[0]))
    if turns is not None and turns < fewest:
        return EMPTY if least == 0 and node.least == 0 else None
    return Repeat(item, fewest, turns)

"""Sets of characters as sorted ranges of code points, and their spelling in xgrammar and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

# Both ends included; sorted, disjoint, without halves of surrogate pairs.
Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

NAMED_ESCAPES = {ord(char): json.dumps(char)[1:-1] for char in '"\\\b\f\n\r\t'}
UTF8_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))
CONTROLS = ((0, 0x1F),)
# Written as \uXXXX, because they are syntax there, or brackets in a text would count as nesting.
NOT_PLAIN = frozenset("|[](){}.*+?^$\\-/\"'")


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple(joined)


def of_text(characters: str) -> Ranges:
    return ranges_of((ord(char), ord(char)) for char in characters)


def union(*sets: Ranges) -> Ranges:
    return ranges_of(pair for each in sets for pair in each)


def _gaps(ranges: Ranges) -> Ranges:
    gaps, begin = [], 0
    for low, high in ranges:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, LAST)) if begin <= LAST else tuple(gaps)


def complement(ranges: Ranges) -> Ranges:
    """All other characters. Halves of surrogate pairs are none."""
    return _gaps(union(ranges, (SURROGATES,)))


def intersection(one: Ranges, other: Ranges) -> Ranges:
    found = [(max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) <= min(b, d)]
    return ranges_of(found)


def minus(one: Ranges, other: Ranges) -> Ranges:
    return intersection(one, _gaps(other))


DIGIT = of_text("0123456789")
WORD = ranges_of([(48, 57), (65, 90), (95, 95), (97, 122)])
SPACE = of_text(" \t\n\r\f\v")
LINE_ENDS = of_text("\n\r\u2028\u2029")
ANY = complement(())
NOT_LINE_END = complement(LINE_ENDS)


@lru_cache(maxsize=3)
def widest(letter: str) -> Ranges:
    r"""All that \d, \w or \s means to any reader: Python counts letters of every script, JavaScript U+FEFF."""
    everything = "".join(map(chr, range(LAST + 1)))
    found = ranges_of((match.start(), match.end() - 1) for match in re.finditer(rf"\{letter}+", everything))
    return union(found, of_text("\ufeff")) if letter == "s" else found


# ---------------------------------------------------------------- written down


def literal(code: int) -> str:
    """A character within a class or an expression."""
    char = chr(code)
    if code < 0x20 or char in NOT_PLAIN or code in (0x7F, 0xFEFF):
        return f"\\u{code:04x}"
    return char


def bracketed(ranges: Ranges) -> str:
    """A class of a rule."""
    first, *others = ranges
    if first[0] == ord("^") and (others or first[0] != first[1]):  # at the front it would negate the class
        others = (
            [*others, (first[0], first[0])]
            if first[0] == first[1]
            else [(first[0] + 1, first[1]), *others, (first[0], first[0])]
        )
        return f"[{''.join(map(_range, others))}]"
    return f"[{''.join(map(_range, ranges))}]"


def alternatives(ranges: Ranges) -> str:
    """The same for xgrammar's Regex: a class for each length in UTF-8. A class of several lengths would accept overlong
    bytes.
    """
    return "|".join(bracketed(part) for bounds in UTF8_LENGTHS if (part := intersection(ranges, (bounds,))))


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    if low == high:
        return literal(low)
    return literal(low) + ("" if high == low + 1 else "-") + literal(high)


class Escaped(NamedTuple):
    r"""Characters by spelling in a JSON string: plain, a backslash and a letter, or \u00 and two digits."""

    plain: Ranges
    pending_messages: Ranges
    coded: Mapping[str, Ranges]


def escaped(ranges: Ranges) -> Escaped:
    """A character that may be plain is plain. Every other one has one spelling."""
    special = ranges_of((code, code) for code in NAMED_ESCAPES)
    coded = minus(intersection(ranges, CONTROLS), special)
    digits = {str(high): "".join(f"{low:x}" for low in range(16) if _has(coded, 16 * high + low)) for high in range(2)}
    pending_messages = "".join(letter[1] for code, letter in NAMED_ESCAPES.items() if _has(ranges, code))
    return Escaped(
        minus(ranges, union(CONTROLS, special)),
        of_text(pending_messages),
        {high: of_text(low) for high, low in digits.items() if low},
    )


def _has(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)

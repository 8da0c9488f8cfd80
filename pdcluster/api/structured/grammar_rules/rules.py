"""The rules of a grammar under construction: parts with one name each, without parts that never end, written as
xgrammar's EBNF.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """An expression that xgrammar compiles itself, which is fast. It is not exact in all cases, so only expressions
    that a test covers use it.
    """

    expression: str


@dataclass(frozen=True, slots=True)
class Class:
    """A number of characters of a class. xgrammar counts them without a state for each, as for no other part."""

    expression: str
    least: int = 1
    most: int | None = 1


@dataclass(frozen=True, slots=True)
class NamedRule:
    name: str


@dataclass(frozen=True, slots=True)
class RuleSequence:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Without options, nothing matches it."""

    options: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Many:
    part: Part
    least: int
    most: int | None


Part = Text | Regex | Class | NamedRule | RuleSequence | OneOf | Many
SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}

NOTHING = OneOf(())
EMPTY = RuleSequence(())


def row(*parts: Part) -> Part:
    return RuleSequence(parts)


def one_of(options: list[Part]) -> Part:
    """An alternative without duplicates."""
    different = tuple(dict.fromkeys(options))
    return different[0] if len(different) == 1 else OneOf(different)


class GrammarRules:
    """name: names a part; equal parts share a name.
    reserve, define: name a part before its content is known.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._names: dict[Part, NamedRule] = {}
        self._circular: dict[Hashable, NamedRule] = {}

    def reserve(self) -> NamedRule:
        named = NamedRule(f"r{len(self._parts)}")
        self._parts[named.name] = NOTHING
        return named

    def define(self, named: NamedRule, part: Part) -> None:
        self._parts[named.name] = part

    def name(self, part: Part) -> Part:
        if isinstance(part, NamedRule | Text) or part == NOTHING:
            return part
        if part not in self._names:
            self._names[part] = named = self.reserve()
            self.define(named, part)
        return self._names[part]

    def circular(self, key: Hashable, written: Callable[[Part], Part]) -> Part:
        """A part that refers to itself, the same for the same key. written: creates its content from its name."""
        if key not in self._circular:
            self._circular[key] = named = self.reserve()
            self.define(named, written(named))
        return self._circular[key]

    def written(self, root: Part) -> str | None:
        """None when nothing that ends matches."""
        ending = self._ending()
        kept = _pruned(root, ending)
        if kept == NOTHING:
            return None
        lines, waiting, seen = [f"root ::= {_written(kept)}"], _names_in(kept), set[str]()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                part = _pruned(self._parts[name], ending)
                lines.append(f"{name} ::= {_written(part)}")
                waiting += _names_in(part)
        return "\n".join(lines) + "\n"

    def _ending(self) -> set[str]:
        """Names of rules that some finite text matches, found from those that need no other rule."""
        users: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            for used in _names_in(part):
                users.setdefault(used, []).append(name)
        ending, waiting = set[str](), list(self._parts)
        while waiting:
            name = waiting.pop()
            if name not in ending and _ends(self._parts[name], ending):
                ending.add(name)
                waiting += users.get(name, ())
        return ending


def _ends(part: Part, ending: set[str]) -> bool:
    if isinstance(part, NamedRule):
        return part.name in ending
    if isinstance(part, RuleSequence):
        return all(_ends(each, ending) for each in part.parts)
    if isinstance(part, OneOf):
        return any(_ends(each, ending) for each in part.options)
    return not isinstance(part, Many) or part.least == 0 or _ends(part.part, ending)


def _pruned(part: Part, ending: set[str]) -> Part:
    """The part without options that never end."""
    if not _ends(part, ending):
        return NOTHING
    if isinstance(part, RuleSequence):
        return RuleSequence(tuple(_pruned(each, ending) for each in part.parts))
    if isinstance(part, OneOf):
        return one_of([_pruned(each, ending) for each in part.options if _ends(each, ending)])
    if isinstance(part, Many):
        inner = _pruned(part.part, ending)
        return EMPTY if inner == NOTHING else Many(inner, part.least, part.most)
    return part


def _names_in(part: Part) -> list[str]:
    if isinstance(part, NamedRule):
        return [part.name]
    if isinstance(part, Many):
        return _names_in(part.part)
    inner = part.parts if isinstance(part, RuleSequence) else part.options if isinstance(part, OneOf) else ()
    return [name for each in inner for name in _names_in(each)]


def _written(part: Part) -> str:
    if isinstance(part, NamedRule):
        return part.name
    if isinstance(part, Text):
        return quoted(part.text)
    if isinstance(part, Regex):
        return f"Regex({json.dumps(part.expression, ensure_ascii=False)})"
    if isinstance(part, Class):
        return part.expression + count(part.least, part.most)
    if isinstance(part, Many):
        return f"({_written(part.part)}){count(part.least, part.most)}"
    if isinstance(part, RuleSequence):
        return " ".join(_written(each) for each in part.parts) or '""'
    return f"({' | '.join(_written(option) for option in part.options)})"


def count(least: int, most: int | None) -> str:
    """A repetition count in EBNF."""
    if (sign := SIGNS.get((least, most))) is not None:
        return sign
    if most is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def quoted(text: str) -> str:
    """A text in EBNF. Brackets are escaped, because they would count as nesting."""
    return f'"{"".join(_coded(char) for char in text)}"'


def _coded(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if char in "()[]{}" or ord(char) < 0x20 or ord(char) == 0x7F else char

"""Objects of a JSON schema as parts of a grammar: properties in order, then members with other names.

A grammar cannot tell repeated names among the other members, so they count as one member. None of them has a declared
name: of two members with one name, readers keep the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdcluster.api.structured.grammar_rules.rules import EMPTY, NOTHING, Many, Part, Text, one_of, row
from pdcluster.api.structured.json_grammar.kinds import given_kinds
from pdcluster.api.structured.json_grammar.strings import (
    anywhere,
    expression_in,
    plain_string,
    quoted,
    variants_of,
    whole_text,
)
from pdcluster.api.structured.json_grammar.values import Converter, mapping, not_kept, whole_number
from pdcluster.api.structured.regex.characters import complement
from pdcluster.api.structured.regex.characters import of_text as characters_of
from pdcluster.api.structured.regex.overlap import ANYTHING, TooIntricate, of_text, overlap
from pdcluster.api.structured.regex.tree import Chars, Node, Repeat, choice, sequence
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

Schema = Mapping[str, Any]

MAX_STATES = 20_000


class Property(NamedTuple):
    name: str
    value: Part
    is_required: bool


class Other(NamedTuple):
    """Undeclared members: their name as written, and their value."""

    name: Part
    value: Part


def object_(make: Converter, node: Schema, path: str) -> Part:
    names = _Names(make, node, path)
    properties = names.declared()
    least = whole_number(node, "minProperties", path) or 0
    most = whole_number(node, "maxProperties", path)
    if most is not None and most < max(least, sum(each.is_required for each in properties)):
        raise BadRequest(
            f"{path} has a maxProperties of {most}, below what it requires; no object has so few, correct it", path
        )
    others = names.others()
    if least > len(properties) + bool(others):
        raise not_kept(
            path, f"minProperties {least} with names that are not declared", "they could repeat; declare properties"
        )
    if len(properties) * (least + (most or 0) + 1) > MAX_STATES:
        raise not_kept(path, "minProperties or maxProperties with so many properties", "leave them out")
    members = _Members(
        make,
        properties,
        [row(each.name, make.space, Text(":"), make.space, each.value, make.space) for each in others],
        least,
        most,
    )
    return row(Text("{"), make.space, members.written(), Text("}"))


# ---------------------------------------------------------------- which names


class _Names:
    """The names that members may have. Patterns match anywhere in a name."""

    def __init__(self, make: Converter, node: Schema, path: str) -> None:
        self._make, self._node, self._path = make, node, path
        self._properties = mapping(node, "properties", path)
        self._patterns = mapping(node, "patternProperties", path)
        self._variants = {pattern: variants_of(pattern, f"{path}.patternProperties") for pattern in self._patterns}
        required = node.get("required") or []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise BadRequest(f"{path}.required is {shown(required)}; it must be a list of names", path)
        self._required: list[str] = required
        self._names = node.get("propertyNames")

    @property
    def _additional(self) -> object:
        """The schema of members outside properties and patternProperties. When absent, such members are allowed only if
        neither is there.
        """
        given = self._node.get("additionalProperties")
        if given is None:
            return "properties" not in self._node and "patternProperties" not in self._node
        return given

    def declared(self) -> list[Property]:
        """In order. Those that only `required` names come last."""
        names = dict.fromkeys([*self._properties, *self._required])
        return [each for name in names if (each := self._declared(name)) is not None]

    def _declared(self, name: str) -> Property | None:
        """None for a name that may not occur."""
        at, is_required = f"{self._path}.properties.{name}", name in self._required
        schemas = [self._properties[name]] if name in self._properties else []
        schemas += [schema for pattern, schema in self._patterns.items() if self._matches(pattern, name)]
        if not schemas:
            given = self._node.get("additionalProperties")
            schemas = [True if given is None else given]
        telling = [schema for schema in schemas if schema is not True and schema != {}]
        if any(schema != telling[0] for schema in telling[1:]):
            raise not_kept(at, "a name that patternProperties matches, too", "give both the same schema")
        value = self._make.convert(telling[0], at) if telling else self._make.any_value()
        if not self._allows(name) or value == NOTHING:
            return Property(name, NOTHING, True) if is_required else None
        return Property(name, value, is_required)

    def _matches(self, pattern: str, name: str) -> bool:
        return self._overlap(anywhere(self._variants[pattern]), of_text(name))

    def _overlap(self, one: Node, other: Node) -> bool:
        try:
            return overlap(one, other)
        except TooIntricate as error:
            raise not_kept(
                self._path, "patterns of names that are too intricate to compare", "send simpler ones"
            ) from error

    def _allows(self, name: str) -> bool:
        names = self._names
        if names is None or names is True or names == {}:
            return True
        if names is False:
            return False
        expression = self._named(anywhere_too=True)
        return expression is None or self._overlap(expression, of_text(name))

    def _named(self, *, anywhere_too: bool = False) -> Node | None:
        """What propertyNames requires of a name. Only string keywords count; None without any."""
        names, at = self._names, f"{self._path}.propertyNames"
        if not isinstance(names, dict):
            raise BadRequest(f"{at} is {shown(names)}; it must be a schema", at)
        given = [word for word in ("enum", "const") if word in names]
        unknown = set(names) & {"$ref", "anyOf", "oneOf", "allOf", "not", "if"} | set(given[1:])
        if unknown or (given and set(names) & {"pattern", "format", "minLength", "maxLength"}):
            raise not_kept(at, "more than a pattern, a format, lengths or an enum", "leave the rest out")
        if "string" not in (given_kinds(names, at) or ("string",)):
            raise BadRequest(f"{at} has the type {shown(names['type'])}; names are strings", at)
        if given:
            values = names["enum"] if given == ["enum"] else [names["const"]]
            texts = [of_text(value) for value in values if isinstance(value, str)] if isinstance(values, list) else []
            if not texts:
                raise BadRequest(f"{at}.{given[0]} has no string; names are strings", at)
            return choice(texts)
        least, most = whole_number(names, "minLength", at) or 0, whole_number(names, "maxLength", at)
        if names.get("pattern") is not None and anywhere_too and least == 0 and most is None:
            return anywhere(variants_of(names["pattern"], f"{at}.pattern"))
        expression = expression_in(names, at, least, most)
        if expression is None and (least or most is not None):
            return Repeat(ANYTHING.item, least, most)
        return expression

    # ------------------------------------------------------------ members that are not declared

    def others(self) -> list[Other]:
        if self._names is False:
            return []
        has_names = not (self._names is None or self._names is True or self._names == {})
        if self._patterns:
            if has_names and any(schema is not False for schema in self._patterns.values()):
                raise not_kept(self._path, "propertyNames beside patternProperties", "leave one of them out")
            return self._patterned()
        schema = self._additional
        if schema is False:
            return []
        value = self._make.convert(schema, f"{self._path}.additionalProperties")
        if value == NOTHING:
            return []
        return [Other(self._make.rules.name(self._other_name(has_names=has_names)), value)]

    def _other_name(self, *, has_names: bool) -> Part:
        declared = list(dict.fromkeys([*self._properties, *self._required]))
        expression = self._named() if has_names else None
        if expression is None:
            return quoted(self._make.rules, _none_of(declared)) if declared else plain_string()
        for name in declared:
            if self._overlap(expression, of_text(name)):
                raise not_kept(
                    self._path,
                    f"propertyNames that allow the declared name {shown(name)} beside additionalProperties",
                    "leave one out",
                )
        return quoted(self._make.rules, expression)

    def _patterned(self) -> list[Other]:
        """Members of each pattern. A pattern that overlaps another or a declared name would have to match both."""
        others: list[Other] = []
        declared = dict.fromkeys([*self._properties, *self._required])
        for pattern, schema in self._patterns.items():
            if schema is False:
                continue
            names = whole_text(self._variants[pattern])
            for again, different in self._patterns.items():
                if again != pattern and different != schema and self._overlap(names, anywhere(self._variants[again])):
                    raise not_kept(
                        self._path,
                        f"patternProperties {shown(pattern)} and {shown(again)} that a name may both match",
                        "keep them apart",
                    )
            if any(
                self._properties.get(name, schema) != schema and self._overlap(names, of_text(name))
                for name in declared
            ):
                raise not_kept(
                    self._path,
                    f"patternProperties {shown(pattern)} that matches a declared name",
                    "give both the same schema",
                )
            value = self._make.convert(schema, f"{self._path}.patternProperties.{pattern}")
            if value != NOTHING:
                others.append(Other(self._make.rules.name(quoted(self._make.rules, names)), value))
        return others


def _none_of(names: list[str]) -> Node:
    """Any text but these: texts that leave the common tree somewhere, and proper prefixes."""
    following: dict[str, set[str]] = {}
    for name in names:
        for index in range(len(name) + 1):
            following.setdefault(name[:index], set()).update(name[index : index + 1])
    options: list[Node] = []
    for begin, nexts in following.items():
        head = [Chars(((ord(char), ord(char)),)) for char in begin]
        options.append(sequence([*head, Chars(complement(characters_of("".join(nexts)))), ANYTHING]))
        if begin not in names:
            options.append(sequence([*head]) if head else sequence([]))
    return choice(options)


# ---------------------------------------------------------------- how many of them


class _Members:
    """Members in sequence. A state is the number of properties passed and the number of members written, as far as that
    counts.
    """

    def __init__(
        self, make: Converter, properties: list[Property], others: list[Part], least: int, most: int | None
    ) -> None:
        self._make = make
        self._properties = properties
        self._others = [make.rules.name(one_of(others))] if others else []
        self._least, self._most = least, most
        self._cap = max(1, least) if most is None else max(1, most)
        self._states: dict[tuple[int, int], Part] = {}

    def written(self) -> Part:
        """From the last property to the first, so that long lists need no recursion."""
        for index in range(len(self._properties), -1, -1):
            for number in range(min(index, self._cap) + 1):
                self._states[index, number] = self._make.rules.name(self._state(index, number))
        return self._states[0, 0]

    def _state(self, index: int, number: int) -> Part:
        """What may follow in a state."""
        if index == len(self._properties):
            return self._end(number)
        each = self._properties[index]
        options: list[Part] = [] if each.is_required else [self._states[index + 1, number]]
        if self._most is None or number < self._most:
            key = Text(json.dumps(each.name, ensure_ascii=False))
            member = [key, self._make.space, Text(":"), self._make.space, each.value, self._make.space]
            options.insert(
                0, row(*self._separator(number), *member, self._states[index + 1, min(number + 1, self._cap)])
            )
        return one_of(options)

    def _separator(self, number: int) -> list[Part]:
        return [Text(","), self._make.space] if number else []

    def _end(self, number: int) -> Part:
        options: list[Part] = [EMPTY] if number >= self._least else []
        room = None if self._most is None else self._most - number
        if self._others and number + 1 >= self._least and room != 0:
            more = Many(row(Text(","), self._make.space, self._others[0]), 0, None if room is None else room - 1)
            options.append(row(*self._separator(number), self._others[0], more))
        return one_of(options)

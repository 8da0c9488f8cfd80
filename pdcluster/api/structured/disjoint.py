"""Whether two parts of a `oneOf` surely never match the same value. Then they may stand in an `anyOf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
# A schema, or the target of its reference.
Resolve = Callable[[object], object]

KINDS = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
# Keywords of one type. They imply the type where none is given.
KEYWORDS: Mapping[str, frozenset[str]] = {
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset((
        "properties", "additionalProperties", "required", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    )),
}  # fmt: skip
CHOSEN = frozenset(("$ref", "const", "enum", "anyOf", "oneOf", "allOf"))
# Depth of nested properties.
MAX_LOOKS = 8


def differ(
    one: object, other: object, resolve: Resolve, tag: str = "", looks: int = MAX_LOOKS, *, are_closed: bool = True
) -> bool:
    """False also when that is unknown. tag: a property that both will require. are_closed: where they stand no
    undeclared properties come."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or not looks:
        return False
    values, those = values_of(one), values_of(other)
    if values is not None and those is not None:
        return not {_identity(each) for each in values} & {_identity(each) for each in those}
    if not kinds_of(one) & kinds_of(other):
        return True
    if kinds_of(one) != {"object"} or kinds_of(other) != {"object"}:
        return False
    tags = {tag} if tag else set[str]()
    both = (_required(one) | tags) & (_required(other) | tags)
    mine, theirs = _properties(one), _properties(other)
    if any(differ(mine.get(name, {}), theirs.get(name, {}), resolve, "", looks - 1) for name in both):
        return True
    return are_closed and _lacks(one, other) and _lacks(other, one)


def common_properties(parts: Sequence[object]) -> list[str]:
    """Properties that all declare, when all are objects."""
    if not parts or any(not isinstance(part, dict) or kinds_of(part) != {"object"} for part in parts):
        return []
    first, *others = (_properties(part) for part in parts if isinstance(part, dict))
    return [name for name in first if all(name in each for each in others)]


def kinds_of(node: object) -> set[str]:
    """All types that a schema allows, every integer a number too."""
    values = values_of(node) if isinstance(node, dict) else None
    if values is not None:
        found = {_kind_of(value) for value in values}
    else:
        given = node.get("type") if isinstance(node, dict) else None
        named = given if isinstance(given, list) else [given]
        found = {each for each in named if isinstance(each, str)} or set(KINDS)
    return found | {"integer"} if "number" in found else found


def implied_kinds(node: Schema) -> list[str]:
    """Types that keywords imply where none is given."""
    if not CHOSEN.isdisjoint(node):
        return []
    return [kind for kind, words in KEYWORDS.items() if not words.isdisjoint(node)]


def values_of(node: Schema) -> list[object] | None:
    """All values that it allows; None where they are not listed."""
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {str: "string", float: "number", dict: "object", list: "array"}[type(value)]


def _identity(value: object) -> object:
    """Equal for values that a schema treats as equal: 1 and 1.0, but not true."""
    if isinstance(value, dict):
        return "object", frozenset((key, _identity(each)) for key, each in value.items())
    if isinstance(value, list):
        return "array", tuple(_identity(each) for each in value)
    return isinstance(value, bool), value


def _properties(node: Schema) -> Schema:
    found = node.get("properties")
    return found if isinstance(found, dict) else {}


def _required(node: Schema) -> set[str]:
    found = node.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _lacks(one: Schema, other: Schema) -> bool:
    """Whether one, whose undeclared properties do not come, lacks something that the other requires."""
    is_closed = (
        bool(_properties(one))
        and one.get("additionalProperties") in (None, False)
        and not one.get("patternProperties")
        and CHOSEN.isdisjoint(one)
    )
    return is_closed and bool(_required(other) - _properties(one).keys() - _required(one))

"""The types of a value or a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

Schema = Mapping[str, Any]

KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
# Keywords of a single type. They imply the type where none is given.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "additionalProperties",
        "required",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
# Values that ask for nothing; null does so everywhere.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "minLength": (0,), "minItems": (0,), "minProperties": (0,), "required": ([],), "additionalProperties": (True, {}),
    "items": (True, {}),
    "additionalItems": (True, {}), "propertyNames": (True, {}), "patternProperties": ({},), "prefixItems": ([],),
    "allOf": ([],),
}  # fmt: skip


def asks(node: Schema, keyword: str) -> bool:
    """Whether a keyword is there and asks for something."""
    if keyword not in node or (node[keyword] is None and keyword != "const"):
        return False
    value = node[keyword]
    return not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(keyword, ()))


def kind_of(value: object) -> str:
    """The narrowest type."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {str: "string", float: "number", dict: "object", list: "array"}[type(value)]


def is_of(value: object, kinds: tuple[str, ...]) -> bool:
    kind = kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def given_kinds(node: Schema, path: str) -> tuple[str, ...] | None:
    """What `type` names; None where it is absent. Raises BadRequest for what is no type."""
    given = node.get("type")
    if given is None:
        return None
    kinds = given if isinstance(given, list) else [given]
    for kind in kinds:
        if kind not in KINDS:
            raise BadRequest(f"{path}.type is {shown(kind)}; a type is one of {', '.join(KINDS)}", path)
    if not kinds:
        raise BadRequest(f"{path}.type is []; name at least one type", path)
    return tuple(kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds)


def values_of(node: Schema) -> list[object] | None:
    """All values that it allows; None where they are not listed."""
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def kinds_of(node: Schema) -> tuple[str, ...] | None:
    """All types that the schema itself allows; None where it names none."""
    values, given = values_of(node), node.get("type")
    if values is not None:
        return tuple(kind_of(value) for value in values)
    if given is not None:
        return tuple(kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str))
    if any(word in node for word in ("$ref", "anyOf", "oneOf", "allOf")):
        return None
    return told_kinds(node) or None


def told_kinds(node: Schema) -> tuple[str, ...]:
    """Types that keywords imply."""
    return tuple(kind for kind, words in KEYWORDS.items() if any(asks(node, word) for word in words))

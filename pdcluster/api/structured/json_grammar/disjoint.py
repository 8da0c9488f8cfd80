"""Whether two parts of a `oneOf` surely never match the same value. Then a grammar of one part is right for the
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdcluster.api.structured.json_grammar.kinds import KINDS, kind_of, kinds_of, values_of

Schema = Mapping[str, Any]
# A schema, or the target of its reference.
Resolve = Callable[[object], object]

# Depth of nested properties.
MAX_LOOKS = 8


def identity(value: object) -> object:
    """Equal for values that a schema treats as equal: 1 and 1.0, but not true."""
    if isinstance(value, dict):
        return "object", frozenset((key, identity(each)) for key, each in value.items())
    if isinstance(value, list):
        return "array", tuple(identity(each) for each in value)
    return ("number" if kind_of(value) == "integer" else kind_of(value)), value


def differ(one: object, other: object, resolve: Resolve, looks: int = MAX_LOOKS) -> bool:
    """Whether the two surely differ. False also when that is unknown."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or not looks:
        return False
    mine, theirs = _kinds(one), _kinds(other)
    if not mine & theirs:
        return True
    values, those = values_of(one), values_of(other)
    if values is not None and those is not None:
        return not {identity(each) for each in values} & {identity(each) for each in those}
    if mine == theirs == {"object"} and values is None and those is None:
        return _objects_differ(one, other, resolve, looks)
    return False


def _kinds(node: Schema) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in kinds_of(node) or KINDS}


def _objects_differ(one: Schema, other: Schema, resolve: Resolve, looks: int) -> bool:
    mine, theirs = _properties(one), _properties(other)
    both = [name for name in _required(one) & _required(other) if name in mine and name in theirs]
    if any(differ(mine[name], theirs[name], resolve, looks - 1) for name in both):
        return True
    return _lacks(one, other) and _lacks(other, one)


def _lacks(one: Schema, other: Schema) -> bool:
    """Whether what the grammar writes for one surely lacks something that the other requires."""
    is_closed = (
        "properties" in one and one.get("additionalProperties") in (None, False) and not one.get("patternProperties")
    )
    return is_closed and bool(_required(other) - _properties(one).keys() - _required(one))


def _properties(node: Schema) -> Schema:
    found = node.get("properties")
    return found if isinstance(found, dict) else {}


def _required(node: Schema) -> set[str]:
    found = node.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def telling_property(parts: list[object]) -> str | None:
    """A property that some objects all declare with distinct values; None when there is none."""
    if len(parts) < 2 or not all(isinstance(part, dict) and kinds_of(part) == ("object",) for part in parts):
        return None
    declared = [_properties(part) for part in parts if isinstance(part, dict)]
    for name in declared[0]:
        listed = [values_of(each[name]) if isinstance(each.get(name), dict) else None for each in declared]
        keys = [identity(value) for values in listed for value in values or ()]
        if all(listed) and len(set(keys)) == len(keys):
            return name
    return None

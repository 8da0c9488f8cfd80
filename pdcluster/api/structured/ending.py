"""Whether a schema allows a value that ends. One that needs itself within itself never does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]


def ends(root: object, definitions: Mapping[str, object]) -> bool:
    """root, definitions: as rewritten, so that every reference names a definition."""
    ending, waiting = set[str](), list(definitions)
    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, schema in definitions.items():
        for used in _used(schema):
            users[used].append(name)
    while waiting:
        name = waiting.pop()
        if name not in ending and _ends(definitions[name], ending):
            ending.add(name)
            waiting += users[name]
    return _ends(root, ending)


def _used(node: object) -> Iterator[str]:
    left = [node]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if isinstance(reference := each.get("$ref"), str):
                yield _named(reference)
            left += [value for word, value in each.items() if word not in ("const", "enum")]
        elif isinstance(each, list):
            left += each


def _ends(node: object, ending: set[str]) -> bool:
    """By the definitions that are known to end."""
    if not isinstance(node, dict):
        return node is not False
    if isinstance(reference := node.get("$ref"), str) and _named(reference) not in ending:
        return False
    if any(not _ends(each, ending) for each in node.get("allOf", ())):
        return False
    if isinstance(some := node.get("anyOf"), list) and not any(_ends(each, ending) for each in some):
        return False
    given = node.get("type")
    return any(_kind_ends(kind, node, ending) for kind in (given if isinstance(given, list) else [given]))


def _kind_ends(kind: object, node: Schema, ending: set[str]) -> bool:
    if kind == "object":
        declared, others = node.get("properties", {}), node.get("additionalProperties", True)
        return all(_ends(declared.get(name, others), ending) for name in node.get("required", ()))
    if kind == "array" and isinstance(least := node.get("minItems"), int):
        first, rest = node.get("prefixItems", []), node.get("items", True)
        return all(_ends(each, ending) for each in [*first[:least], *([rest] if least > len(first) else [])])
    return True


def _named(reference: str) -> str:
    return reference.removeprefix("#/$defs/")

"""Parts of a schema that allow no value that ends: they need themselves within themselves. They become false."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

# Keywords with schemas by name, in a list, and of one.
MAPS, LISTS, SINGLE = (
    ("properties", "patternProperties"),
    ("prefixItems", "allOf", "anyOf"),
    ("items", "additionalProperties"),
)


def pruned(root: Any, definitions: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Both without references to what never ends; None where nothing is left. They are as rewritten, so that every
    reference names a definition."""
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
    if not _ends(root, ending):
        return None
    if len(ending) == len(definitions):
        return root, dict(definitions)
    return _without(root, ending), {name: _without(definitions[name], ending) for name in definitions if name in ending}


def _without(node: Any, ending: set[str]) -> Any:
    if not isinstance(node, dict):
        return node
    if isinstance(reference := node.get("$ref"), str) and _named(reference) not in ending:
        return False
    made = dict(node)
    for word, inner in node.items():
        if word in MAPS:
            made[word] = {name: _without(each, ending) for name, each in inner.items()}
        elif word in LISTS:
            made[word] = [_without(each, ending) for each in inner]
        elif word in SINGLE:
            made[word] = _without(inner, ending)
    return made


def _used(node: Any) -> Iterator[str]:
    left = [node]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        if isinstance(reference := each.get("$ref"), str):
            yield _named(reference)
        for word in each.keys() & {*MAPS, *LISTS, *SINGLE}:
            inner = each[word]
            left += inner.values() if word in MAPS else inner if word in LISTS else [inner]


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
        others = True if node.get("patternProperties") else others
        return all(_ends(declared.get(name, others), ending) for name in node.get("required", ()))
    if kind == "array" and isinstance(least := node.get("minItems"), int):
        first, rest = node.get("prefixItems", []), node.get("items", True)
        return all(_ends(each, ending) for each in [*first[:least], *([rest] if least > len(first) else [])])
    return True


def _named(reference: str) -> str:
    return reference.removeprefix("#/$defs/")

"""What a JSON schema of a request asks that the compiler of grammars would pass over, so that what comes might break it: refused by the place where
it stands. Not whether it is a schema at all: what is plainly wrong is told by the compiler, on the node.

The compiler looks at one thing of a schema, in the order of CHOSEN, and at what belongs to its type only where none of them is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster.api.patterns import check_regex
from pdcluster.api.validate import shown
from pdcluster.errors import BadRequest

MAX_SCHEMA_NODES = 10_000

Schema = Mapping[str, Any]

NOT_ENFORCED = frozenset({
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "multipleOf", "dependentSchemas", "dependentRequired",
    "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
})  # fmt: skip
"""Whatever stands beside them."""

CHOSEN = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
TYPE_OF = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
    **dict.fromkeys(("required", "patternProperties", "propertyNames", "minProperties", "maxProperties"), "object"),
}
"""Keywords that count only beside a type, and which."""
TELLING = {"array": ("items", "prefixItems"), "object": ("properties", "additionalProperties")}
"""Keywords that tell a type."""
CONSTRAINTS = frozenset({"type", *CHOSEN, *TYPE_OF, *TELLING["array"], *TELLING["object"]})

SUBSCHEMAS = ("items", "additionalProperties", "additionalItems", "propertyNames")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(schema: Schema, param: str) -> None:
    """Raises BadRequest naming the place."""
    for index, (node, path) in enumerate(_nodes(schema, param)):
        if index >= MAX_SCHEMA_NODES:
            raise BadRequest(f"{param} has more than {MAX_SCHEMA_NODES} schemas in it; send a smaller one", param)
        if unkept := sorted(NOT_ENFORCED & node.keys()):
            raise _not_kept(path, unkept[0], "leave it out")
        parts = node.get("allOf")
        if isinstance(parts, list) and len(parts) > 1:
            raise BadRequest(f"{path} uses allOf with {len(parts)} schemas, which structured output cannot enforce; merge them into one", param)
        _check_patterns(node, path)
        chosen = next((name for name in CHOSEN if name in node), None)
        if chosen is None:
            _check_typed(node, path)
        else:
            _check_beside(schema, node, chosen, path)


def _not_kept(path: str, what: str, way_out: str) -> BadRequest:
    return BadRequest(f"{path} uses {what}, which structured output cannot enforce; {way_out}", path)


# ---------------------------------------------------------------- what one schema says


def _check_patterns(node: Schema, path: str) -> None:
    if isinstance(pattern := node.get("pattern"), str):
        check_regex(pattern, f"{path}.pattern")
    if isinstance(named := node.get("patternProperties"), dict):
        for pattern in named:
            check_regex(pattern, f"{path}.patternProperties")


def _check_typed(node: Schema, path: str) -> None:
    """Of a schema whose type decides."""
    for name, kind in TYPE_OF.items():
        if node.get(name, []) != [] and "type" not in node and not any(each in node for each in TELLING.get(kind, ())):
            raise _not_kept(path, f"{name} without a type", f'add "type": "{kind}"')
    for name in ("pattern", "format"):
        if name in node and _may_be(node, "string") and (beside := next((each for each in ("minLength", "maxLength") if each in node), None)):
            raise _not_kept(path, f"{beside} beside {name}", "leave one of them out")
    required, properties = node.get("required"), node.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict) and _may_be(node, "object"):
        for name in required:
            if isinstance(name, str) and name not in properties:
                raise _not_kept(path, f"required with {shown(name)}, which is not among its properties", "add it there")


def _may_be(node: Schema, kind: str) -> bool:
    kinds = node.get("type", kind)
    return kind in kinds if isinstance(kinds, list) else kinds == kind


def _check_beside(whole: Schema, node: Schema, chosen: str, path: str) -> None:
    """What says the same as what is chosen may stand beside it."""
    for name in sorted(CONSTRAINTS & node.keys() - {chosen}):
        if not all(_says(each, name, node[name]) for each in _chosen(whole, node, chosen, path)):
            raise _not_kept(path, f"{name} beside {chosen}", f"put it into what {chosen} says, or leave it out")


def _chosen(whole: Schema, node: Schema, chosen: str, path: str) -> list[object]:
    if chosen == "$ref":
        return [_target(whole, node[chosen], path)]
    found = node[chosen]
    if chosen == "const":
        return [{"const": found}]
    if not isinstance(found, list):
        return []  # which the compiler tells
    return [{"const": each} for each in found] if chosen == "enum" else list(found)


def _says(part: object, name: str, wanted: object) -> bool:
    if not isinstance(part, dict):
        return False
    if name == "type" and "const" in part:
        return any(_is_of(part["const"], kind) for kind in (wanted if isinstance(wanted, list) else [wanted]))
    try:
        return name in part and bool(part[name] == wanted)
    except RecursionError:  # nested deeper than anything that is taken
        return False


KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "object": dict, "array": list, "boolean": bool, "null": type(None), "integer": int, "number": (int, float),
}  # fmt: skip


def _is_of(value: object, kind: object) -> bool:
    if not isinstance(kind, str) or kind not in KINDS or (isinstance(value, bool) and kind != "boolean"):
        return False
    return isinstance(value, KINDS[kind])


# ---------------------------------------------------------------- all that are in it


def _nodes(schema: Schema, path: str) -> Iterator[tuple[Schema, str]]:
    """Every schema in a schema, with where it stands, also those that only a $ref says are schemas. Properties that are called like a keyword are
    none."""
    found: list[tuple[object, str]] = [(schema, path)]
    referred: set[str] = set()
    while found:
        node, at = found.pop()
        if not isinstance(node, dict):
            continue
        yield node, at
        if "$ref" in node and str(node["$ref"]) not in referred:
            referred.add(str(node["$ref"]))
            found.append((_target(schema, node["$ref"], at), f"{path}{'.'.join(str(node['$ref']).split('/'))[1:]}"))
        found += [(node[name], f"{at}.{name}") for name in SUBSCHEMAS if name in node]
        for name in LISTS_OF_SCHEMAS:
            if isinstance(parts := node.get(name), list):
                found += [(part, f"{at}.{name}[{index}]") for index, part in enumerate(parts)]
        for name in MAPS_OF_SCHEMAS:
            if isinstance(parts := node.get(name), dict):
                found += [(part, f"{at}.{name}.{key}") for key, part in parts.items()]


def _target(whole: Schema, ref: object, path: str) -> object:
    """What a reference within the schema names: as the compiler reads it, by keys alone."""
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        raise _not_kept(path, f"$ref {shown(ref)}", "refer to a part of this schema, such as #/$defs/NAME")
    found: object = whole
    for key in ref.split("/")[1:]:
        if not isinstance(found, dict) or key not in found:
            raise BadRequest(f"{path} uses $ref {shown(ref)}, but the schema has no such part; add it or correct the reference", path)
        found = found[key]
    return found

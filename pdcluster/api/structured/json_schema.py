"""A JSON schema as llguidance takes it. What the library would pass over, read otherwise or fail at is rewritten here,
or refused by its place. What is no schema at all the library refuses by the keyword.

1. Undeclared properties come only where additionalProperties or patternProperties names them.
2. Keywords of one type make a value without a type one of that type.
3. Bounds move inward to what the library's doubles hold. Values that they do not hold are refused.
4. Each reference leads to a definition that was looked at, so nothing else is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pdcluster.api.structured.disjoint import (
    CHOSEN,
    KEYWORDS,
    common_properties,
    differ,
    implied_kinds,
    kinds_of,
    values_of,
)
from pdcluster.api.structured.ending import pruned
from pdcluster.api.structured.library import fault_of_schema
from pdcluster.api.structured.patterns import rewritten
from pdcluster.api.structured.string_formats import KEPT, SAME_AS_FORMAT
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

MAX_SCHEMAS = 10_000
MAX_DEPTH = 64
# Most parts of a oneOf, which are compared with each other.
MAX_COMPARED = 64
# Doubles hold every integer up to it.
EXACT = 2**53
BOUNDED = 2**63
# How far exclusive bounds move, as a share of the bound.
STEP = 1e-9

Schema = Mapping[str, Any]
Made = dict[str, Any]

# Keywords that cannot be kept → the type of which they speak.
NOT_KEPT: Mapping[str, str | None] = {
    "not": None, "if": None, "$dynamicRef": None, "$recursiveRef": None,
    "contains": "array", "unevaluatedItems": "array", "unevaluatedProperties": "object",
    "dependentSchemas": "object", "dependentRequired": "object", "dependencies": "object",
}  # fmt: skip
# Keywords that say how others are meant.
BESIDES = frozenset(("minContains", "maxContains", "discriminator", "then", "else"))
# Keywords that say something of some names.
NAMING = frozenset(("properties", "patternProperties", "required"))
COMBINED = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
LISTS = ("required", "allOf", "anyOf", "oneOf", "enum", "prefixItems")
OBJECTS = ("properties", "patternProperties")
KNOWN = CHOSEN | NOT_KEPT.keys() | BESIDES | {"type"} | frozenset().union(*KEYWORDS.values())
# Values that ask for nothing; null does so everywhere.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "not": (False,), "uniqueItems": (False,), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "dependentSchemas": ({},), "dependentRequired": ({},), "dependencies": ({},), "allOf": ([],), "required": ([],),
    "minLength": (0,), "minItems": (0,), "minProperties": (0,), "items": (True, {}), "additionalItems": (True, {}),
    "prefixItems": ([],), "patternProperties": ({},), "propertyNames": (True, {}),
}  # fmt: skip


def for_library(schema: object, param: str) -> Made:
    """Raises BadRequest naming the path of what cannot be kept, or allows nothing that ends."""
    left = pruned(*_Rewriter(schema, param).rewritten())
    if left is None:
        what = "allows no value that ends: it contradicts itself, or needs itself within itself"
        raise BadRequest(f"{param} {what}; correct it", param)
    made, definitions = left
    if not isinstance(made, dict):
        return {}  # true
    # A declared name could come again with escapes, as one that is not declared.
    options = {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}} if has_open_names([made, definitions]) else {}
    return {**options, **made, "$defs": definitions} if definitions else {**options, **made}


class _Rewriter:
    """param: names the schema in errors."""

    def __init__(self, schema: object, param: str) -> None:
        self._schema, self._param = schema, param
        self._count = self._depth = 0
        # Reference and tag → the name of its definition.
        self._names: dict[tuple[str, str], str] = {}
        self._waiting: list[tuple[str, str, str]] = []

    def rewritten(self) -> tuple[Made | bool, Made]:
        made, definitions = self.convert(self._schema, self._param), Made()
        while self._waiting:  # targets come after the references to them, so that both may form cycles
            reference, tag, name = self._waiting.pop()
            target = self.convert(self.target(reference, self._param), _path_of(reference, self._param))
            definitions[name] = _tagged(target, tag)
        return made, definitions

    def convert(self, node: object, path: str, *, is_part: bool = False) -> Made | bool:
        """is_part: it is met together with others, which may declare more properties."""
        if isinstance(node, bool):
            return node
        if isinstance(node, dict) and node.get("not") in ({}, True):
            return False
        if not isinstance(node, dict):
            raise BadRequest(f"{path} is {shown(node)}; it must be a schema: an object, true or false", path)
        self._count, self._depth = self._count + 1, self._depth + 1
        if self._count > MAX_SCHEMAS or self._depth > MAX_DEPTH:
            what = f"has more than {MAX_SCHEMAS} schemas" if self._count > MAX_SCHEMAS else "is nested too deeply"
            raise BadRequest(f"{self._param} {what}; send a smaller one", self._param)
        node = {word: value for word, value in node.items() if _asks(word, value)}
        _check_form(node, path)
        kinds = node.get("type") or implied_kinds(node)
        _check_kept(node, kinds, path)
        made = {word: value for word, value in node.items() if word not in NOT_KEPT and word not in BESIDES}
        if kinds:
            made["type"] = kinds
        _numbers(made, path)
        formats = _strings(made, path)
        if not KEYWORDS["array"].isdisjoint(made):
            self._array(made, path)
        if not KEYWORDS["object"].isdisjoint(made):
            self._object(made, path)
        if not COMBINED.isdisjoint(made):
            self._combine(node, made, path, is_part=is_part)
        if formats:
            made["allOf"] = [*made.get("allOf", ()), *formats]
        if not is_part:
            _close(made)
        self._depth -= 1
        return made

    def _array(self, made: Made, path: str) -> None:
        if made.pop("uniqueItems", False) and not _at_most_one(made):
            raise not_kept(path, "uniqueItems", "ask for a list, and drop what is repeated in it")
        if isinstance(made.get("items"), list):  # a tuple, as written before draft 2020-12
            made["prefixItems"], made["items"] = made["items"], made.get("additionalItems", True)
        made.pop("additionalItems", None)
        if first := made.get("prefixItems"):
            made["prefixItems"] = [self.convert(each, f"{path}.prefixItems[{at}]") for at, each in enumerate(first)]
        if "items" in made:
            made["items"] = self.convert(made["items"], f"{path}.items")

    def _object(self, made: Made, path: str) -> None:
        for word in made.keys() & {*OBJECTS}:
            made[word] = {name: self.convert(each, f"{path}.{word}.{name}") for name, each in made[word].items()}
        if "patternProperties" in made:
            at = f"{path}.patternProperties"
            made["patternProperties"] = {_pattern(each, at): found for each, found in made["patternProperties"].items()}
        if "additionalProperties" in made:
            made["additionalProperties"] = self.convert(made["additionalProperties"], f"{path}.additionalProperties")
        if "propertyNames" in made:
            names = made.pop("propertyNames")
            while isinstance(names, dict) and "$ref" in names:
                if not _is_alone(names):
                    raise not_kept(path, "propertyNames with keywords beside $ref")
                names = self.target(names["$ref"], path)
            _name(made, names, path)
        least, required = made.get("minProperties"), made.get("required", ())
        if isinstance(least, int) and _has_open_names(made) and least > len(required) + 1:
            what = f"minProperties {least} with names that are not declared, which could repeat"
            raise not_kept(path, what, "declare the properties and set additionalProperties to false")

    def _combine(self, node: Schema, made: Made, path: str, *, is_part: bool) -> None:
        """References and lists of schemas. Where an object is put together of several its parts stay open."""
        parts = {word: node[word] for word in ("allOf", "anyOf", "oneOf") if word in node}
        number = sum(len(each) if word == "allOf" else 1 for word, each in parts.items()) + ("$ref" in node)
        is_joined = is_part or number > 1 or (number == 1 and not KEYWORDS["object"].isdisjoint(made))
        if "oneOf" in parts:
            if "anyOf" in parts:
                raise not_kept(path, "anyOf beside oneOf", "put one of them into allOf")
            made["anyOf"] = made.pop("oneOf")
        tag = self._told_apart(node, path, are_closed=not is_joined) if "oneOf" in parts else ""
        for word, each in parts.items():
            made["anyOf" if word == "oneOf" else word] = [
                self._part(part, f"{path}.{word}[{at}]", tag, is_joined=is_joined) for at, part in enumerate(each)
            ]
        if "$ref" in node and is_joined:
            made["allOf"] = [*made.get("allOf", ()), self._part({"$ref": made.pop("$ref")}, path, "", is_joined=True)]
        elif "$ref" in node:
            made["$ref"] = self._referred(node["$ref"], path, "")
        if number == 1 and "type" in node and self._all_kinds(node) <= _kinds(node["type"]):
            made.pop("type")  # the library takes no cycle of references that have other keywords beside them

    def _part(self, part: object, path: str, tag: str, *, is_joined: bool) -> Made | bool:
        if isinstance(part, dict) and "$ref" in part and is_joined:
            beside = {word: value for word, value in part.items() if word != "$ref" and value is not None}
            _check_form(beside, path)
            target = self.target(part["$ref"], path)
            part = {**beside, "allOf": [target, *beside.get("allOf", ())]}
        elif isinstance(part, dict) and "$ref" in part and tag and _is_alone(part):
            return {"$ref": self._referred(part["$ref"], path, tag)}
        return _tagged(self.convert(part, path, is_part=is_joined), tag)

    def _told_apart(self, node: Schema, path: str, *, are_closed: bool) -> str:
        """The property that tells the parts of a `oneOf` apart; "" where other things do."""
        parts = [self._resolved(part) for part in node["oneOf"]]
        if len(parts) > MAX_COMPARED:
            raise not_kept(path, f"oneOf with more than {MAX_COMPARED} schemas", "use anyOf")
        about = node.get("discriminator")
        given = [str(about.get("propertyName", ""))] if isinstance(about, dict) else []
        pairs = [(one, other) for at, one in enumerate(parts) for other in parts[:at]]
        for tag in ("", *given, *common_properties(parts)):
            if all(differ(one, other, self._resolved, tag, are_closed=are_closed) for one, other in pairs):
                return tag
        instead = "use anyOf, or a const that tells them apart"
        raise not_kept(path, "oneOf with schemas that may allow the same value", instead)

    # ------------------------------------------------ references

    def _referred(self, reference: object, path: str, tag: str) -> str:
        self.target(reference, path)
        key = str(reference), tag
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._waiting.append((*key, self._names[key]))
        return f"#/$defs/{self._names[key]}"

    def _resolved(self, node: object) -> object:
        """The schema behind references that have nothing beside them that counts."""
        for _ in range(MAX_COMPARED):
            if not isinstance(node, dict) or "$ref" not in node:
                break
            node = self.target(node["$ref"], self._param)
        return node

    def target(self, reference: object, path: str) -> object:
        """By RFC 6901 and RFC 3986. Raises BadRequest naming path."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise not_kept(path, f"$ref {shown(reference)}", "refer to a part of this schema, such as #/$defs/NAME")
        found: Any = self._schema
        for key in [step.replace("~1", "/").replace("~0", "~") for step in unquote(reference[1:]).split("/")[1:]]:
            if isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                what = f"uses $ref {shown(reference)}, but the schema has no {shown(key)} there"
                raise BadRequest(f"{path} {what}; add it or correct the reference", path)
        return found

    def _all_kinds(self, node: Schema) -> set[str]:
        """The types of what it refers to or lists, all where one is unknown."""
        listed = next((node[word] for word in ("allOf", "anyOf", "oneOf") if word in node), [node])
        return set().union(*(kinds_of(self._resolved(each)) for each in listed))


def has_open_names(left: list[object]) -> bool:
    """Whether some object has names that are spoken of, and others."""
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if not NAMING.isdisjoint(each) and each.get("additionalProperties") is not False:
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def not_kept(path: str, what: str, instead: str = "leave it out") -> BadRequest:
    return BadRequest(f"{path} uses {what}, which structured output cannot enforce; {instead}", path)


def _kinds(given: object) -> set[str]:
    kinds = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    return kinds | {"integer"} if "number" in kinds else kinds


def _asks(word: object, value: object) -> bool:
    """Whether a keyword is known and asks for something."""
    if word not in KNOWN or (value is None and word != "const"):
        return False
    neutral = NEUTRAL.get(str(word), ())
    return not any(type(value) is type(each) and value == each for each in neutral)


def _check_form(node: Schema, path: str) -> None:
    """What is read here has the form that it must have. The rest the library looks at."""
    for word in node.keys() & {*LISTS, *OBJECTS}:
        if not isinstance(node[word], list if word in LISTS else dict):
            what = "a list" if word in LISTS else "an object"
            raise BadRequest(f"{path}.{word} is {shown(node[word])}; it must be {what}", path)
    if any(not isinstance(name, str) for name in node.get("required", ())):
        raise BadRequest(f"{path}.required is {shown(node['required'])}; it must be a list of names", path)


def _check_kept(node: Schema, kinds: object, path: str) -> None:
    for word in NOT_KEPT.keys() & node.keys():
        kind = NOT_KEPT[word]
        if kind is not None and kinds and kind not in _kinds(kinds):
            continue
        if word == "if" and "then" not in node and "else" not in node:
            continue
        if not (word == "contains" and node.get("minContains") == 0 and "maxContains" not in node):
            raise not_kept(path, word)
    for word in node.keys() & {"const", "enum"}:
        values = [node.get(word)] if word == "const" else node.get(word)
        for value in _numbers_in(values):
            if abs(value) >= BOUNDED or int(float(value)) != value:
                raise not_kept(path, f"{word} {shown(value)}, a number beyond 2^53", "send it as text")


def _numbers_in(value: object) -> list[int]:
    """Whole numbers in a value, those of a list or an object too."""
    found, left = list[int](), [value]
    while left:
        each = left.pop()
        if isinstance(each, int) and abs(each) > EXACT:
            found.append(each)
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return found


def _numbers(made: Made, path: str) -> None:
    """Bounds as the library keeps them. It takes some exclusive bounds for inclusive ones, so they move by a step."""
    if KEYWORDS["number"].isdisjoint(made):
        return
    for bound, exclusive, up in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        edges = list[float]()
        for word in (bound, exclusive):
            value = made.pop(word, None)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise BadRequest(f"{path}.{word} is {shown(value)}; it must be a number", path)
            if value is not None:
                near = _inward(value, up, f"{path}.{word}")
                edges.append(near + up * STEP * max(abs(near), 1) if word == exclusive else near)
        if edges:
            made[bound] = max(edges) if up > 0 else min(edges)


def _inward(value: float, up: int, path: str) -> float:
    """The next number that a double holds."""
    if abs(value) >= BOUNDED and (value > 0) == (up > 0):
        raise not_kept(path, f"{shown(value)}, a bound beyond 2^63", "send such numbers as text")
    value = max(min(value, BOUNDED // 2), -BOUNDED // 2) if abs(value) >= BOUNDED else value
    near = float(value)
    if near == value:
        return value
    return near if (near > value) == (up > 0) else math.nextafter(near, up * math.inf)


def _strings(made: Made, path: str) -> list[Made]:
    """The pattern and the format are met together: what the format adds is returned. Where the library cannot do that,
    the pattern rules."""
    if "pattern" not in made and "format" not in made:
        return []
    pattern, name = made.get("pattern"), made.pop("format", None)
    if name == "regex":
        raise not_kept(path, "format regex", "use a pattern")
    known = KEPT.get(name) if isinstance(name, str) else None
    if pattern is None or pattern in SAME_AS_FORMAT.get(str(name), ()):
        if known is not None:
            made["pattern"] = f"^(?:{known})$"
        return []
    if not isinstance(pattern, str):
        raise BadRequest(f"{path}.pattern is {shown(pattern)}; a pattern is a string", path)
    made["pattern"] = pattern = _pattern(pattern, f"{path}.pattern")
    both = [{"pattern": f"^(?:{known})$"}]
    if known is not None and fault_of_schema({"type": "string", "pattern": pattern, "allOf": both}) is None:
        return both
    return []


def _pattern(pattern: str, path: str) -> str:
    made = rewritten(pattern, path)
    fault = fault_of_schema({"type": "string", "pattern": made})
    if fault is not None:
        raise BadRequest(f"{path} is {shown(pattern)}, which cannot be kept: {fault}; send one without it", path)
    return made


def _is_alone(node: Schema) -> bool:
    """Whether nothing that counts stands beside its reference."""
    return not any(_asks(word, value) for word, value in node.items() if word != "$ref")


def _has_open_names(made: Schema) -> bool:
    if made.get("patternProperties"):
        return True
    return made.get("additionalProperties", "properties" not in made) is not False


def _at_most_one(made: Schema) -> bool:
    most, first, rest = made.get("maxItems"), made.get("prefixItems"), made.get("items")
    return most in (0, 1) or (rest is False and isinstance(first, list) and len(first) < 2)


def _name(made: Made, names: object, path: str) -> None:
    """propertyNames: a list becomes properties, a pattern one of patternProperties."""
    if not isinstance(names, dict) or "string" not in _kinds(names.get("type", "string")):
        raise BadRequest(f"{path}.propertyNames is {shown(names)}; it must be a schema of strings, as names are", path)
    values, others = values_of(names), made.pop("additionalProperties", True)
    asked = {word for word, value in names.items() if _asks(word, value)} - {"type", "const", "enum"}
    if values is not None:
        if asked or "patternProperties" in made:
            raise not_kept(path, "propertyNames of a list beside other keywords")
        declared = made.pop("properties", {})
        made["properties"] = {each: declared.get(each, others) for each in values if isinstance(each, str)}
        made["additionalProperties"] = False
        return
    text: Made = {word: names[word] for word in KEYWORDS["string"] & names.keys() if _asks(word, names[word])}
    _strings(text, f"{path}.propertyNames")
    if asked - KEYWORDS["string"]:
        raise not_kept(path, f"propertyNames with {min(asked - KEYWORDS['string'])}")
    if "pattern" not in text and text:
        text = {"pattern": f"^(?s:.{{{text.pop('minLength', 0)},{text.pop('maxLength', '')}}})$", **text}
    if set(text) - {"pattern"} or "properties" in made or "patternProperties" in made:
        raise not_kept(path, "propertyNames of more than a list or a pattern, or beside other names")
    if text:
        made["patternProperties"], made["additionalProperties"] = {text["pattern"]: others}, False
    elif others is not True:
        made["additionalProperties"] = others


def _close(made: Made) -> None:
    """Undeclared properties do not come, unless some part of the schema speaks of them."""
    if "additionalProperties" in made:
        return
    parts = list(_parts(made))
    names = {name: True for part in parts for name in part.get("properties", ())}
    if names and not any(part.get("additionalProperties") or part.get("patternProperties") for part in parts):
        needed = [name for part in parts for name in part.get("required", ())]
        made["properties"] = {
            **made.get("properties", {}),
            **{each: True for each in [*names, *needed] if each not in made.get("properties", {})},
        }
        made["additionalProperties"] = False


def _parts(made: object) -> list[Made]:
    """A schema and those that it is put together of."""
    if not isinstance(made, dict):
        return []
    inner = [part for word in ("allOf", "anyOf") for each in made.get(word, ()) for part in _parts(each)]
    return [made, *inner]


def _tagged(made: Made | bool, tag: str) -> Made | bool:
    """Requires the property that tells it from others."""
    if not tag or not isinstance(made, dict):
        return made
    return {**made, "required": [*dict.fromkeys([*made.get("required", ()), tag])]}


def _path_of(reference: str, param: str) -> str:
    return ".".join([param, *reference.split("/")[1:]])

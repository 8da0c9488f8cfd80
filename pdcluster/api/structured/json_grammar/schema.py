"""A JSON schema as a grammar of the JSON texts that it allows, in xgrammar's EBNF. What a grammar cannot enforce is
refused by its path; what changes nothing is accepted.

The grammar may allow less than the schema. Properties come in order. Undeclared ones come only where
additionalProperties names them. Keywords of one type make a value without a type one of that type. The grammar never
allows more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pdcluster.api.structured.grammar_rules.rules import (
    EMPTY,
    NOTHING,
    GrammarRules,
    Many,
    NamedRule,
    OneOf,
    Part,
    Regex,
    Text,
    one_of,
    row,
)
from pdcluster.api.structured.grammar_rules.written import RuleWriter
from pdcluster.api.structured.json_grammar.arrays import array
from pdcluster.api.structured.json_grammar.disjoint import differ, identity, telling_property
from pdcluster.api.structured.json_grammar.kinds import (
    KEYWORDS,
    KINDS,
    asks,
    given_kinds,
    is_of,
    kinds_of,
    told_kinds,
    values_of,
)
from pdcluster.api.structured.json_grammar.numbers import NUMBER, Bounds, integers, numbers
from pdcluster.api.structured.json_grammar.objects import object_
from pdcluster.api.structured.json_grammar.pointers import target
from pdcluster.api.structured.json_grammar.string_formats import KEPT, NOT_KEPT
from pdcluster.api.structured.json_grammar.strings import plain_string, string
from pdcluster.api.structured.json_grammar.values import not_kept, number
from pdcluster.api.structured.regex.parser import parse
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_DEPTH

MAX_SCHEMA_NODES = 10_000
# Most parts of a oneOf that are compared with each other.
MAX_COMPARED = 64
# Longest chain of references where parts are compared.
MAX_REFERENCES = 16
# Most white space in a row between two parts of JSON. A model that likes line breaks would never end.
MAX_WHITESPACE = 16

Schema = Mapping[str, Any]

# Keywords that no grammar enforces → values, beside null, that ask for nothing.
NOT_ENFORCED: Mapping[str, tuple[object, ...]] = {
    "not": (False,), "if": (), "$dynamicRef": (), "$recursiveRef": (), "uniqueItems": (False,), "contains": (),
    "unevaluatedItems": (True, {}),
    "multipleOf": (1,), "dependentSchemas": ({},), "dependentRequired": ({},), "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
}  # fmt: skip
SPEAKS_OF = {
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"), "multipleOf": "number",
    **dict.fromkeys(("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties"), "object"),
}  # fmt: skip

CHOSEN = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
CONSTRAINTS = frozenset({"type", *CHOSEN, *(word for words in KEYWORDS.values() for word in words)})


def grammar_of_schema(schema: object, param: str) -> str:
    """EBNF whose root is a value. Raises BadRequest naming the path of what is no schema, cannot be enforced, or allows
    nothing that ends.
    """
    return _Grammar(schema, param).written()


class _Grammar:
    """Implements values.Converter."""

    def __init__(self, whole: object, param: str) -> None:
        self._whole = whole
        self._param = param
        self._num_nodes = self._depth = 0
        self._referred: dict[str, NamedRule] = {}
        self._waiting: list[tuple[NamedRule, object, str]] = []
        self.rules = GrammarRules()
        self.space = self.rules.name(Regex(rf"[ \n\t]{{0,{MAX_WHITESPACE}}}"))

    def written(self) -> str:
        root = self.convert(self._whole, self._param)
        while self._waiting:  # targets are converted after the references to them, so that both may form cycles
            named, schema, path = self._waiting.pop()
            self.rules.define(named, self.convert(schema, path))
        written = self.rules.written(root)
        if written is None:
            what = "allows no value that ends: it contradicts itself, or needs itself within itself"
            raise BadRequest(f"{self._param} {what}; correct it", self._param)
        return written

    def convert(self, schema: object, path: str) -> Part:
        self._num_nodes += 1
        if self._num_nodes > MAX_SCHEMA_NODES:
            raise BadRequest(
                f"{self._param} has more than {MAX_SCHEMA_NODES} schemas in it; send a smaller one", self._param
            )
        if schema is True or schema == {}:
            return self.any_value()
        if schema is False:
            return NOTHING
        if not isinstance(schema, dict):
            raise BadRequest(
                f'{path} is {shown(schema)}; it must be a schema, an object such as {{"type": "string"}}', path
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadRequest(
                f"{self._param} is nested more than {MAX_DEPTH} levels deep; send a flatter one", self._param
            )
        part = self.rules.name(self._converted(schema, path))
        self._depth -= 1
        return part

    def _converted(self, node: Schema, path: str) -> Part:
        for keyword in NOT_ENFORCED:
            if keyword in node and self._is_lost(node, keyword):
                raise not_kept(path, keyword, "leave it out")
        chosen = next((word for word in CHOSEN if _asks(node, word)), None)
        if chosen is None:
            return self._typed(node, path)
        for word in sorted(CONSTRAINTS & node.keys() - {chosen}):
            if _asks(node, word) and not self._may_stand_beside(node, chosen, word, path):
                raise not_kept(path, f"{word} beside {chosen}", f"put it into what {chosen} says, or leave it out")
        return self._of_chosen(node, chosen, path)

    # ------------------------------------------------------------ what is not kept

    def _is_lost(self, node: Schema, keyword: str) -> bool:
        value = node[keyword]
        if value is None or any(
            isinstance(value, bool) == isinstance(each, bool) and value == each for each in NOT_ENFORCED[keyword]
        ):
            return False
        kinds = kinds_of(node)
        if (
            keyword in SPEAKS_OF
            and kinds is not None
            and SPEAKS_OF[keyword] not in [*kinds, *("number" for kind in kinds if kind == "integer")]
        ):
            return False
        if keyword == "uniqueItems":
            return node.get("maxItems") not in (0, 1)
        if keyword == "contains":
            return not (node.get("minContains") == 0 and node.get("maxContains") is None)
        return not (keyword == "if" and node.get("then") is None and node.get("else") is None)

    def _may_stand_beside(self, node: Schema, chosen: str, word: str, path: str) -> bool:
        """Whether the keyword says the same as what is chosen."""
        if word == "format" and isinstance(node[word], str) and node[word] not in {*KEPT, *NOT_KEPT}:
            return True
        if chosen in ("const", "enum"):
            return word == "type"
        found = [self._target(node["$ref"], path)] if chosen == "$ref" else node[chosen]
        return isinstance(found, list) and all(_says(part, word, node[word]) for part in found)

    # ------------------------------------------------------------ references, values, choices

    def _of_chosen(self, node: Schema, chosen: str, path: str) -> Part:
        if chosen == "$ref":
            return self._reference(node["$ref"], path)
        if chosen in ("const", "enum"):
            return self._values(node, chosen, path)
        parts = node[chosen]
        if not isinstance(parts, list) or not parts:
            raise BadRequest(f"{path}.{chosen} is {shown(parts)}; it must be a list of schemas", path)
        if chosen == "allOf":
            return self._all_of(parts, path)
        if chosen == "oneOf":
            return self._one_of(parts, path)
        return one_of([self.convert(part, f"{path}.{chosen}[{index}]") for index, part in enumerate(parts)])

    def _one_of(self, parts: list[object], path: str) -> Part:
        """A property that distinguishes the parts always comes, even if the schema does not require it."""
        name = telling_property([self._resolved(part) for part in parts])
        if name is None:
            self._check_one_of(parts, path)
            return one_of([self.convert(part, f"{path}.oneOf[{index}]") for index, part in enumerate(parts)])
        return one_of([self._with_property(part, name, f"{path}.oneOf[{index}]") for index, part in enumerate(parts)])

    def _with_property(self, part: object, name: str, path: str) -> Part:
        found = self._resolved(part)
        assert isinstance(found, dict)
        given = found.get("required") or []
        wanted = {**found, "required": [*given, name] if isinstance(given, list) else given}
        if isinstance(part, dict) and "$ref" in part:
            return self._later(f"{part['$ref']} with {name}", wanted, path)
        return self.convert(wanted, path)

    def _reference(self, reference: object, path: str) -> Part:
        where = f"{self._param}{'.'.join(str(reference).split('/'))[1:]}"
        return self._later(str(reference), self._target(reference, path), where)

    def _later(self, key: str, schema: object, path: str) -> Part:
        """A rule for a schema that may refer to itself."""
        if key not in self._referred:
            self._referred[key] = self.rules.reserve()
            self._waiting.append((self._referred[key], schema, path))
        return self._referred[key]

    def _target(self, reference: object, path: str) -> object:
        return target(self._whole if isinstance(self._whole, dict) else {}, reference, path)

    def _values(self, node: Schema, chosen: str, path: str) -> Part:
        values, kinds = values_of(node), given_kinds(node, path)
        if chosen == "enum" and not isinstance(node["enum"], list):
            raise BadRequest(f"{path}.enum is {shown(node['enum'])}; it must be a list of values", path)
        fitting = [value for value in values or [] if kinds is None or is_of(value, kinds)]
        if not fitting:
            what = f"has no value of type {shown(node.get('type'))}" if values else "is empty"
            raise BadRequest(f"{path}.{chosen} {what}, so that nothing is allowed; correct it", path)
        return one_of([Text(_json(value, path)) for value in fitting])

    def _all_of(self, parts: list[object], path: str) -> Part:
        telling = [part for part in parts if _tells(part)]
        if len(telling) > 1:
            raise BadRequest(
                f"{path} uses allOf with {len(telling)} schemas, which structured output cannot enforce; merge them "
                "into one",
                path,
            )
        return self.convert(
            telling[0] if telling else True, f"{path}.allOf[{parts.index(telling[0]) if telling else 0}]"
        )

    def _check_one_of(self, parts: list[object], path: str) -> None:
        """Refuse parts that may overlap: a value that two of them allow would be wrong."""
        listed = [values_of(part) if isinstance(part, dict) else None for part in parts]
        if all(values is not None for values in listed):
            keys = [identity(value) for values in listed for value in values or []]
            is_apart = len(set(keys)) == len(keys)
        else:
            pairs = [(one, other) for index, one in enumerate(parts) for other in parts[:index]]
            is_apart = len(parts) <= MAX_COMPARED and all(differ(one, other, self._resolved) for one, other in pairs)
        if not is_apart:
            raise not_kept(
                path,
                "oneOf with schemas that may allow the same value",
                "use anyOf, or tell them apart by a required constant",
            )

    def _resolved(self, schema: object) -> object:
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], self._param)
        return schema

    # ------------------------------------------------------------ types

    def _typed(self, node: Schema, path: str) -> Part:
        kinds = given_kinds(node, path)
        kinds = kinds or told_kinds(node)
        if not kinds:
            return self.any_value()
        makers: Mapping[str, Callable[[], Part]] = {
            "object": lambda: object_(self, node, path),
            "array": lambda: array(self, node, path),
            "string": lambda: string(self.rules, node, path),
            "number": lambda: self._number(node, path, is_whole=node.get("multipleOf") == 1),
            "integer": lambda: self._number(node, path, is_whole=True),
            "boolean": lambda: OneOf((Text("true"), Text("false"))),
            "null": lambda: Text("null"),
        }
        return one_of([self.rules.name(makers[kind]()) if len(kinds) > 1 else makers[kind]() for kind in kinds])

    def _number(self, node: Schema, path: str, *, is_whole: bool) -> Part:
        bounds = Bounds(
            *(number(node, word, path) for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        )
        expression = integers(bounds) if is_whole else numbers(bounds)
        if expression is None:
            given = ", ".join(
                f"{word} {shown(node[word])}" for word in KEYWORDS["number"] if node.get(word) is not None
            )
            raise BadRequest(f"{path} has {given}, between which no number lies; correct one of them", path)
        return self._matching(expression)

    def _matching(self, expression: str) -> Part:
        return RuleWriter(self.rules, in_json=False).part(parse(expression, "number"))

    def any_value(self) -> Part:
        key = ""
        if key not in self._referred:
            named = self._referred[key] = self.rules.reserve()
            self._define_any(named)
        return self._referred[key]

    def _define_any(self, value: NamedRule) -> None:
        comma = row(Text(","), self.space)
        text = self.rules.name(plain_string())
        member = self.rules.name(row(text, self.space, Text(":"), self.space, value, self.space))
        item = self.rules.name(row(value, self.space))
        options: list[Part] = [text, self.rules.name(self._matching(NUMBER)), Text("true"), Text("false"), Text("null")]
        for begin, part, end in (("{", member, "}"), ("[", item, "]")):
            several = row(part, Many(row(comma, part), 0, None))
            options.append(self.rules.name(row(Text(begin), self.space, one_of([EMPTY, several]), Text(end))))
        self.rules.define(value, one_of(options))


def _asks(node: Schema, word: str) -> bool:
    """Whether a keyword asks for something. allOf does when one of its parts does."""
    parts = node.get("allOf")
    return asks(node, word) and (word != "allOf" or not isinstance(parts, list) or any(_tells(part) for part in parts))


def _tells(part: object) -> bool:
    return part is not True and not (
        isinstance(part, dict) and not any(asks(part, word) for word in (*CONSTRAINTS, *NOT_ENFORCED))
    )


def _says(part: object, word: str, wanted: object) -> bool:
    """Whether one of several schemas has the keyword with the same value."""
    if not isinstance(part, dict):
        return False
    if word == "type" and (values := values_of(part)) is not None:
        kinds = wanted if isinstance(wanted, list) else [wanted]
        return all(is_of(value, tuple(kind for kind in kinds if kind in KINDS)) for value in values)
    try:
        return word in part and bool(part[word] == wanted)
    except RecursionError:  # nested more deeply than anything accepted
        return False


def _json(value: object, path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise BadRequest(f"{path} has a value that is nested too deeply; send a flatter one", path) from error
    except ValueError as error:
        raise BadRequest(f"{path} has a number of more digits than can be written; send a smaller one", path) from error

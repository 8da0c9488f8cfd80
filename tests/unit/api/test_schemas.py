"""What a compiler of grammars would pass over in a schema is refused by its place; what only stands beside it is not."""

import json

import jsonschema
import pytest

from pdcluster.api.schemas import check_schema
from pdcluster.errors import BadRequest

INTEGER = {"type": "integer"}

def test_properties_named_like_keywords_are_properties():
    check_schema({"type": "object", "properties": {"not": {"type": "string"}, "if": {}, "contains": {}}}, "schema")
    check_schema({"anyOf": [{"enum": [{"not": 1}]}, {"const": {"if": 2}}]}, "schema")


@pytest.mark.parametrize("at", ["items", "additionalProperties", "anyOf", "oneOf", "prefixItems", "properties", "$defs", "patternProperties"])
def test_what_would_not_be_kept_is_found_wherever_it_stands(at):
    inner = {"uniqueItems": True}
    value = [inner] if at in ("anyOf", "oneOf", "prefixItems") else {"x": inner} if at in ("properties", "$defs", "patternProperties") else inner
    with pytest.raises(BadRequest, match=r"uniqueItems, which structured output cannot enforce"):
        check_schema({"type": "object", at: value} if at == "patternProperties" else {at: value}, "schema")


UNKEPT = {
    "a reference to a part that is no definition": ({"$ref": "#/x", "x": {"type": "array", "uniqueItems": True}}, r"schema\.x uses uniqueItems"),
    "a reference in a reference": ({"$ref": "#/a", "a": {"$ref": "#/b/c"}, "b": {"c": {"multipleOf": 2}}}, r"schema\.b\.c uses multipleOf"),
    "a reference to another document": ({"items": {"$ref": "http://x/y"}}, r'schema\.items uses \$ref "http://x/y".*such as #/\$defs/NAME'),
    "a reference to an anchor": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, r'uses \$ref "#a"'),
    "a reference that is no text": ({"$ref": 5}, r"uses \$ref 5"),
    "a reference to nothing": ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "has no such part"),
    "a dynamic reference": ({"$dynamicRef": "#/$defs/a", "$defs": {"a": INTEGER}}, r"\$dynamicRef"),
    "a bound beside a reference": ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, r"minimum beside \$ref"),
    "a bound beside a choice": ({"anyOf": [INTEGER], "minimum": 3}, "minimum beside anyOf"),
    "properties beside a choice": ({"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"type": "object"}]}, "properties beside anyOf"),
    "a type beside a choice of others": ({"type": "integer", "oneOf": [INTEGER, {"type": "string"}]}, "type beside oneOf"),
    "a type beside one part": ({"type": "string", "allOf": [INTEGER]}, "type beside allOf"),
    "a length beside values": ({"enum": ["a", "bb"], "maxLength": 1}, "maxLength beside enum"),
    "a type that a value is not of": ({"type": "integer", "const": "a"}, "type beside const"),
    "a type that truth is not of": ({"type": "integer", "enum": [1, True]}, "type beside enum"),
    "a bound without a type": ({"minimum": 5}, 'minimum without a type.*add "type": "number"'),
    "names without a type": ({"required": ["a"]}, "required without a type"),
    "a length beside a pattern": ({"type": "string", "pattern": "a+", "maxLength": 3}, "maxLength beside pattern"),
    "a length beside a format": ({"type": ["string", "null"], "format": "date", "minLength": 3}, "minLength beside format"),
    "a name that is no property": ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, 'required with "b"'),
}


@pytest.mark.parametrize("case", UNKEPT)
def test_what_the_compiler_passes_over_is_refused_by_its_place(case):
    schema, words = UNKEPT[case]
    with pytest.raises(BadRequest, match=words):
        check_schema(schema, "schema")


KEPT = (
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}}, "title": "A", "default": None},
    {"type": "object", "properties": {"a": INTEGER, "b": {"$ref": "#/properties/a", "description": "as a"}}, "required": ["b"]},
    {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": INTEGER}},
    {"type": "string", "enum": ["a", "b"]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "number", "const": 1},
    {"type": "object", "anyOf": [{"type": "object", "title": "A"}, {"type": "object", "properties": {}}]},
    {"properties": {"a": INTEGER}, "required": ["a"]},
    {"items": INTEGER, "minItems": 1},
    {"type": "integer", "required": ["a"], "pattern": "a", "minLength": 1},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "object", "required": []},
)


@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_what_says_the_same_or_nothing_may_stand_beside(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    check_schema(schema, "schema")


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_nested_too_deeply_to_compare_is_refused():
    with pytest.raises(BadRequest, match="minimum beside anyOf"):
        check_schema({"anyOf": [{"minimum": nested(3000)}], "minimum": nested(3000)}, "schema")

"""What a grammar would not keep of a schema is refused by its place; what changes nothing may stand anywhere."""

import json

import jsonschema
import pytest
from grammar_walk import compiled

from pdcluster.api.structured.forms import json_form
from pdcluster.core.errors import BadRequest

INTEGER = {"type": "integer"}


def grammar_of_schema(schema: object, param: str) -> object:
    """Raises BadRequest for what cannot be kept, as it is found here or by the library."""
    form = json_form(schema, param)
    compiled(form, param)
    return form.body


def test_properties_named_like_keywords_are_properties():
    grammar_of_schema({"type": "object", "properties": {"not": {"type": "string"}, "if": {}, "contains": {}}}, "schema")
    grammar_of_schema({"anyOf": [{"enum": [{"not": 1}]}, {"const": {"if": 2}}]}, "schema")


@pytest.mark.parametrize(
    "at", ["items", "additionalProperties", "anyOf", "oneOf", "prefixItems", "properties", "patternProperties"]
)
def test_what_would_not_be_kept_is_found_wherever_it_stands(at):
    inner = {"type": "array", "uniqueItems": True}
    value = (
        [inner]
        if at in ("anyOf", "oneOf", "prefixItems")
        else {"x": inner}
        if at in ("properties", "patternProperties")
        else inner
    )
    with pytest.raises(BadRequest, match=r"uniqueItems, which structured output cannot enforce"):
        grammar_of_schema({at: value}, "schema")


def required(name: str, schema: object = True) -> dict:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


UNKEPT = {
    "a reference to a part that is no definition": (
        {"$ref": "#/x", "x": {"type": "array", "uniqueItems": True}},
        r"schema\.x uses uniqueItems",
    ),
    "a reference to another document": (
        {"items": {"$ref": "http://x/y"}},
        r'schema\.items uses \$ref "http://x/y".*such as #/\$defs/NAME',
    ),
    "a reference to an anchor": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, r'uses \$ref "#a"'),
    "a reference that is no text": ({"$ref": 5}, r"uses \$ref 5"),
    "a reference to nothing": ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, 'the schema has no "b" there'),
    "a reference to nothing, escaped": ({"$ref": "#/$defs/a~1c", "$defs": {"a": {}}}, 'the schema has no "a/c" there'),
    "a reference with half a character": ({"$ref": "#/$defs/%ff", "$defs": {}}, "no .* there"),
    "a reference beyond a list": ({"anyOf": [INTEGER, {"$ref": "#/anyOf/2"}]}, 'no "2" there'),
    "a dynamic reference": ({"$dynamicRef": "#/$defs/a", "$defs": {"a": INTEGER}}, r"\$dynamicRef"),
    "a type beside one part": ({"type": "string", "allOf": [INTEGER]}, "incompatible types"),
    "a format beside values": ({"enum": ["a", "bb"], "format": "date"}, "Regex is empty"),
    "a type that a value is not of": ({"type": "integer", "const": "a"}, "incompatible types"),
    "no value": ({"enum": []}, "anyOf is empty"),
    "a length beside a pattern that it shortens to nothing": (
        {"pattern": "^a{4}$", "maxLength": 3},
        "Regex is empty",
    ),
    "a length that a format never has": ({"format": "uuid", "minLength": 50}, "Regex is empty"),
    "a format that no grammar keeps": ({"type": ["string", "null"], "format": "regex"}, "format regex"),
    "a condition": ({"if": INTEGER, "then": {"minimum": 3}}, "if, which"),
    "one of two that overlap": (
        {"oneOf": [INTEGER, {"type": "number"}]},
        "oneOf with schemas that may allow the same value",
    ),
    "one of two values that are the same": (
        {"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]},
        "oneOf with schemas that may allow",
    ),
    "one of two objects that could be either": ({"oneOf": [required("a"), required("a")]}, "oneOf with schemas"),
    "one that may be one of the other": (
        {"oneOf": [required("a"), {"type": "object", "properties": {"b": {}}}]},
        "oneOf with schemas",
    ),
    "names that could repeat": (
        {"type": "object", "minProperties": 2},
        "minProperties 2 with names that are not declared",
    ),
    "patterns that overlap": (
        {"patternProperties": {"^a": INTEGER, "b$": {"type": "string"}}},
        "are not disjoint",
    ),
    "names in two ways": (
        {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
        "propertyNames of more than a list or a pattern, or beside other names",
    ),
    "a declared name in other names": (
        {
            "properties": {"a": INTEGER},
            "additionalProperties": {"type": "string"},
            "propertyNames": {"pattern": "^[a-z]+$"},
        },
        "propertyNames of more than a list or a pattern, or beside other names",
    ),
    "names that are more than text": ({"propertyNames": {"anyOf": [{"pattern": "a"}]}}, "propertyNames with anyOf"),
}
WRONG = {
    "a type that does not exist": ({"type": "strnig"}, "Invalid type: strnig"),
    "no type": ({"type": []}, "allows no value"),
    "a schema that is none": ({"items": 5}, r"schema\.items is 5; it must be a schema"),
    "a length that is none": ({"minLength": "3"}, "positive integer for 'minLength', got \"3\""),
    "a negative length": ({"minItems": -1}, "positive integer for 'minItems', got -1"),
    "a bound of an older draft": (
        {"minimum": 3, "exclusiveMinimum": True},
        "exclusiveMinimum is true; it must be a number",
    ),
    "bounds that exclude each other": (
        {"type": "integer", "minimum": 5, "maximum": 3},
        r"minimum \(5\) is greater than maximum \(3\)",
    ),
    "no integer between": (
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        "contains no integer",
    ),
    "lengths that exclude each other": (
        {"minLength": 3, "maxLength": 2},
        r"minLength \(3\) is greater than maxLength \(2\)",
    ),
    "counts that exclude each other": (
        {"minItems": 3, "maxItems": 2},
        r"minItems \(3\) is greater than maxItems \(2\)",
    ),
    "numbers of properties": (
        {"properties": {"a": {}}, "required": ["a"], "maxProperties": 0},
        "required > maxProperties",
    ),
    "a choice that is no list": ({"anyOf": {}}, r"anyOf is \{\}; it must be a list"),
    "an empty choice": ({"anyOf": []}, "allows no value"),
    "properties that are no object": ({"properties": [1]}, r"properties is \[1\]; it must be an object"),
    "names that are no list": ({"type": "object", "required": "a"}, 'required is "a"; it must be a list'),
    "a pattern that is no text": ({"pattern": 5}, "pattern is 5; a pattern is a string"),
    "names that are no text": ({"propertyNames": {"type": "integer"}}, "must be a schema of strings"),
}
ENDLESS = {
    "itself": {"$ref": "#"},
    "two in a circle": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
    },
    "a property that needs itself": {"$ref": "#/$defs/a", "$defs": {"a": required("next", {"$ref": "#/$defs/a"})}},
    "a list that needs itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "nothing": False,
    "a property that must be nothing": required("a", False),
    "a required name that is not allowed": {
        "properties": {"a": INTEGER},
        "required": ["b"],
        "additionalProperties": False,
    },
    "an item that is nothing": {"type": "array", "items": False, "minItems": 1},
}
REFUSED = UNKEPT | WRONG | {case: (schema, "allows no value that ends") for case, schema in ENDLESS.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_by_its_place(case):
    schema, words = REFUSED[case]
    with pytest.raises(BadRequest, match=words):
        grammar_of_schema(schema, "schema")


KEPT = (
    {"properties": {"a": {}, "b": {}}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False, "required": ["x1"]},
    {"$ref": "#/a", "a": {"$ref": "#/b/c"}, "b": {"c": {"multipleOf": 2}}},
    {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}},
    {"anyOf": [INTEGER], "minimum": 3},
    {"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"type": "object"}]},
    {"type": "integer", "oneOf": [INTEGER, {"type": "string"}]},
    {"allOf": [INTEGER, {"minimum": 3}]},
    {"enum": ["a", "bb"], "maxLength": 1},
    {"format": "date", "pattern": "a"},
    {"type": "number", "multipleOf": 0.01},
    {"type": "integer", "multipleOf": 2},
    {"properties": {"ab": INTEGER}, "patternProperties": {"^a": {"type": "string"}}},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}},
        "title": "A",
        "default": None,
    },
    {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"$ref": "#/properties/a", "description": "as a"}},
        "required": ["b"],
    },
    {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": INTEGER}},
    {"type": "string", "enum": ["a", "b"]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "integer", "enum": [1, True]},
    {"type": "number", "const": 1},
    {"type": "object", "anyOf": [{"type": "object", "title": "A"}, {"type": "object", "properties": {}}]},
    {"properties": {"a": INTEGER}, "required": ["a"]},
    {"required": ["a"]},
    {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
    {"minimum": 5},
    {"items": INTEGER, "minItems": 1},
    {"type": "integer", "required": ["a"], "pattern": "a", "minLength": 1},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
    {"type": "string", "format": "date", "minLength": 10},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
    {"oneOf": [INTEGER, {"type": "string"}, {"type": "null"}]},
    {"oneOf": [required("kind", {"const": "a"}), required("kind", {"const": "b"})]},
    {"oneOf": [required("a"), required("b")]},
    {"allOf": [{"$ref": "#/$defs/a"}, {}, {"title": "x"}], "description": "d", "$defs": {"a": INTEGER}},
)


@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_what_says_the_same_or_can_be_kept_is_taken(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    grammar_of_schema(schema, "schema")


HARMLESS = (
    {"uniqueItems": False},
    {"minLength": 0},
    {"minItems": 0},
    {"minProperties": 0},
    {"required": []},
    {"not": False},
    {"if": {"minimum": 3}},
    {"then": {"minimum": 3}, "else": False},
    {"dependentRequired": {}},
    {"dependentSchemas": {}},
    {"contains": {"const": 1}, "minContains": 0},
    {"minContains": 2},
    {"unevaluatedItems": True},
    {"unevaluatedProperties": {}},
    {"allOf": []},
    {"patternProperties": {}},
    {"propertyNames": True},
    {"items": {}},
    {"prefixItems": []},
    {
        "title": "t",
        "description": "d",
        "default": 3,
        "examples": [1],
        "$comment": "c",
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
    },
    {"format": "int64"},
    {"format": "password"},
    {"contentEncoding": "base64"},
    {"$schema": "x", "$id": "y", "$defs": {"z": {}}},
    {"x-own": 1},
    {"nullable": False, "discriminator": {}, "example": 5, "externalDocs": {}},
    {"minimum": None, "pattern": None, "enum": None, "$ref": None},
)
BARE = (
    INTEGER,
    {"type": "string", "maxLength": 3},
    {"enum": [1, "a"]},
    {"type": "array", "items": INTEGER},
    required("a"),
    {"anyOf": [INTEGER, {"type": "null"}]},
    {"$ref": "#/definitions/i", "definitions": {"i": INTEGER}},
    {"const": None},
)


@pytest.mark.parametrize("harmless", HARMLESS, ids=json.dumps)
def test_a_keyword_that_asks_for_nothing_changes_nothing_wherever_it_stands(harmless):
    for schema in BARE:
        own = {keyword: value for keyword, value in harmless.items() if keyword not in schema}
        if not (
            isinstance(harmless.get("format"), str) and schema.get("type") == "string" and harmless["format"] == "int64"
        ):
            assert grammar_of_schema({**schema, **own}, "schema") == grammar_of_schema(schema, "schema"), schema


def test_null_beside_a_reference_asks_for_nothing():
    grammar_of_schema({"allOf": [{"$ref": "#/$defs/a", "allOf": None}, {}], "$defs": {"a": INTEGER}}, "schema")


def test_what_every_value_of_a_type_is_may_be_asked_for():
    for more in ({"multipleOf": 1}, {"multipleOf": 1.0}, {"format": "int32"}, {"additionalProperties": True}):
        grammar_of_schema({**INTEGER, **more}, "schema")
    for more in ({"type": "string"}, {"minLength": 0}, {}):
        assert grammar_of_schema({"type": "object", "propertyNames": more}, "schema") == grammar_of_schema(
            {"type": "object"}, "schema"
        )


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_nested_too_deeply_is_refused():
    with pytest.raises(BadRequest, match=r"minimum is .*must be a number"):
        grammar_of_schema({"anyOf": [{"minimum": nested(100_000)}], "minimum": nested(100_000)}, "schema")
    with pytest.raises(BadRequest, match="nested too deeply"):
        grammar_of_schema({"const": nested(100_000)}, "schema")
    schema: dict = {}
    for _ in range(3000):
        schema = {"items": schema, "type": "array"}
    with pytest.raises(BadRequest, match="nested too deeply"):
        grammar_of_schema(schema, "schema")


@pytest.mark.parametrize("keyword", ["const", "minimum", "maxLength", "minItems", "enum"])
def test_a_number_of_more_digits_than_python_writes_is_refused(keyword):
    with pytest.raises(BadRequest, match=r"beyond 2\^|cannot be written: Exceeds the limit"):
        json_form({keyword: [10**5000] if keyword == "enum" else 10**5000}, "schema")


def test_a_schema_of_too_many_parts_is_refused():
    with pytest.raises(BadRequest, match="more than 10000 schemas"):
        grammar_of_schema({"anyOf": [INTEGER] * 10_001}, "schema")
    grammar_of_schema({"type": "object", "properties": {f"p{number}": INTEGER for number in range(3000)}}, "schema")
    chain = {f"d{number}": {"type": "array", "items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(3000)}
    json_form(
        {"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": INTEGER}}, "schema"
    )  # its compiler needs a large stack

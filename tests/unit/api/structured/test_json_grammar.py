"""Whatever a schema's grammar allows is JSON, and what the schema asks for: texts drawn through its masks, checked by
others' readers and checkers."""

import datetime
import ipaddress
import json
import re
import uuid
from urllib.parse import urlsplit

import jsonschema
import pytest
from drawn_examples import examples
from grammar_walk import allows, compiled, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import random_schema

from pdcluster.api.structured.forms import json_form
from pdcluster.api.structured.string_formats import KEPT
from pdcluster.core.errors import BadRequest


def values(schema: object, number: int = 20, most: int = 400) -> list:
    """Of texts that a grammar allows and that end in time, as a reader gets them."""
    grammar = compiled(json_form(schema, "schema"))
    texts = [text for seed in range(number) if (text := drawn(grammar, seed, most)) is not None]
    assert texts, "nothing ended"
    read = [json.loads(text.decode(), parse_constant=lambda name: pytest.fail(name)) for text in texts]
    return [value for value in read if "Infinity" not in json.dumps(value)]


def fits(schema: object, value: object) -> bool:
    return allows(compiled(json_form(schema, "schema")), json.dumps(value, ensure_ascii=False))


def required(**properties: object) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# ---------------------------------------------------------------- patterns speak of values

PATTERNS = (
    r'^"[a-z]+"$',
    r"^\\\\d$",
    r"^\\d$",
    r"^a\tb$",
    "^a\tb$",
    r"^[^a]+$",
    r'^["\\]{2,5}x$',
    r"^[\x00-\x1f]{3}$",
    r"^\S+\s\W$",
    r"^.$",
    r"^\u0022\x5c$",
    r"^\D\W\S$",
    "^C:\\\\[a-z]*$",
    r"^(\n|\r\n)+$",
    '^[^"]*$',
    "^/[a-z/]*$",
    "^é+😀$",
    "^[\u0000-\uffff]{2}$",
    "a{2}|b$",
    "^x",
    '"$',
    "",
    "()",
    "[0-9]",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_speaks_of_the_value_and_not_of_how_json_writes_it(pattern):
    schema = required(x={"type": "string", "pattern": pattern})
    for value in values(schema):
        jsonschema.validate(value, schema)
        assert re.search(pattern, value["x"])


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern and pattern != "a{2}|b$"])
@pytest.mark.parametrize("keyword", ["patternProperties", "propertyNames"])
def test_so_does_a_pattern_of_names(pattern, keyword):
    schema = {"type": "object", "minProperties": 1, "additionalProperties": keyword == "propertyNames"}
    schema[keyword] = {pattern: {"type": "integer"}} if keyword == "patternProperties" else {"pattern": pattern}
    for value in values(schema, 10):
        jsonschema.validate(value, schema)
        assert value and all(re.search(pattern, name) for name in value)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^"[a-z]+"$', '"ab"', "ab"),
        (r"^\\\\d$", r"\\d", r"\\1"),
        (r"^\\d$", r"\d", "5"),
        (r"^a\tb$", "a\tb", "atb"),
        ("^S_", "S_more", "s"),
        ("_id$", "x_id", "x_id2"),
        ("[a-z]{3}", "abcd", "ab"),
        (r"\S", "several words", " "),
        ("^[a-z]{3}$", "abc", "abcd"),
        ('^[^"]$', "a", '"'),
        (r"^[^\\]$", "a", "\\"),
        (r"^[\x00-\x1f]$", "\n", '"'),
        ("", "anything", None),
        (r"^\/$", "/", r"\/"),
        ("^[^a]$", "b", "a"),
    ],
)
def test_values_that_fit_a_pattern_can_be_said(pattern, right, wrong):
    schema = {"type": "string", "pattern": pattern}
    assert fits(schema, right) and (wrong is None or not fits(schema, wrong))


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
        {"pattern": "[0-9]", "minLength": 3},
        {"pattern": "^[a-z]+@[a-z]+$", "maxLength": 9},
        {"pattern": "^(ab|c)*$", "minLength": 2, "maxLength": 6},
        {"pattern": '^"', "minLength": 4, "maxLength": 4},
        {"format": "email", "maxLength": 30},
        {"format": "uri", "minLength": 1, "maxLength": 60},
        {"minLength": 2, "maxLength": 3},
        {"minLength": 70, "maxLength": 90},
        {"minLength": 80},
        {"maxLength": 0},
        {"maxLength": 10_000_000},
        {"minLength": 3},
    ],
)
def test_lengths_are_kept_beside_patterns_and_formats(schema):
    for value in values({"type": "string", **schema}, 12, 600):
        jsonschema.validate(value, {"type": "string", **schema})


@given(
    st.lists(
        st.sampled_from(
            [
                '"',
                "\\",
                "\\u",
                "d800",
                "dc00",
                "0041",
                "n",
                "x",
                "\n",
                "\x1f",
                "\x7f",
                "é",
                "😀",
                "{",
                "\\ud83d\\ude00",
                "/",
            ]
        ),
        max_size=6,
    ).map("".join)
)
@settings(max_examples=examples(60, 5000), deadline=None)
def test_a_string_is_what_json_takes_for_one_and_has_no_half_characters(inside):
    """All but \\/ and a raw U+007F, which nobody needs."""
    try:
        value = json.loads(f'"{inside}"')
        value.encode()
        is_right = isinstance(value, str) and "\x7f" not in inside and r"\/" not in inside.replace(r"\\", "")
    except (ValueError, UnicodeEncodeError):
        is_right = False
    assert allows(ANY, f'"{inside}"') is is_right
    assert allows(SHORT, f'"{inside}"') is (is_right and 1 <= len(value) <= 4)


ANY, SHORT = (
    compiled(json_form(schema, "schema"))
    for schema in ({"type": "string"}, {"type": "string", "minLength": 1, "maxLength": 4})
)


# ---------------------------------------------------------------- constants and numbers

EXACT = (2**53, -(2**53), 1.5, 1e22, 5e-324, 0, -0.0, 1.0, 'quo"te\\ \n', [2**53], {'a"b': 2**62})
INEXACT = (2**53 + 1, 2**64 - 1, 2**63, -(2**63) - 1, 10**40, [2**64], {'a"b': 2**65})


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_a_constant_is_said_exactly(value):
    for schema in ({"const": value}, {"enum": [value]}, {"anyOf": [{"const": value}]}, required(x={"const": value})):
        found = values(schema, 3)[0]
        found = found["x"] if "required" in schema else found
        assert found == value


@pytest.mark.parametrize("value", INEXACT, ids=repr)
def test_a_constant_that_no_double_holds_is_refused(value):
    for schema in ({"const": value}, {"enum": [1, value]}, required(x={"const": value})):
        with pytest.raises(BadRequest, match=r"a number beyond 2\^53"):
            json_form(schema, "schema")


NUMBERS = (
    st.integers(-30, 30)
    | st.integers(-(10**25), 10**25)
    | st.decimals(-20, 20, places=3).map(float)
    | st.sampled_from([0.1, 1e-7, -0.0, 2**64 - 1])
)


WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@given(
    st.fixed_dictionaries({"type": st.sampled_from(["integer", "number"])}, optional=dict.fromkeys(WORDS, NUMBERS)),
    st.data(),
)
@settings(max_examples=examples(60, 5000), deadline=None)
def test_numbers_keep_their_bounds_however_many_digits_they_have(schema, data):
    try:
        grammar = compiled(json_form(schema, "schema"))
    except BadRequest:
        return
    bounds = [value for value in schema.values() if value not in ("integer", "number")]
    near = data.draw(st.sampled_from([*bounds, 0])) + data.draw(
        st.sampled_from([0, 1, -1, 2, 0.5, 1e-3, -1e-15, 1e-15])
    )
    for text in {str(near), f"{near:.15f}", str(int(near))}:
        if allows(grammar, text):
            value = int(text) if set(text) <= set("-0123456789") else json.loads(text)
            assert jsonschema.Draft202012Validator(schema).is_valid(value), text


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 6}, ["3", "5"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, ["0.20", "0.25", "0.001"]),
        ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854774784", "-5"]),
        ({"type": "integer", "minimum": -(10**18), "maximum": 10**18}, ["1000000000000000000", "-1000000000000000000"]),
        ({"type": "number", "multipleOf": 0.5}, ["0.5", "-3", "3.0"]),
        ({"type": "integer", "multipleOf": 7, "minimum": 10}, ["14", "21"]),
    ],
    ids=json.dumps,
)
def test_what_is_between_the_bounds_can_be_said(schema, right):
    grammar = compiled(json_form(schema, "schema"))
    assert [text for text in right if not allows(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53 + 5},
        {"type": "integer", "maximum": 10**350},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.25},
        {"type": "number", "minimum": -0.5, "maximum": 0},
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"type": "integer"},
        {"type": "number", "multipleOf": 1, "minimum": 0.5},
        {"type": ["integer", "null"], "maximum": 9.5},
    ],
    ids=json.dumps,
)
def test_drawn_numbers_are_between_their_bounds(schema):
    for value in values(schema):
        jsonschema.validate(value, schema)


@pytest.mark.parametrize("schema", [{"minimum": 1e300}, {"type": "integer", "exclusiveMinimum": 2**64}], ids=json.dumps)
def test_a_bound_that_leaves_only_numbers_beyond_2_63_is_refused(schema):
    with pytest.raises(BadRequest, match=r"a bound beyond 2\^63"):
        json_form(schema, "schema")


# ---------------------------------------------------------------- formats


def is_host(text: str) -> bool:
    return len(text) <= 253 and all(
        re.fullmatch(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?", label) for label in text.split(".")
    )


def is_uri(text: str) -> bool:
    found = urlsplit(text)
    return (
        bool(found.scheme)
        and found.port != 0
        and re.fullmatch(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", text) is not None
    )


CHECKERS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "duration": lambda text: re.fullmatch(r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)", text),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "uuid4": lambda text: uuid.UUID(text).version == 4,
    "hostname": is_host,
    "idn-hostname": is_host,
    "email": lambda text: (
        len(text.split("@")[0]) <= 64 and is_host(text.split("@")[1]) and "." in text.split("@")[1] and ".." not in text
    ),
    "idn-email": lambda text: is_host(text.split("@")[1]),
    "uri": is_uri,
    "iri": is_uri,
    "uri-reference": lambda text: [urlsplit(text).port],
    "json-pointer": lambda text: re.fullmatch(r"(/([^~/]|~0|~1)*)*", text),
    "relative-json-pointer": lambda text: re.match(r"(0|[1-9]\d*)(#$|/|$)", text),
    "uri-template": lambda text: text.count("{") == text.count("}"),
}


@pytest.mark.parametrize("name", [name for name in KEPT if name in CHECKERS])
def test_a_format_is_kept_as_others_check_it(name):
    for text in values({"type": "string", "format": name}, 40):
        assert CHECKERS[name](text), text


SAID = {
    "date": (
        ("2024-02-29", "2000-02-29", "1999-12-31"),
        ("2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "24-01-01"),
    ),
    "time": (("23:59:59Z", "00:00:00.5+05:30"), ("24:00:00Z", "12:60:00Z", "12:00:00")),
    "ipv4": (("0.0.0.0", "255.249.99.10"), ("4.011.011.023", "256.1.1.1", "1.1.1", "1.1.1.1.1")),
    "ipv6": (
        ("::", "::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "fe80::1"),
        ("1::2::3", "12345::", "1:2:3:4:5:6:7", "::1.2.3.256"),
    ),
    "uuid": (
        ("123e4567-e89b-12d3-a456-426614174000",),
        ("123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"),
    ),
    "email": (("a.b+c@example.org",), ("a@b", "a..b@example.org", "@example.org", "a b@example.org")),
    "idn-email": (("a@example.org",), ("a@", "example.org")),
    "hostname": (("www.example.com", "a-b.c"), ("-a.com", "a..b", "a_b.com", "")),
    "uri": (
        ("https://example.com/a/b?c=d#e", "urn:isbn:123", "http://[::1]:8080/", "mailto:a@b.org"),
        ("//example.com", "http://a b", "a", "http://x:99999/"),
    ),
    "date-time": (("2024-01-01T00:00:00Z",), ("2024-01-01 00:00:00Z", "2024-01-01T00:00:00")),
    "duration": (("P1Y2M3D", "PT1H30M", "P2W"), ("P", "PT", "P1W2D", "1Y")),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_usual_of_a_format_can_be_said_and_what_is_wrong_can_not(name):
    grammar = compiled(json_form({"type": "string", "format": name}, "schema"))
    right, wrong = SAID[name]
    assert [text for text in right if not allows(grammar, f'"{text}"')] == []
    assert [text for text in wrong if allows(grammar, f'"{text}"')] == []


# ---------------------------------------------------------------- whole schemas

REFERENCES = {
    "a slash": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, 1),
    "a tilde": ({"$ref": "#/$defs/a~0b", "$defs": {"a~b": {"const": 1}}}, 1),
    "a tilde before a one": ({"$ref": "#/$defs/a~01b", "$defs": {"a~1b": {"const": 1}}}, 1),
    "percents": ({"$ref": "#/$defs/a%20b%25%22", "$defs": {'a b%"': {"const": 1}}}, 1),
    "an encoded slash and tilde": ({"$ref": "#/$defs/%C3%A9%7E1", "$defs": {"é/": {"const": 1}}}, 1),
    "a place in a list": (
        {"anyOf": [{"const": "x"}, {"type": "array", "items": {"$ref": "#/anyOf/0"}, "minItems": 1, "maxItems": 1}]},
        ["x"],
    ),
    "an empty key": ({"$ref": "#/$defs/", "$defs": {"": {"const": 1}}}, 1),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_a_reference_is_read_as_a_json_pointer(case):
    schema, value = REFERENCES[case]
    jsonschema.validate(value, schema)
    assert fits(schema, value)
    for found in values(schema, 5):
        jsonschema.validate(found, schema)


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
TRAP = required(a={"type": "integer"}) | {"$defs": {"loop": required(again={"$ref": "#/$defs/loop"})}}
TRAP["properties"] = {
    **TRAP["properties"],
    "b": {"$ref": "#/$defs/loop"},
    "c": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
}
# A union as pydantic writes it: the kind has a default, so it is not required.
KINDS = {
    "$defs": {
        name: {
            "type": "object",
            "properties": {
                "kind": {"const": name, "default": name},
                "children": {
                    "type": "array",
                    "items": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
                    "maxItems": 2,
                },
            },
        }
        for name in "ab"
    },
    "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    "discriminator": {"propertyName": "kind"},
}
WHOLE = (
    KINDS,
    TREE,
    TRAP,
    {},
    True,
    {"type": "object"},
    {"type": "array"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 3},
    {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "integer"},
        "required": ["a", "b"],
    },
    {
        "allOf": [
            required(a={"type": "integer"}) | {"additionalProperties": True},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    {
        "$ref": "#/$defs/base",
        "properties": {"b": {"type": "null"}},
        "required": ["b"],
        "$defs": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    },
    {
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    {"type": "string", "format": "date", "pattern": "^20"},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}],
        "additionalItems": {"type": "null"},
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["z"],
        "additionalProperties": {"type": "boolean"},
    },
    {"type": "object", "maxProperties": 1},
    {"type": "object", "propertyNames": {"maxLength": 2}, "minProperties": 1},
    {
        "type": "object",
        "propertyNames": {"enum": ["a", 'b"']},
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
    },
    {
        "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}},
        "properties": {"S_1": {"type": "string"}},
        "additionalProperties": False,
    },
    {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 4,
    },
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
    {"type": "array", "maxItems": 0},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {
        "oneOf": [
            required(kind={"const": "a"}, n={"type": "integer"}),
            required(kind={"const": "b"}, n={"type": "string"}),
        ]
    },
    {"oneOf": [required(a=True), required(b=True)]},
    {"type": ["integer", "string", "null", "boolean"]},
    {"type": "integer", "enum": [1, "a", 2.0]},
    {
        "type": "object",
        "properties": {"a": {"not": False, "type": "string"}, "gone": False},
        "additionalProperties": True,
    },
    {"const": None},
)


@pytest.mark.parametrize("schema", WHOLE, ids=lambda schema: json.dumps(schema)[:80])
def test_what_is_drawn_is_valid(schema):
    for value in values(schema, 25):
        jsonschema.validate(value, schema)


def test_a_part_that_never_ends_is_never_entered():
    assert {frozenset(value) for value in values(TRAP, 30)} <= {frozenset("a"), frozenset("ac")}


@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(30, 1000))]
)
def test_what_is_drawn_of_a_random_schema_is_valid(seed):
    schema = random_schema(seed)
    for value in values(schema, 3, 3000):
        jsonschema.validate(value, schema)


def test_undeclared_names_are_never_declared_ones():
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer"}, "abc": {}, "": {}},
        "additionalProperties": {"type": "string"},
    }
    for text in (
        '{"ab":1,"ab":"x"}',
        '{"abc":1,"abc":"x"}',
        '{"":1,"":"x"}',
        r'{"\u0061b":"x"}',
        r'{"ab":1,"\u0061b":2}',
    ):
        assert not allows(compiled(json_form(schema, "schema")), text)
    for name in ("a", "abcd", "b", "abd", 'a"', "é"):
        assert fits(schema, {"ab": 1, name: "x"}), name


def test_a_schema_is_no_boolean_or_object():
    with pytest.raises(BadRequest, match="must be a JSON schema"):
        json_form([1], "schema")

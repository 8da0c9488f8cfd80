"""JSON schemas as tools write them: each is served, or refused by name, and what is drawn of the served ones is valid.

pydantic writes its schemas here (`written_models`). Those of zod and of the tools of MCP servers lie in
written_schemas.json; `node write_schemas.mjs` beside it writes them anew.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import written_models
from drawn_examples import examples
from grammar_walk import allows, drawn, of_schema
from schema_oracle import oracle

from pdcluster.core.errors import BadRequest

HERE = Path(__file__).parent
NPM_S = 110

# Of outputs that no random walk ends: one that does.
NEEDED = {
    "pydantic: Patterns": {
        "anchored": "ABC-1234",
        "open": "a1",
        "at_start": "https://x",
        "at_end": "a.jpg",
        "phone": "+491234",
        "slug": "a-b",
    },
    "zod: regex with flags": {"word": "no"},
    "zod: ends of texts": {"a": "a-1", "b": "read.md", "c": "xyz"},
}

# Texts that are invalid by their schema, so that no grammar may allow them.
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
NEEDS_A, NEEDS_B = (
    {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in ("a", "b")
)
TOLD_APART = {
    "A": {"type": "object", "properties": {"k": {"const": 1}, "x": {}}},
    "B": {"type": "object", "properties": {"k": {"const": 2}}},
}
FAULTY = {
    "a declared name, escaped": (NAMED, r'{"name":"a","\u006eame":1}'),
    "a declared name with an escape of its own": ({"properties": {'a"': {"type": "string"}}}, r'{"a\u0022":1}'),
    "names that come twice": ({"type": "object", "minProperties": 2}, '{"a":1,"a":2}'),
    "an integer beyond 64 bits": ({"type": "integer", "minimum": 2**63, "maximum": 2**64}, str(2**63 - 1)),
    "a leap day of a common year": ({"type": "string", "format": "date"}, '"2023-02-29"'),
    "a leap day of a common century": ({"type": "string", "format": "date-time"}, '"1900-02-29T00:00:00Z"'),
    "an option of the library": ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "[1,1]"),
    "a bracket in a class": ({"type": "string", "pattern": "^[[a]b]$"}, '"a"'),
    "two hyphens in a class": ({"type": "string", "pattern": "^[a-c--b]$"}, '"c"'),
    "an exclusive bound that is an integer": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    "an exclusive bound below": ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "-1"),
    "a decimal that rounds to its bound": ({"type": "number", "exclusiveMaximum": 1}, "0." + "9" * 30),
    "a constant beyond 53 bits": ({"const": 2**53 + 1}, str(2**53)),
    "a value beyond 64 bits": ({"type": "integer", "enum": [10**20]}, str(2**63 - 1)),
    "an escaped name that a pattern matches": ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b":"x"}'),
    "a required name that comes twice": ({"required": ["a"], "minProperties": 2}, r'{"a":1,"\u0061":2}'),
    "names of a pattern that come twice": (
        {"patternProperties": {"^[a-z]$": {}}, "additionalProperties": False, "minProperties": 2},
        '{"a":1,"a":2}',
    ),
    "a length beside a reference on the way": (
        {
            "$defs": {"A": {"$ref": "#/$defs/B", "minLength": 3}, "B": {"type": "string"}},
            "allOf": [{"$ref": "#/$defs/A"}, {"maxLength": 9}],
        },
        '"a"',
    ),
    "names with keywords beside a reference": (
        {"propertyNames": {"$ref": "#/$defs/A", "maxLength": 2}, "$defs": {"A": {"type": "string"}}},
        '{"abcdef":1}',
    ),
    "names of a list with a length": ({"propertyNames": {"enum": ["abc", "abcdef"], "maxLength": 3}}, '{"abcdef":1}'),
    "names of a list and a pattern": ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^b": {}}}, '{"b":1}'),
    "a count beside a reference that is told apart": (
        {"oneOf": [{"$ref": "#/$defs/A", "maxProperties": 1}, {"$ref": "#/$defs/B"}], "$defs": TOLD_APART},
        '{"k":1,"x":1}',
    ),
    "one of two open objects": (
        {"type": "object", "properties": {"c": {}}, "oneOf": [NEEDS_A, NEEDS_B]},
        '{"a":1,"b":2}',
    ),
    "one of two objects with any other names": (
        {"oneOf": [{**NEEDS_A, "additionalProperties": {}}, {**NEEDS_B, "additionalProperties": {}}]},
        '{"a":1,"b":2}',
    ),
    "one of two objects with parts": (
        {
            "oneOf": [
                {**NEEDS_A, "allOf": [{"properties": {"b": {}}}]},
                {**NEEDS_B, "allOf": [{"properties": {"a": {}}}]},
            ]
        },
        '{"a":1,"b":2}',
    ),
    "one of two objects without names": (
        {
            "oneOf": [
                {"type": "object", "required": ["a"], "properties": {}},
                {"type": "object", "required": ["b"], "properties": {}},
            ]
        },
        '{"a":1,"b":2}',
    ),
    "one of two with an empty name": (
        {"oneOf": [{"type": "object", "properties": {"": {"const": each}, "a": {}}} for each in (1, 2)]},
        '{"a":1}',
    ),
    "a format beside a pattern and a part": (
        {"type": "string", "pattern": "^.", "format": "date", "allOf": [{"minLength": 1}]},
        '"x"',
    ),
    "a blank that other dialects know": ({"type": "string", "pattern": r"^\S$"}, '"\ufeff"'),
    "a nul outside a class": ({"type": "string", "pattern": r"^\\x00-$"}, r'"\\x01-"'),
    "a half surrogate": ({"type": "object"}, r'{"a":"\ud800"}'),
    "half a date": ({"type": "string", "format": "date"}, '"2024-02"'),
}

SELF = {"type": "object", "properties": {"a": {"$ref": "#/$defs/part"}}, "required": ["a"]}
# Schemas of which a part has no value that ends.
ENDLESS = {
    "itself": {"$ref": "#"},
    "a part that is itself": {
        "additionalProperties": False,
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"$ref": "#/$defs/b"}},
    },
    "a part that needs itself": {
        "additionalProperties": False,
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/part"}},
        "$defs": {"part": SELF},
    },
    "items that need themselves": {"type": "array", "items": {"$ref": "#/$defs/part"}, "$defs": {"part": SELF}},
    "nothing to choose": {"type": "object", "properties": {"a": {"enum": []}}},
    "a contradiction": {"type": "integer", "multipleOf": 10, "exclusiveMinimum": 5, "anyOf": [{"enum": ["", 1e21]}]},
}
# What is refused, and what the refusal names.
REFUSED = {
    "pydantic: Lookahead": "schema.properties.password.pattern",
    "pydantic: WordPattern": "schema.properties.word.pattern",
    "pydantic: Escaped": "schema.properties.regex uses format regex",
    "pydantic: IntegerSet": "schema.properties.numbers uses uniqueItems",
    "pydantic: FrozenSet": "schema.properties.names uses uniqueItems",
    "zod: emoji": "schema.properties.mood.pattern",
    "zod: set as array": "schema.properties.tags uses uniqueItems",
    "zod: file": "schema.properties.path.pattern",
}


# ---------------------------------------------------------------- the schemas


def source_of(package: str) -> str:
    """`filesystem` for @modelcontextprotocol/server-filesystem@2026.8.31."""
    name = package.rpartition("@")[0].removeprefix("@")
    return name.rpartition("/")[2].removeprefix("server-") if "server-" in name else name.split("/")[0]


@cache
def written() -> dict[str, Any]:
    """All schemas, by who wrote them and what for."""
    stored = json.loads((HERE / "written_schemas.json").read_text())
    others = {f"{source_of(line['from'])}: {line['name']}": line["schema"] for line in stored}
    return {f"pydantic: {name}": schema for name, schema in written_models.schemas().items()} | others


def served() -> list[str]:
    return [name for name in written() if name not in REFUSED]


@cache
def validator(name: str) -> Any:
    return oracle(written()[name])


def check(name: str, seed: int) -> bool:
    """Whether an output ended. What did is valid."""
    text = drawn(of_schema(written()[name]), seed)
    if text is not None:
        validator(name).validate(json.loads(text.decode()))
    return text is not None


# ---------------------------------------------------------------- the tests


def test_there_are_many_different_ones() -> None:
    assert len({json.dumps(schema, sort_keys=True) for schema in written().values()}) >= 290
    assert REFUSED.keys() | NEEDED.keys() <= written().keys()


@pytest.mark.parametrize("name", written())
def test_each_is_served_or_refused_by_name(name: str) -> None:
    if name not in REFUSED:
        of_schema(written()[name])
        return
    with pytest.raises(BadRequest, match=re.escape(REFUSED[name])):
        of_schema(written()[name])


@pytest.mark.parametrize("name", served())
def test_what_is_drawn_is_valid(name: str) -> None:
    ended = [check(name, seed) for seed in range(examples(3, 25))]
    assert any(ended) or name in NEEDED


@pytest.mark.parametrize("name", NEEDED)
def test_what_no_walk_ends_can_be_said(name: str) -> None:
    validator(name).validate(NEEDED[name])
    assert allows(of_schema(written()[name]), json.dumps(NEEDED[name]))


@pytest.mark.parametrize("case", FAULTY)
def test_what_is_invalid_cannot_be_said(case: str) -> None:
    schema, text = FAULTY[case]
    try:
        grammar = of_schema(schema)
    except BadRequest:
        return
    assert not allows(grammar, text)


@pytest.mark.parametrize("case", ENDLESS)
def test_what_never_ends_is_never_begun(case: str) -> None:
    """It is refused, or left out."""
    try:
        grammar = of_schema(ENDLESS[case])
    except BadRequest:
        return
    assert all(drawn(grammar, seed) for seed in range(20))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="node or npm is not installed")
def test_zod_writes_what_is_stored() -> None:
    command = ["node", str(HERE / "write_schemas.mjs"), "zod", "--print"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NPM_S, check=False)
    if "npm" in done.stderr and done.returncode:
        pytest.skip(f"npm cannot fetch zod: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    stored = json.loads((HERE / "written_schemas.json").read_text())
    assert json.loads(done.stdout) == [line for line in stored if line["from"].startswith("zod@")]

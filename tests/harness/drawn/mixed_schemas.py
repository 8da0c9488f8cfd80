"""Random JSON schemas with keywords side by side: bounds, lengths, patterns, choices, parts and references, in any
order and also where they contradict each other."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

VALUES = [
    "red",
    "größe",
    'quo"te',
    "a\\b\n",
    "",
    "a",
    1,
    -2.5,
    0,
    1.5,
    -0.0,
    2**53 + 1,
    10**20,
    None,
    True,
    False,
    [1, 2],
    {"a": 1},
]
NAMES = ["a", "b", "ab", "x1", 'q"', "é", "s_t", "n\nl", "$ref", "type", "0"]
PARTS = "pqr"
PATTERNS = [
    "^[a-z]+$", "[0-9]", "^a|b$", "^(ab|c){1,3}$", r"^\d{2,4}(-[A-F]+)?$", r"\w\s\w", "^[^a-z]{2}", ".$", "^.{2,}$",
    "(x|y)?z", "^é+$", r'^["\\/]+$', "^\\S+$", "^[\\t\\n]+$",
]  # fmt: skip
FORMATS = ["date", "time", "ipv4", "ipv6", "uuid", "email", "date-time", "duration", "uri", "hostname"]
NAME_PATTERNS = ["^s_", "^x", "b$", "^[0-9]+$", "a"]
TYPES = ["string", "number", "object", "array", "null", "integer", "boolean"]
DEEPEST = 3


def mixed_schema(seed: int) -> Schema:
    die = random.Random(seed)
    return _any(die, 0) | {"$defs": {name: _any(die, DEEPEST - 1) for name in PARTS}}


def _any(die: random.Random, depth: int) -> Schema:
    flat = [_text, _number, _listed, _plain]
    deep = [_object, _object, _array, _choice, _parts, _reference, _mixture]
    make = die.choice(flat + deep if depth < DEEPEST else flat)
    return _shuffled(die, make(die, depth + 1))


def _shuffled(die: random.Random, schema: Schema) -> Schema:
    """The order of keywords is the order in which they are read."""
    return dict(die.sample([*schema.items()], len(schema)))


def _text(die: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    if die.random() < 0.5:
        schema["minLength"] = die.randint(0, 4)
    if die.random() < 0.5:
        schema["maxLength"] = schema.get("minLength", 0) + die.randint(0, 5)
    if die.random() < 0.7:
        schema |= die.choice([{"pattern": die.choice(PATTERNS)}, {"format": die.choice(FORMATS)}])
    return schema


def _number(die: random.Random, depth: int) -> Schema:
    low = die.choice([die.randint(-50, 50), die.randint(-400, 400) / 8, 0, 0.001, -1e-5, 2.5e6, 2**62 + 1])
    high = low + die.choice([0, 1, die.randint(1, 9999), 0.5, 0.125, 1e6])
    schema: Schema = {"type": die.choice(["integer", "number"])}
    if die.random() < 0.7:
        schema[die.choice(["minimum", "exclusiveMinimum"])] = low
    if die.random() < 0.7:
        schema[die.choice(["maximum", "exclusiveMaximum"])] = high
    if die.random() < 0.35:
        schema["multipleOf"] = die.choice([1, 2, 3, 7, 10, 0.5, 0.25, 0.1, 0.01, 1.5, 12])
    return schema


def _listed(die: random.Random, depth: int) -> Schema:
    schema: Schema = die.choice([{"enum": die.sample(VALUES, die.randint(1, 6))}, {"const": die.choice(VALUES)}])
    beside: list[Schema] = [
        {},
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"minimum": 0},
        {"minLength": 1},
    ]
    return schema | die.choice(beside)


def _plain(die: random.Random, depth: int) -> Schema:
    return die.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {}])


def _object(die: random.Random, depth: int) -> Schema:
    names = die.sample(NAMES, die.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(die, depth) for name in names}}
    if die.random() < 0.6:
        schema["required"] = die.sample(names, die.randint(0, len(names))) + ["zz"] * (die.random() < 0.15)
    if die.random() < 0.7:
        schema["additionalProperties"] = die.choice([False, False, True, _any(die, depth)])
    if die.random() < 0.15:
        schema["patternProperties"] = {die.choice(NAME_PATTERNS): _any(die, depth)}
    if die.random() < 0.1:
        schema |= die.choice([{"minProperties": die.randint(0, 2)}, {"maxProperties": die.randint(0, 3)}])
    return schema


def _array(die: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(die, depth)}
    if die.random() < 0.3:
        schema["prefixItems"] = [_any(die, depth) for _ in range(die.randint(1, 2))]
    if die.random() < 0.4:
        schema["minItems"] = die.randint(0, 3)
    if die.random() < 0.5:
        schema["maxItems"] = schema.get("minItems", 0) + die.randint(0, 2)
    return schema


def _choice(die: random.Random, depth: int) -> Schema:
    keyword = die.choice(["anyOf", "anyOf", "oneOf"])
    return _beside(die, {keyword: [_any(die, depth) for _ in range(die.randint(1, 3))]}, depth)


def _parts(die: random.Random, depth: int) -> Schema:
    make = die.choice([_text, _number, _listed, _object, _object, _array])
    return _beside(die, {"allOf": [make(die, depth) for _ in range(die.randint(1, 3))]}, depth)


def _reference(die: random.Random, depth: int) -> Schema:
    return _beside(die, {"$ref": f"#/$defs/{die.choice(PARTS)}"}, depth)


def _beside(die: random.Random, schema: Schema, depth: int) -> Schema:
    """Often with keywords of another kind."""
    make = die.choice([_text, _number, _listed, _object, _array])
    return make(die, depth) | schema if die.random() < 0.5 else schema


def _mixture(die: random.Random, depth: int) -> Schema:
    """Of several types."""
    one, other = die.sample([_text, _number, _object, _array], 2)
    return one(die, depth) | other(die, depth) | {"type": die.sample(TYPES, die.randint(1, 3))}

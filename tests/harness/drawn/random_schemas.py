"""Random JSON schemas, small enough that any model finishes them, with all that structured output keeps."""

import random
import string


def random_schema(seed: int) -> dict:
    generator = random.Random(seed)
    return _object(generator, 0)


def _object(generator: random.Random, depth: int) -> dict:
    names = generator.sample([*string.ascii_lowercase, 'quo"te', "back\\slash", "line\nbreak"], generator.randint(1, 4))
    schema = {
        "type": "object",
        "properties": {name: _value(generator, depth + 1) for name in names},
        "additionalProperties": False,
    }
    required = [name for name in names if generator.random() < 0.7]
    if required:
        schema["required"] = required
    return schema


def _value(generator: random.Random, depth: int) -> dict:
    kinds = [_string, _number, _enum, _plain, _bounded]
    if depth < 3:
        kinds += [_object, _array, _any_of, _array]
    return generator.choice(kinds)(generator, depth)


def _string(generator: random.Random, depth: int) -> dict:
    low = generator.randint(0, 3)
    return generator.choice([
        {"type": "string", "minLength": low, "maxLength": low + generator.randint(0, 6)},
        {"type": "string", "pattern": "^[a-z]{2,5}$"},
        {"type": "string", "pattern": r"^\d{3}-[A-F]{1,4}$"},
        {"type": "string", "pattern": '^"[a-z]{1,3}"$'},
        {"type": "string", "pattern": r"^\\\\[^a-z\x00-\x08]{1,3}\t$"},
        {"type": "string", "pattern": "^[A-Z][a-z]*$", "minLength": 2, "maxLength": 5},
        {"type": "string", "format": generator.choice(["date", "time", "ipv4", "uuid", "date-time"])},
    ])  # fmt: skip


def _number(generator: random.Random, depth: int) -> dict:
    low = generator.choice([generator.randint(-1000, 1000), 2**53 - 3, -(10**15), generator.randint(-100, 100) / 8])
    high = low + generator.randint(1, 5000)
    return {"type": generator.choice(["integer", "number"]), "minimum": low, "maximum": high}


def _bounded(generator: random.Random, depth: int) -> dict:
    return {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": generator.randint(2, 100)}


def _enum(generator: random.Random, depth: int) -> dict:
    known = ["red", "größe", 'quo"te', "a\\b\n", 1, -2.5, 2**53, -(10**15), None, True]
    values = [generator.choice(known) for _ in range(generator.randint(1, 4))]
    return generator.choice([{"enum": values}, {"const": values[0]}])


def _plain(generator: random.Random, depth: int) -> dict:
    return {"type": generator.choice(["boolean", "null"])}


def _array(generator: random.Random, depth: int) -> dict:
    low = generator.randint(0, 2)
    return {
        "type": "array",
        "items": _value(generator, depth + 1),
        "minItems": low,
        "maxItems": low + generator.randint(0, 2),
    }


def _any_of(generator: random.Random, depth: int) -> dict:
    return {"anyOf": [_value(generator, depth + 1) for _ in range(generator.randint(1, 3))]}

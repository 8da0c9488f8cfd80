"""Random schemas with keywords side by side: what is served of them allows valid values alone, and each ends."""

from __future__ import annotations

import json

import jsonschema
import pytest
from grammar_walk import drawn, of_schema
from mixed_schemas import mixed_schema
from schema_oracle import oracle

from pdcluster.core.errors import BadRequest

FEW, MANY = 60, 3000
AT_ONCE = 20
DRAWS = 3


def faults(seed: int) -> list[str]:
    """What was drawn and is wrong."""
    schema = mixed_schema(seed)
    try:
        grammar = of_schema(schema)
    except BadRequest:
        return []
    texts = [drawn(grammar, draw, 250) for draw in range(DRAWS)]
    return [f"{seed}: {text!r} by {json.dumps(schema)}" for text in texts if text and not is_valid(schema, text)]


def is_valid(schema: object, text: bytes) -> bool:
    try:
        oracle(schema).validate(json.loads(text.decode()))
    except (ValueError, jsonschema.ValidationError):
        return False
    except RecursionError:  # the oracle's own, of a schema that refers to itself
        return True
    return True


@pytest.mark.parametrize(
    "first", [pytest.param(seed, marks=[pytest.mark.full] * (seed >= FEW)) for seed in range(0, MANY, AT_ONCE)]
)
def test_what_is_drawn_of_mixed_schemas_is_valid(first: int) -> None:
    found = [fault for seed in range(first, first + AT_ONCE) for fault in faults(seed)]
    assert found == []

"""Whether a value is valid by a JSON schema: jsonschema, with formats that it leaves to packages, patterns with
properties of Unicode, and multiples of decimals instead of floats."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import regex

# Up to here a float has at least three decimal places.
MOST_EXACT = 1e12

formats = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


@formats.checks("time", ValueError)
def is_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.time.fromisoformat(_as_python(value)).tzinfo is not None


@formats.checks("date-time", ValueError)
def is_moment(value: object) -> bool:
    if not isinstance(value, str):
        return True
    moment = datetime.datetime.fromisoformat(_as_python(value))
    return "T" in value.upper() and moment.tzinfo is not None


def _as_python(text: str) -> str:
    """RFC 3339 allows a small t and z, and second 60; Python does not."""
    return re.sub(r"(:\d\d):60", r"\1:59", text.upper())


def _pattern(_: object, pattern: str, value: object, __: object) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _multiple(_: object, step: float, value: object, __: object) -> Iterator[jsonschema.ValidationError]:
    is_exact = type(value) is int or (type(value) is float and abs(value) < MOST_EXACT)
    if is_exact and Fraction(repr(value)) % Fraction(repr(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


def oracle(schema: Any) -> Any:
    """`validate` raises jsonschema.ValidationError."""
    usual = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    changed = jsonschema.validators.extend(usual, {"pattern": _pattern, "multipleOf": _multiple})
    return changed(schema, format_checker=formats)

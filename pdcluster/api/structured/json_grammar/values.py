"""The checked values of a JSON schema's keywords, and the errors for what cannot be enforced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from pdcluster.api.structured.grammar_rules.rules import GrammarRules, Part
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

# Most digits of a bound; floats have up to 309.
MAX_DIGITS = 400
LARGEST = 10**MAX_DIGITS


def not_kept(path: str, what: str, way_out: str) -> BadRequest:
    return BadRequest(f"{path} uses {what}, which structured output cannot enforce; {way_out}", path)


def whole_number(node: Mapping[str, Any], keyword: str, path: str) -> int | None:
    """A count; None when absent."""
    value = number(node, keyword, path)
    if value is not None and (value < 0 or value != int(value)):
        raise BadRequest(f"{path}.{keyword} is {shown(value)}; it must be a whole number from 0 on", path)
    return None if value is None else int(value)


def number(node: Mapping[str, Any], keyword: str, path: str) -> int | float | None:
    """A bound; None when absent."""
    value = node.get(keyword)
    if value is None:
        return None
    if isinstance(value, int) and abs(value) > LARGEST:
        raise BadRequest(f"{path}.{keyword} has more than {MAX_DIGITS} digits; send a smaller number", path)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise BadRequest(f"{path}.{keyword} is {shown(value)}; it must be a number", path)
    return value


def mapping(node: Mapping[str, Any], keyword: str, path: str) -> Mapping[str, Any]:
    """Schemas by name; {} when absent."""
    value = node.get(keyword)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{path}.{keyword} is {shown(value)}; it must be an object", path)
    return value


class Converter(Protocol):
    """Turns schemas into parts of a grammar."""

    rules: GrammarRules
    space: Part

    def convert(self, schema: object, path: str) -> Part:
        """Convert any schema within the whole one."""
        ...

    def any_value(self) -> Part: ...

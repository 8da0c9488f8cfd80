"""JSON bodies into structs, with errors that a caller can act on: the field, the value, the way out.

msgspec decodes a correct body once. Only a wrong body is examined again for the error's place and reason.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import msgspec

from pdcluster.api.body_bound import check_bulk
from pdcluster.core.errors import BadRequest

T = TypeVar("T", bound=msgspec.Struct)

KIND_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
BOUNDS = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}
SHOWN_CHARACTERS = 60
# Errors of larger wrong bodies do not show the value. A second pass over 8 MiB is slow in Python.
LOOKED_AT_BYTES = 256 * 1024
# Longest name compared with others.
LONGEST_NAME = 128
# Of a whole number that is shown; no finite float has more.
MOST_DIGITS = 400


class _Unseen:
    """Stands for a value that is not shown."""

    def __str__(self) -> str:
        return "…"


UNSEEN = _Unseen()
NESTED_TOO_DEEPLY = "the body is JSON nested too deeply; send a flatter object"
HALF_A_PAIR = (
    "the body has a string with half a surrogate pair (such as \\ud800 alone), which is no character; send whole "
    "characters"
)


def decode(body: bytes, decoder: msgspec.json.Decoder[T], schemas: Mapping[str, type[msgspec.Struct]]) -> T:
    """schemas: the struct at each path, for naming known fields; "" is the body itself, and "messages[…]" omits the
    index.
    """
    check_bulk(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        try:
            return _with_whole_numbers(body, decoder.type, error)
        except msgspec.ValidationError as wrong:
            raise _invalid(str(wrong), _loads(body) if len(body) <= LOOKED_AT_BYTES else UNSEEN, schemas) from error
    except RecursionError as error:
        raise BadRequest(NESTED_TOO_DEEPLY) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if len(body) > LOOKED_AT_BYTES:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        _loads(body)
        raise BadRequest(HALF_A_PAIR) from error


def convert(fields: Mapping[str, object], kind: type[T], schemas: Mapping[str, type[msgspec.Struct]]) -> T:
    """As `decode`, from plain values of another protocol."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), fields, schemas) from error


def closest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)", or "" when nothing is near."""
    if len(name) > LONGEST_NAME:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def shown(value: object) -> str:
    """A value as JSON, cut to a length that fits a message."""
    if isinstance(value, str | list):
        value = value[: SHOWN_CHARACTERS + 1]
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


# ---------------------------------------------------------------- numbers

_FLOAT_FOR_INT = re.compile(r"Expected `(?:[^`]* )?int(?: [^`]*)?`, got `float` - at `\$\.(\w+)")


def _with_whole_numbers(body: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    """The body with 5.0 read as 5 in whole-number fields, as OpenAI and vLLM read it. Raises ValidationError for other
    errors. error: the present error.
    """
    fields: Any = None
    fixed: set[str] = set()
    while (found := _FLOAT_FOR_INT.match(str(error))) is not None and found[1] not in fixed:
        try:
            fields = msgspec.json.decode(body) if fields is None else fields
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            break
        fixed.add(found[1])
        fields[found[1]] = _whole(fields[found[1]])
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as wrong:
            error = wrong
    raise error


def _whole(value: object) -> object:
    """A number, or lists of them."""
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---------------------------------------------------------------- not JSON at all


def _loads(body: bytes) -> object:
    """The body as plain values, for error messages. Raises BadRequest when it is not JSON. Unlike msgspec it accepts
    half a surrogate pair.
    """
    if not body.strip():
        raise BadRequest("the body is empty; send a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the body is not valid UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}; send JSON encoded "
            "as UTF-8"
        ) from error
    try:
        return json.loads(text, parse_constant=_no_constant, parse_int=_number)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 15, 0) : error.pos + 15]
        raise BadRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}, near {shown(near)}"
        ) from error
    except RecursionError as error:
        raise BadRequest(NESTED_TOO_DEEPLY) from error


def _number(digits: str) -> int | _Unseen:
    return int(digits) if len(digits) <= MOST_DIGITS else UNSEEN


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(
        f"the body is not valid JSON: {name} is not a JSON number; leave the field out or send a finite number"
    )


# ---------------------------------------------------------------- JSON of another shape


def _invalid(message: str, body: object, schemas: Mapping[str, type[msgspec.Struct]]) -> BadRequest:
    what, _, at = message.partition(" - at `")
    path = at.removesuffix("`").removeprefix("$").removeprefix(".")
    schema = schemas.get(re.sub(r"\[\d+\]", "[…]", path))
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return _unknown_field(match[1], path, schema)
    if match := re.fullmatch(r"Object missing required field `(.*)`", what):
        full = f"{path}.{match[1]}" if path else match[1]
        return BadRequest(f"{full} is missing; it is required", full)
    where = path or "the body"
    value = _value_at(body, path)
    if what.startswith("Number out of range"):
        return BadRequest(f"{where} is out of range; send a finite number", path or None)
    if what.startswith("Integer value out of range"):
        return BadRequest(f"{where} is a number with too many digits; send one of at most 64 bits", path or None)
    if what.startswith("Invalid enum value"):
        found = "of another kind" if value is UNSEEN else shown(value)
        return BadRequest(f"{where} is {found}; it must be one of {', '.join(_options(path, schemas))}", path or None)
    found = "" if value is UNSEEN else f", got {shown(value)}"
    return BadRequest(f"{where} {_expectation(what)}{found}", path or None)


def _unknown_field(name: str, path: str, schema: type[msgspec.Struct] | None) -> BadRequest:
    known = schema.__struct_fields__ if schema is not None else ()
    full = f"{path}.{name}" if path else name
    way_out = closest(name, known) or "; leave it out"
    return BadRequest(f"unknown field {full[:200]}{way_out}", full[:200])


def _expectation(what: str) -> str:
    """ "Expected `int | null`, got `str`" → "must be a whole number"; "Expected `float` <= 2.0" → "must be at most
    2.0".
    """
    if match := re.match(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)", what):
        return f"must be {BOUNDS[match[1]]} {match[2]}"
    if match := re.match(r"Expected `(str|array)` of length (>=|<=) (\d+)", what):
        return f"must have {BOUNDS[match[2]]} {match[3]} {'characters' if match[1] == 'str' else 'entries'}"
    if match := re.match(r"Expected `([^`]*)`", what):
        kinds = [KIND_NAMES.get(kind, kind) for kind in match[1].split(" | ")]
        return "must be " + " or ".join([kind for kind in kinds if kind != "null"] or kinds)
    return what[:1].lower() + what[1:]


def _value_at(body: object, path: str) -> object:
    value = body
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if name == "..." or not isinstance(value, dict | list):
            break
        value = value[int(index)] if isinstance(value, list) else value.get(name)
    return value


def _options(path: str, schemas: Mapping[str, type[msgspec.Struct]]) -> list[str]:
    """The literals of a field, from its struct's annotations; then the other kinds that are not literals."""
    parent, _, name = re.sub(r"\[\d+\]", "[…]", path).rpartition(".")
    for field in msgspec.structs.fields(schemas[parent]) if parent in schemas else ():
        if field.name == name:
            kinds = (field.type, *get_args(field.type))
            words = [str(option) for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]
            return words + ["an object"] * any(
                isinstance(kind, type) and issubclass(kind, msgspec.Struct) for kind in kinds
            )
    return []

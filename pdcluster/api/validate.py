"""JSON bodies into structs, with errors that a caller can act on: the field, the value, the way out.

msgspec decodes a correct body once. Only a wrong body is examined again for the error's place and reason.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

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


def decode(
    body: bytes,
    decoder: msgspec.json.Decoder[T],
    schemas: Mapping[str, type[msgspec.Struct]],
    extensions: Collection[str] = (),
) -> T:
    """schemas: the struct at each path, for naming known fields; "" is the body itself, and "messages[…]" omits the
    index.
    extensions: unknown fields that may stand there with a value that asks for nothing.
    """
    check_bulk(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        try:
            return _read_again(body, decoder.type, extensions, error)
        except msgspec.ValidationError as wrong:
            raise _invalid(str(wrong), _loads(body) if len(body) <= LOOKED_AT_BYTES else UNSEEN, schemas) from error
        except RecursionError:
            raise BadRequest(NESTED_TOO_DEEPLY) from error
    except RecursionError as error:
        raise BadRequest(NESTED_TOO_DEEPLY) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if len(body) > LOOKED_AT_BYTES:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        _loads(body)
        raise BadRequest(HALF_A_PAIR) from error


def convert(
    fields: Mapping[str, object], kind: type[T], schemas: Mapping[str, type[msgspec.Struct]], at: str = ""
) -> T:
    """As `decode`, from plain values: of another protocol, or of a part of a body. at: the part's path, for errors."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), fields, schemas, at) from error


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
    try:
        text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()
    except (RecursionError, ValueError):  # nested deeply, or a number of more digits than Python writes
        return "…"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


# ---------------------------------------------------------------- what other servers take

_IS_OTHER_KIND = re.compile(r"Expected `(?:[^`]* )?(?:int|float|bool)\b[^`]*`, got `(?:str|bool|int|float)`")
_IS_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`$")
# A whole number as text, as pydantic reads it.
_INT = re.compile(r"[+-]?\d+(?:_\d+)*(?:\.0+)?", re.ASCII)
_BOOLS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}
# Longer text is no number.
NUMBER_CHARACTERS = 64

# Makes of a value what its field takes, where it can.
Reader = Callable[[Any], Any]


def _read_again(body: bytes, kind: type[T], extensions: Collection[str], error: msgspec.ValidationError) -> T:
    """The body with numbers, true and false as pydantic's lax mode reads them, and without extensions that ask for
    nothing. Raises ValidationError for other errors. error: the present error.
    """
    unknown = _IS_UNKNOWN.match(str(error))
    if not _IS_OTHER_KIND.match(str(error)) and (unknown is None or unknown[1] not in extensions):
        raise error
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise error from None
    wanted = {name: value for name, value in fields.items() if name not in extensions or not _asks_nothing(value)}
    reader = _reader_of(kind)
    return msgspec.convert(wanted if reader is None else reader(wanted), kind)


def _asks_nothing(value: object) -> bool:
    return value is None or value is False or value in ({}, [], "")


@cache
def _reader_of(kind: type[msgspec.Struct]) -> Reader | None:
    return _reader(inspect.type_info(kind), frozenset())


def _reader(info: inspect.Type, within: frozenset[type]) -> Reader | None:
    """None for what stays as it is. within: the structs around it. One that has itself inside is read by its own
    reader.
    """
    if isinstance(info, inspect.StructType):
        if info.cls in within:
            return partial(_read_as, info.cls)
        named = {field.encode_name: _reader(field.type, within | {info.cls}) for field in info.fields}
        return _of_struct({name: reader for name, reader in named.items() if reader is not None})
    if isinstance(info, inspect.ListType) and (of_item := _reader(info.item_type, within)) is not None:
        return lambda value: [of_item(item) for item in value] if isinstance(value, list) else value
    if isinstance(info, inspect.DictType) and (of_value := _reader(info.value_type, within)) is not None:
        return lambda value: {name: of_value(each) for name, each in value.items()} if _is_object(value) else value
    if isinstance(info, inspect.IntType | inspect.FloatType | inspect.BoolType):
        return _SCALARS[type(info)]
    if isinstance(info, inspect.UnionType):
        return _of_union(info, within)
    return None


def _read_as(kind: type[msgspec.Struct], value: Any) -> Any:
    reader = _reader_of(kind)
    return value if reader is None else reader(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _of_struct(named: Mapping[str, Reader]) -> Reader | None:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: named[name](each) if name in named else each for name, each in value.items()}

    return read if named else None


def _of_union(info: inspect.UnionType, within: frozenset[type]) -> Reader | None:
    """Of kinds that JSON tells apart. Text stays where text is one of them."""
    readers = [reader for kind in info.types if (reader := _reader(kind, within)) is not None]
    takes_text = any(isinstance(kind, inspect.StrType | inspect.LiteralType) for kind in info.types)

    def read(value: Any) -> Any:
        if takes_text and isinstance(value, str):
            return value
        for reader in readers:
            value = reader(value)
        return value

    return read if readers else None


def _int(value: Any) -> Any:
    if isinstance(value, str) and len(value) <= NUMBER_CHARACTERS and _INT.fullmatch(text := value.strip()):
        return int(text.partition(".")[0])
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


def _float(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or len(value) > NUMBER_CHARACTERS:
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _bool(value: Any) -> Any:
    if isinstance(value, str):
        return _BOOLS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


_SCALARS: Mapping[type[inspect.Type], Reader] = {
    inspect.IntType: _int,
    inspect.FloatType: _float,
    inspect.BoolType: _bool,
}


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


def _invalid(message: str, body: object, schemas: Mapping[str, type[msgspec.Struct]], at: str = "") -> BadRequest:
    what, _, found_at = message.partition(" - at `")
    inner = found_at.removesuffix("`").removeprefix("$").removeprefix(".")
    schema = schemas.get(re.sub(r"\[\d+\]", "[…]", inner))
    path = ".".join([each for each in (at, inner) if each])
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return _unknown_field(match[1], path, schema)
    if match := re.fullmatch(r"Object missing required field `(.*)`", what):
        full = f"{path}.{match[1]}" if path else match[1]
        return BadRequest(f"{full} is missing; it is required", full)
    where = path or "the body"
    value = _value_at(body, inner)
    if what.startswith("Number out of range"):
        return BadRequest(f"{where} is out of range; send a finite number", path or None)
    if what.startswith("Integer value out of range"):
        return BadRequest(f"{where} is a number with too many digits; send one of at most 64 bits", path or None)
    if what.startswith("Invalid enum value"):
        found = "of another kind" if value is UNSEEN else shown(value)
        return BadRequest(f"{where} is {found}; it must be one of {', '.join(_options(inner, schemas))}", path or None)
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

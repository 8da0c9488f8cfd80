"""Arguments of a call in a history, as chat templates want them: an object, as far as it was written."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping

import jiter
import msgspec

from pdcluster.core.errors import BadRequest

# Longer text that is not JSON is not searched for its valid part.
LOOKED_AT_CHARACTERS = 64 * 1024

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def arguments_of(given: str | Mapping[str, object] | None, path: str) -> object:
    """The arguments as an object. None or blanks mean no arguments.

    Models may cut text anywhere (max_tokens) and put line breaks in strings. Of a faulty object the part before the
    fault is taken. Other text that is not JSON stays text.

    path: of the call, for errors. Raises BadRequest where it is nested too deeply.
    """
    if given is None or isinstance(given, Mapping):
        return given or {}
    if not given.strip():
        return {}
    try:
        return msgspec.json.decode(given)
    except RecursionError as error:
        raise _too_deep(path) from error
    except msgspec.DecodeError:
        return _said_so_far(_STRING.sub(_with_escapes, given), given, path)


def _said_so_far(text: str, given: str, path: str) -> object:
    try:
        return _part_of(text)
    except ValueError as error:
        if "recursion" in str(error):
            raise _too_deep(path) from error
    if not text.lstrip().startswith("{") or len(text) > LOOKED_AT_CHARACTERS:
        return given
    wrong_from = bisect_left(range(len(text)), True, key=lambda size: not _begins_json(text[: size + 1]))
    return _part_of(text[:wrong_from])


def _begins_json(text: str) -> bool:
    try:
        _part_of(text)
    except ValueError:
        return not text.strip()
    return True


def _part_of(text: str) -> object:
    return jiter.from_json(text.encode(), allow_inf_nan=False, partial_mode="trailing-strings")


def _with_escapes(string: re.Match[str]) -> str:
    return _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], string[0])


def _too_deep(path: str) -> BadRequest:
    return BadRequest(f"{path}.function.arguments is JSON nested too deeply; send a flatter object", path)


class ControlEscapes:
    """Escapes control characters in the strings of JSON that comes in pieces. Models write line breaks there, and JSON
    has none.
    """

    __slots__ = ("_escaped", "_in_string")

    def __init__(self) -> None:
        self._in_string = self._escaped = False

    def feed(self, text: str) -> str:
        made = []
        for character in text:
            if self._in_string and character < " ":
                made.append(json.dumps(character)[1:-1])
                self._escaped = False
                continue
            made.append(character)
            if not self._in_string:
                self._in_string = character == '"'
            elif self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        return "".join(made)

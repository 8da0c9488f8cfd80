"""Arguments of a call in a history, as chat templates want them: an object, as far as it was written."""

from __future__ import annotations

import json
import re
import string
from bisect import bisect_left
from collections.abc import Mapping

import jiter
import msgspec

from pdcluster.core.errors import BadRequest

# Longer text that is not JSON is not searched for its valid part.
LOOKED_AT_CHARACTERS = 64 * 1024

# Of streamed arguments, without the insides of strings. More is not checked.
CHECKED_CHARACTERS = 4096
# What may stand behind a backslash in a string.
ESCAPES = frozenset('"\\/bfnrtu')

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


class ArgumentStream:
    """Arguments that come in pieces, as JSON that a client may read after each of them.

    1. Control characters in strings are escaped. Models write line breaks there, and JSON has none.
    2. Nothing comes behind a fault. What came before it begins an object, and can be read as far as it goes.
    """

    __slots__ = ("_around", "_awaits_escape", "_in_string", "_is_faulty", "_num_hex")

    def __init__(self) -> None:
        self._in_string = self._awaits_escape = self._is_faulty = False
        # Digits of an escape by number that are to come.
        self._num_hex = 0
        # All but the insides of strings.
        self._around = ""

    def feed(self, text: str) -> str:
        made: list[str] = []
        for character in text:
            if self._is_faulty:
                break
            shown = self._within_string(character) if self._in_string else self._outside(character)
            made += [] if self._is_faulty else [shown]
        return "".join(made)

    def _outside(self, character: str) -> str:
        if not self._around and character.isspace():
            return ""  # nobody can read it without what follows
        self._around += character
        self._in_string = character == '"'
        if len(self._around) <= CHECKED_CHARACTERS:
            self._is_faulty = self._around[0] != "{" or not _begins_json(self._around)
        return character

    def _within_string(self, character: str) -> str:
        if self._num_hex:
            self._num_hex -= 1
            self._is_faulty = character not in string.hexdigits
        elif character < " ":
            self._awaits_escape = False
            return json.dumps(character)[1:-1]
        elif self._awaits_escape:
            self._awaits_escape = False
            self._num_hex = 4 if character == "u" else 0
            self._is_faulty = character not in ESCAPES
        elif character == "\\":
            self._awaits_escape = True
        elif character == '"':
            self._in_string = False
            self._around += character
        return character

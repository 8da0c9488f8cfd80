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
# Of the halves of a surrogate pair, the upper six bits.
HIGH_HALF, LOW_HALF = 0xD800 >> 10, 0xDC00 >> 10
NO_CHARACTER = "\\ufffd"

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
# Escapes, surrogate pairs as one, and the halves of such, unless the text was cut behind one.
_ESCAPED = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)(?!\\?(?:u[0-9a-fA-F]{0,3})?\Z)|\\.", re.DOTALL
)


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
    whole = _ESCAPED.sub(lambda escape: escape[0] if escape["half"] is None else NO_CHARACTER, string[0])
    return _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], whole)


def _too_deep(path: str) -> BadRequest:
    return BadRequest(f"{path}.function.arguments is JSON nested too deeply; send a flatter object", path)


class ArgumentStream:
    """Arguments that come in pieces, as JSON that a client may read after each of them.

    1. Control characters in strings are escaped. Models write line breaks there, and JSON has none.
    2. An escape comes whole. Half a surrogate pair, which is no character, comes as U+FFFD.
    3. Nothing comes behind a fault. What came before it begins an object, and can be read as far as it goes.
    """

    __slots__ = ("_around", "_escape", "_half", "_in_string", "_is_faulty")

    def __init__(self) -> None:
        self._in_string = self._is_faulty = False
        # An escape that has begun, and a first half of a pair that awaits the other.
        self._escape = self._half = ""
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
        if self._escape and (character >= " " or len(self._escape) > 1):
            return self._within_escape(character)
        if character < " ":
            before, self._escape = self._escape, ""
            return self._lone_half() + before + json.dumps(character)[1:-1]
        if character == "\\":
            self._escape = character
            return ""
        if character == '"':
            self._in_string = False
            self._around += character
        return self._lone_half() + character

    def _within_escape(self, character: str) -> str:
        self._escape += character
        size = len(self._escape)
        self._is_faulty = character not in ESCAPES if size == 2 else character not in string.hexdigits
        if self._is_faulty or (self._escape[1] == "u" and size < 6):
            return ""
        escape, self._escape = self._escape, ""
        kind = int(escape[2:], 16) >> 10 if size == 6 else 0
        if kind == HIGH_HALF:
            lone, self._half = self._lone_half(), escape
            return lone
        if kind == LOW_HALF:
            first, self._half = self._half, ""
            return first + escape if first else NO_CHARACTER
        return self._lone_half() + escape

    def _lone_half(self) -> str:
        """What stands for a first half without the other."""
        half, self._half = self._half, ""
        return NO_CHARACTER if half else ""

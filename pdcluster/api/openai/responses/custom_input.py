"""The input of a custom tool: the text of one JSON string, read from the arguments of a call while they come."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from pdcluster.api.openai.responses.tools import INPUT

_BEGIN = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# Text up to an escape, and whole escapes. Two that are surrogates are one character.
_CHARACTERS = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]'
)
# An escape that more text may complete.
_UNFINISHED = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z")
_CODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
# Stands for what is no character.
UNKNOWN = "\ufffd"
# Longest text before the input. Arguments that begin otherwise are of another shape.
MOST_BEFORE = 256


class InputReader:
    """Reads `{"input": "…"}`. Arguments of another shape are read at their end: the input is their text `input`, or
    else all of them.
    """

    def __init__(self) -> None:
        self._held = ""
        self._other: list[str] = []
        self._read = self._before

    def feed(self, arguments: str) -> str:
        """The input that is certain now."""
        return self._read(arguments)

    def flush(self) -> str:
        """The arguments ended."""
        if self._read == self._within:
            return self._text(is_last=True)
        return _input_of("".join([*self._other, self._held])) if self._read != self._after else ""

    def _before(self, arguments: str) -> str:
        self._held += arguments
        begin = _BEGIN.match(self._held)
        if begin is not None:
            self._held, self._read = self._held[begin.end() :], self._within
            return self._text()
        if len(self._held) > MOST_BEFORE:
            self._other, self._held, self._read = [self._held], "", self._elsewhere
        return ""

    def _elsewhere(self, arguments: str) -> str:
        self._other.append(arguments)
        return ""

    def _within(self, arguments: str) -> str:
        self._held += arguments
        return self._text()

    def _after(self, arguments: str) -> str:
        return ""

    def _text(self, *, is_last: bool = False) -> str:
        held, at, found = self._held, 0, list[str]()
        while at < len(held):
            if match := _CHARACTERS.match(held, at):
                found.append(_unescaped(match[0]))
                at = match.end()
            elif held[at] == '"':
                self._read, at = self._after, len(held)
            elif _UNFINISHED.match(held, at):
                if not is_last:
                    break
                at = len(held)  # the tokens ran out within it
            else:
                code = _CODE.match(held, at)
                found.append(UNKNOWN)
                at = at + 2 if code is None else code.end()
        self._held = held[at:]
        return "".join(found)


def _unescaped(text: str) -> str:
    if not text.startswith("\\"):
        return text
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[1])
    character: str = json.loads(f'"{text}"')
    return UNKNOWN if "\ud800" <= character <= "\udfff" else character


def _input_of(arguments: str) -> str:
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    text = found.get(INPUT)
    return text if isinstance(text, str) else arguments

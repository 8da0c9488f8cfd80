"""One call of a tool as models write it, `{"name": …, "arguments": {…}}`, read character by character. The name is
emitted as soon as it is certain, then the arguments as they come, exactly as written. A format handles what surrounds a
call.

A call's name is emitted when its arguments begin. Until then it may turn out to be no call, and its text is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


class ToolCallDelta(msgspec.Struct, omit_defaults=True, frozen=True):
    """A part of one call. The first one has id and name and the index of a new call."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


# Text of an answer, or a part of a call.
Part = str | ToolCallDelta


class CallRules(NamedTuple):
    """new_id: ids for calls, each used once.
    knows: whether a tool of that name was offered; names: of those offered.
    """

    new_id: Callable[[], str]
    knows: Callable[[str], bool]
    names: Sequence[str] = ()


class Balanced:
    """Follows one JSON object, list or string to its end."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def ends_with(self, character: str) -> bool:
        """Take the next character. True when it completes the value."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallReader:
    """Reads one call.
    is_done: it was complete; is_bad: it is no call. Long text is kept in pieces, so that each is copied once.
    """

    def __init__(self, index: int, rules: CallRules) -> None:
        self._index = index
        self._rules = rules
        self._expect = self._opening
        self._value: list[str] = []
        self._key = ""
        self._balanced: Balanced | None = None
        self._name: str | None = None
        # Arguments that came whole, before their name or as text.
        self._early: str | None = None
        self._kept: list[str] = []
        self._streams = False
        self._raw: list[str] = []
        self.is_said = self.is_done = self.is_bad = False

    @property
    def raw(self) -> str:
        """What was read before anything was emitted."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[list[ToolCallDelta], str]:
        """What is certain now, and the text behind the call's end."""
        self._kept = []
        said_before = self.is_said
        used = 0
        for character in text:
            used += 1
            self._expect(character)
            if self.is_done or self.is_bad:
                break
        if not self.is_said:
            self._raw.append(text[:used])
        if not self.is_said or (said_before and not self._kept):
            return [], text[used:]
        return [self._delta(is_first=not said_before)], text[used:]

    def _delta(self, *, is_first: bool) -> ToolCallDelta:
        arguments = "".join(self._kept)
        if is_first:
            return ToolCallDelta(self._index, arguments, self._rules.new_id(), self._name)
        return ToolCallDelta(self._index, arguments)

    def _say(self) -> None:
        """The name is known, and the arguments or their beginning."""
        if self._name is None or self.is_said:
            return
        if not self._rules.knows(self._name):
            self.is_bad = True
            return
        self.is_said = True

    # ------------------------------------------------------------ where it is

    def _opening(self, character: str) -> None:
        if character == "{":
            self._expect = self._before_key
        elif character not in SPACE:
            self.is_bad = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._balanced = Balanced()
            self._balanced.ends_with(character)
            self._value, self._expect = [character], self._in_key
        elif character == "}":
            self._finish()
        elif character not in SPACE and character != ",":
            self.is_bad = True

    def _in_key(self, character: str) -> None:
        assert self._balanced is not None
        self._value.append(character)
        if self._balanced.ends_with(character):
            self._key = _text("".join(self._value)) or ""
            self._expect = self._before_colon

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._expect = self._before_value
        elif character not in SPACE:
            self.is_bad = True

    def _before_value(self, character: str) -> None:
        if character in SPACE:
            return
        self._value = []
        self._balanced = Balanced() if character in '{["' else None
        self._expect = self._in_value
        self._streams = self._key in ARGUMENTS and character == "{" and not self._pending() and not self.is_said
        if self._streams:
            self._say()
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._balanced is None:  # a number or a word, which ends where something else begins
            if character in ",}" or character in SPACE:
                self._take_value()
                if not self.is_bad:
                    self._before_key(character)
                return
            self._value.append(character)
            return
        ends = self._balanced.ends_with(character)
        if self._streams and self.is_said:
            self._kept.append(character)
        else:
            self._value.append(character)
        if ends:
            self._take_value()

    def _take_value(self) -> None:
        """A value is complete."""
        self._expect = self._before_key
        if self._key == "name":
            self._name = _text("".join(self._value))
            self.is_bad = self._name is None
            self._give_early()
        elif self._key in ARGUMENTS and not (self._streams and self.is_said):
            self._arguments()

    def _pending(self) -> bool:
        """Whether the name is still to come, or arguments came already."""
        return self._name is None or self._early is not None

    def _arguments(self) -> None:
        """Complete arguments that were not emitted: their name is still to come, or they are no object."""
        value = "".join(self._value)
        text = _text(value) if value.startswith('"') else value
        if text in (None, "null", ""):
            text = "{}"
        assert text is not None
        if not text.lstrip().startswith("{"):
            self.is_bad = True
            return
        self._early = text
        self._give_early()

    def _give_early(self) -> None:
        if self._early is not None and self._name is not None and not self.is_said:
            self._say()
            if self.is_said:
                self._kept.append(self._early)

    def _finish(self) -> None:
        self.is_done = True
        if not self.is_said and self._name is not None:
            self._say()
            self._kept += ["{}"] if self.is_said else []
        if not self.is_said:
            self.is_bad = True


class NamedReader(CallReader):
    """Arguments of a call whose name stands outside them."""

    def __init__(self, index: int, rules: CallRules, name: str) -> None:
        super().__init__(index, rules)
        self._name = name
        self._expect = self._first

    def _first(self, character: str) -> None:
        if character in SPACE:
            return
        if character != "{":
            self.is_bad = True
            return
        self._say()
        self._balanced, self._expect = Balanced(), self._rest
        self._rest(character)

    def _rest(self, character: str) -> None:
        assert self._balanced is not None
        self._kept.append(character)
        self.is_done = self._balanced.ends_with(character)


def _text(raw: str) -> str | None:
    """A JSON string's text; None for invalid ones."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None

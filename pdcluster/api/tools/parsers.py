"""Parsers of tool calls, by family of models, over a text that comes in pieces. What is no call is released as soon as
that is certain.

- hermes (Hermes, Qwen): text <tool_call>{…}</tool_call> <tool_call>{…}</tool_call>
- llama (Llama 3): {…}; {…} or <|python_tag|>{…}. The whole answer is calls, or none of it.
- mistral: text [TOOL_CALLS][{…}, {…}] before tokenizer 11, [TOOL_CALLS]name[ARGS]{…} since.

White space around calls is dropped. What is no call is text as written, white space included. So is a first call that
breaks off before its arguments, unless the tokens ran out: then the beginning of a call is neither text nor a call.
"""

from __future__ import annotations

from typing import Protocol

from pdcluster.api.tools.calls import SPACE, CallReader, CallRules, NamedReader, Part
from pdcluster.api.tools.markers import ARGS, CALL_ID, END_TOOL_CALL, PYTHON_TAG, TOOL_CALL, TOOL_CALLS
from pdcluster.api.tools.partial_marks import begins, keep_for, without_mark

# Characters between Mistral's mark and the arguments: a name, other marks, an id. Longer ones are text.
MAX_NAME = 256


class Parser(Protocol):
    num_calls: int

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        ...

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """The text ended. is_cut: because the tokens ran out."""
        ...


class _Machine:
    """A buffer, and states that each take what they understand from its front. A state that takes nothing and stays
    waits for more.
    """

    # Calls begin and end with these.
    marks: tuple[str, ...] = ()

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._buffer = ""
        self._state = self._start
        self._call: CallReader | None = None
        # Before a possible call: white space and its mark.
        self._lead = ""
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        while True:
            before = self._state, len(self._buffer)
            self._state()
            if (self._state, len(self._buffer)) == before:
                break
        parts, self._parts = self._parts, []
        return parts

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """An emitted call keeps the arguments that came. The beginning of another call behind it is dropped."""
        call, text = self._call, self._buffer
        if call is not None and call.is_said:
            pass  # the text behind it was not read yet
        elif call is not None or self._lead:
            is_nothing = self.num_calls or (is_cut and self._is_marked(self._lead, "" if call is None else call.raw))
            text = "" if is_nothing else self._lead + ("" if call is None else call.raw) + text
        elif is_cut:
            text = without_mark(text, *self.marks)
        self._buffer = self._lead = ""
        if self.num_calls and not text.strip():
            text = ""
        return [text] if text else []

    def _is_marked(self, lead: str, raw: str) -> bool:
        """Whether what began can only be a call."""
        return bool(lead.strip())

    def _start(self) -> None:
        raise NotImplementedError

    def _after_call(self) -> None:
        raise NotImplementedError

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _skip_space(self) -> bool:
        """Whether something is left."""
        self._buffer = self._buffer.lstrip(SPACE)
        return bool(self._buffer)

    def _begin(self, lead: str, call: CallReader) -> None:
        self._lead, self._call, self._state = lead, call, self._in_call

    def _in_call(self) -> None:
        call = self._call
        assert call is not None
        was_said = call.is_said
        deltas, self._buffer = call.feed(self._buffer)
        self._parts += deltas
        if call.is_said and not was_said:
            self.num_calls += 1
        if call.is_bad and not call.is_said:
            self._say(self._lead + call.raw)
            self._call, self._lead, self._state = None, "", self._not_a_call
        elif call.is_done or call.is_bad:
            self._call, self._lead, self._state = None, "", self._after_call

    def _not_a_call(self) -> None:
        self._state = self._text

    def _text(self) -> None:
        self._say(self._buffer)
        self._buffer = ""

    def _up_to(self, mark: str) -> bool:
        """Release the text before a mark; the mark and the white space before it become the lead of a call. False while
        the mark is absent.
        """
        before, found, after = self._buffer.partition(mark)
        text = before.rstrip() if found else before[: len(before) - keep_for(before, mark)]
        self._say(text)
        if found:
            self._lead, self._buffer = before[len(text) :] + mark, after
        else:
            self._buffer = before[len(text) :]
        return bool(found)


class HermesParser(_Machine):
    marks = (TOOL_CALL, END_TOOL_CALL)

    def _start(self) -> None:
        if self._up_to(TOOL_CALL):
            self._begin(self._lead, CallReader(self.num_calls, self._rules))

    def _not_a_call(self) -> None:
        self._state = self._start

    def _after_call(self) -> None:
        if not self._skip_space():
            return
        if self._buffer.startswith(END_TOOL_CALL):
            self._buffer = self._buffer[len(END_TOOL_CALL) :]
            self._state = self._start
        elif not begins(END_TOOL_CALL, self._buffer):
            self._state = self._start


class LlamaParser(_Machine):
    marks = (PYTHON_TAG,)

    def _start(self) -> None:
        text = self._buffer.lstrip(SPACE)
        space = self._buffer[: len(self._buffer) - len(text)]
        if text.startswith(PYTHON_TAG):
            self._buffer = text[len(PYTHON_TAG) :]
            self._begin(space + PYTHON_TAG, CallReader(self.num_calls, self._rules))
        elif text.startswith("{"):
            self._buffer = text
            self._begin(space, CallReader(self.num_calls, self._rules))
        elif text and not begins(PYTHON_TAG, text):
            self._state = self._text

    def _after_call(self) -> None:
        """Another call may follow, with or without a semicolon."""
        text = self._buffer.lstrip(SPACE + ";")
        lead = self._buffer[: len(self._buffer) - len(text)]
        if text.startswith(PYTHON_TAG):
            self._buffer = text[len(PYTHON_TAG) :]
            self._begin(lead + PYTHON_TAG, CallReader(self.num_calls, self._rules))
        elif text.startswith("{"):
            self._buffer = text
            self._begin(lead, CallReader(self.num_calls, self._rules))
        elif text and not begins(PYTHON_TAG, text):
            self._state = self._text

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        if self.num_calls and not self._buffer.strip(SPACE + ";"):
            self._buffer = ""
        return super().flush(is_cut=is_cut)

    def _is_marked(self, lead: str, raw: str) -> bool:
        """An object without a mark may be an answer in JSON. It is a call as far as it begins like one."""
        bare = "".join(raw.split())
        return super()._is_marked(lead, raw) or any(
            begun.startswith(bare) or bare.startswith(begun)
            for begun in (f'{{"name":"{name}"' for name in self._rules.names)
        )


class MistralParser(_Machine):
    marks = (TOOL_CALLS,)

    def _start(self) -> None:
        if self._up_to(TOOL_CALLS):
            self._state = self._opened

    def _opened(self) -> None:
        """Behind the mark: a list of calls, or a name."""
        text = self._buffer.lstrip(SPACE)
        if text.startswith("["):
            self._lead += self._buffer[: len(self._buffer) - len(text) + 1]
            self._buffer = text[1:]
            self._begin(self._lead, CallReader(self.num_calls, self._rules))
            return
        name, found, _ = self._buffer.partition("{")
        if found and len(name) <= MAX_NAME:
            self._buffer = self._buffer[len(name) :]
            reader = NamedReader(
                self.num_calls, self._rules, name.partition(CALL_ID)[0].strip().removesuffix(ARGS).strip()
            )
            self._begin(self._lead + name, reader)
        elif len(name) > MAX_NAME:
            self._say(self._lead)
            self._lead, self._state = "", self._start

    def _not_a_call(self) -> None:
        self._state = self._start

    def _after_call(self) -> None:
        text = self._buffer.lstrip(SPACE)
        space = self._buffer[: len(self._buffer) - len(text)]
        if text.startswith(","):
            self._buffer = text[1:]
            self._begin(space + ",", CallReader(self.num_calls, self._rules))
        elif text:
            self._buffer = text.removeprefix("]")
            self._state = self._start

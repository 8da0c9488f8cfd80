"""The formats in which models call tools: which one a model uses, its parser, and the grammars of answers with required
or optional calls.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pdcluster.api.structured.constraints import Form, any_object, json_form
from pdcluster.api.tools.calls import CallRules
from pdcluster.api.tools.markers import ARGS, CALL_ID, END_THINK, END_TOOL_CALL, PYTHON_TAG, TOOL_CALL, TOOL_CALLS
from pdcluster.api.tools.offered import Function, Offer, parameters_of
from pdcluster.api.tools.parsers import HermesParser, LlamaParser, MistralParser, Parser

# The grammar of a function's arguments.
FormOf = Callable[[Function], Form]

SPACES = r"[ \t\r\n]*"
# Before calls. A model that likes line breaks would never begin.
SOME_SPACE = r"[ \n]{0,4}"

# In a regular expression. A compiler warns of other escaped characters.
SPECIAL = frozenset("|[](){}.*+?^$\\")

MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    """Mistral's templates refuse any other kind of id."""
    return "".join(secrets.choice(MISTRAL_ID_CHARACTERS) for _ in range(9))


class ToolFormat(NamedTuple):
    """begin, end: around the arguments of one call; {name} is the function's.
    opening, closing: around all calls; separator: between them.
    trigger: begins a call within text; None where an answer is either calls or text.
    named: before a call whose name stands outside.
    """

    parser: Callable[[CallRules], Parser]
    new_id: Callable[[], str]
    begin: str
    end: str
    separator: str
    trigger: str | None
    opening: str = ""
    closing: str = ""
    named: str = ""

    def parse(self, offer: Offer) -> Parser:
        return self.parser(CallRules(self.new_id, offer.knows, [tool.name for tool in offer.tools]))

    def form(self, offer: Offer) -> Form:
        """The grammar of an answer that is only calls."""
        calls = self._calls(offer, _checked)
        return (
            calls
            if not self.opening
            else {"type": "sequence", "elements": [_constant(self.opening), calls, _constant(self.closing)]}
        )

    def free_form(self, offer: Offer, *, reasons: bool) -> Form:
        """The grammar of an answer that is text, calls or both. A call is of an offered tool; a strict tool's arguments
        match its schema. reasons: the model may think first.
        """
        if self.trigger is None:
            around = [_regex(SOME_SPACE + f"({_escaped(PYTHON_TAG)})?"), self._calls(offer, _strict)]
            return {
                "type": "or",
                "elements": [{"type": "sequence", "elements": around}, *_no_call(END_THINK if reasons else None)],
            }
        tags = self._tags(offer, _strict)
        if self.opening:
            tags = [_tag(self.opening, self._calls(offer, _strict), self.closing), *self._named(offer)]
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": not offer.parallel,
        }

    def _calls(self, offer: Offer, form_of: FormOf) -> Form:
        return {
            "type": "tags_with_separator",
            "tags": self._tags(offer, form_of),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not offer.parallel,
        }

    def _tags(self, offer: Offer, form_of: FormOf) -> list[Form]:
        return [_tag(self.begin.replace("{name}", tool.name), form_of(tool), self.end) for tool in offer.tools]

    def _named(self, offer: Offer) -> list[Form]:
        """Each call by itself, its arguments behind a mark."""
        marks = _regex(f"({_escaped(CALL_ID)}[a-zA-Z0-9]{{9}})?{_escaped(ARGS)}")
        return [
            _tag(self.named.replace("{name}", tool.name), {"type": "sequence", "elements": [marks, _strict(tool)]}, "")
            for tool in offer.tools
        ]


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        HermesParser, _long_id, TOOL_CALL + '\n{"name": "{name}", "arguments": ', "}\n" + END_TOOL_CALL, "\n", TOOL_CALL
    ),
    "llama": ToolFormat(LlamaParser, _long_id, '{"name": "{name}", "parameters": ', "}", "; ", None),
    "mistral": ToolFormat(
        MistralParser, _short_id, '{"name": "{name}", "arguments": ', "}", ", ", TOOL_CALLS, TOOL_CALLS + "[", "]",
        TOOL_CALLS + "{name}"
    ),
}  # fmt: skip

# Text in a template → the format that its model was taught.
SIGNS: tuple[tuple[str, str], ...] = (
    (TOOL_CALL, "hermes"),
    (TOOL_CALLS, "mistral"),
    (PYTHON_TAG, "llama"),
    ('"parameters":', "llama"),
)


def detect(template: str) -> str | None:
    """The format that a chat template uses; None for one without tools."""
    if "tools" not in template:
        return None
    return next((name for sign, name in SIGNS if sign in template), None)


def _checked(tool: Function) -> Form:
    param = f"tools.{tool.name}.parameters"
    return json_form(parameters_of(tool, param), param)


def _strict(tool: Function) -> Form:
    """Arguments of a tool that is not strict are any object."""
    return _checked(tool) if tool.strict else any_object()


def _no_call(banned: str | None) -> list[Form]:
    """Texts that do not begin as calls do. banned: what they do not contain."""
    mark = PYTHON_TAG
    begins = "|".join(
        [r"[^{<\s]", *(f"{_escaped(mark[:length])}[^{_escaped(mark[length])}]" for length in range(1, len(mark)))]
    )
    text: Form = {"type": "any_text", "excludes": [] if banned is None else [banned]}
    short = "|".join(_escaped(mark[:length]) for length in range(1, len(mark)))
    return [{"type": "sequence", "elements": [_regex(f"{SPACES}({begins})"), text]}, _regex(f"{SPACES}({short})?")]


def _escaped(text: str) -> str:
    """For a regular expression."""
    return "".join("\\" + character if character in SPECIAL else character for character in text)


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _constant(text: str) -> Form:
    return {"type": "const_string", "value": text}

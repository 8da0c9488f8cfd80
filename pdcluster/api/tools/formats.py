"""The formats in which models call tools: which one a model uses, its parser, and the grammars of answers with required
or optional calls.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from pdcluster.api.structured.forms import (
    Form,
    any_object,
    any_text,
    either,
    json_form,
    literal,
    pattern,
    repeated,
    sequence,
    up_to,
)
from pdcluster.api.tools.calls import CallRules
from pdcluster.api.tools.markers import ARGS, CALL_ID, END_THINK, END_TOOL_CALL, PYTHON_TAG, TOOL_CALL, TOOL_CALLS
from pdcluster.api.tools.parsers import HermesParser, LlamaParser, MistralParser, Parser
from pdcluster.api.tools.tool_choice import Function, Offer, parameters_of

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
    """

    parser: Callable[[CallRules], Parser]
    new_id: Callable[[], str]
    begin: str
    end: str
    separator: str
    trigger: str | None
    opening: str = ""
    closing: str = ""

    def parse(self, offer: Offer) -> Parser:
        return self.parser(CallRules(self.new_id, offer.knows, [tool.name for tool in offer.tools]))

    def form(self, offer: Offer) -> Form:
        """The grammar of an answer that is only calls."""
        return self._around(self._calls(offer, arguments_form))

    def free_form(self, offer: Offer, *, reasons: bool) -> Form:
        """The grammar of an answer that is text, calls or both. A call is of an offered tool; a strict tool's arguments
        match its schema. reasons: the model may think first.
        """
        if self.trigger is None:
            before = pattern(SOME_SPACE + f"({_escaped(PYTHON_TAG)})?")
            calls = sequence(before, self._calls(offer, _strict))
            return either(calls, *_no_call(END_THINK if reasons else None))
        rest = self._triggered(offer)
        call = sequence(up_to(self.trigger), rest)
        return sequence(repeated(call, "*"), any_text()) if offer.parallel else either(any_text(), call)

    def _triggered(self, offer: Offer) -> Form:
        """What follows the trigger."""
        if not self.opening:
            return either(*self._each(offer, _strict, self.begin.removeprefix(cast(str, self.trigger))))
        listed = self._calls(offer, _strict)
        return either(
            sequence(literal(self.opening.removeprefix(cast(str, self.trigger))), listed, literal(self.closing)),
            *self._named(offer),
        )

    def _around(self, calls: Form) -> Form:
        return sequence(literal(self.opening), calls, literal(self.closing)) if self.opening else calls

    def _calls(self, offer: Offer, form_of: FormOf) -> Form:
        call = either(*self._each(offer, form_of, self.begin))
        return sequence(call, repeated(sequence(literal(self.separator), call), "*")) if offer.parallel else call

    def _each(self, offer: Offer, form_of: FormOf, begin: str) -> list[Form]:
        return [
            sequence(literal(begin.replace("{name}", tool.name)), form_of(tool), literal(self.end))
            for tool in offer.tools
        ]

    def _named(self, offer: Offer) -> list[Form]:
        """Each call by itself, its arguments behind a mark."""
        marks = pattern(f"({_escaped(CALL_ID)}[a-zA-Z0-9]{{9}})?{_escaped(ARGS)}")
        return [sequence(literal(tool.name), marks, _strict(tool)) for tool in offer.tools]


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        HermesParser, _long_id, TOOL_CALL + '\n{"name": "{name}", "arguments": ', "}\n" + END_TOOL_CALL, "\n", TOOL_CALL
    ),
    "llama": ToolFormat(LlamaParser, _long_id, '{"name": "{name}", "parameters": ', "}", "; ", None),
    "mistral": ToolFormat(
        MistralParser, _short_id, '{"name": "{name}", "arguments": ', "}", ", ", TOOL_CALLS, TOOL_CALLS + "[", "]"
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


def arguments_form(tool: Function) -> Form:
    """Arguments by the tool's schema. Raises BadRequest naming the tool."""
    param = f"tools.{tool.name}.parameters"
    return json_form(parameters_of(tool, param), param)


def _strict(tool: Function) -> Form:
    """Arguments of a tool that is not strict are any object."""
    return arguments_form(tool) if tool.strict else any_object()


def _no_call(banned: str | None) -> list[Form]:
    """Texts that do not begin as calls do. banned: what they do not contain."""
    mark = PYTHON_TAG
    begins = "|".join(
        [r"[^{<\s]", *(f"{_escaped(mark[:length])}[^{_escaped(mark[length])}]" for length in range(1, len(mark)))]
    )
    short = "|".join(_escaped(mark[:length]) for length in range(1, len(mark)))
    return [
        sequence(pattern(f"{SPACES}({begins})"), any_text(without=banned)),
        pattern(f"{SPACES}({short})?"),
    ]


def _escaped(text: str) -> str:
    """For a regular expression."""
    return "".join("\\" + character if character in SPECIAL else character for character in text)

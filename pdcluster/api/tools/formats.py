"""The formats in which models call tools: which one a model uses, who parses it, and the grammar of an answer that must be calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pdcluster.api.structured import MAX_WHITESPACE, Form
from pdcluster.api.tools.calls import Rules
from pdcluster.api.tools.markers import END_TOOL_CALL, PYTHON_TAG, TOOL_CALL, TOOL_CALLS
from pdcluster.api.tools.offered import Offer, parameters_of
from pdcluster.api.tools.parsers import HermesParser, LlamaParser, MistralParser, Parser

MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    """Mistral's templates refuse any other kind."""
    return "".join(secrets.choice(MISTRAL_ID_CHARACTERS) for _ in range(9))


class Format(NamedTuple):
    """begin, end: around the arguments of one call, {name} being the function's; opening, closing: around all of them, separator between."""

    parser: Callable[[Rules], Parser]
    new_id: Callable[[], str]
    begin: str
    end: str
    separator: str
    opening: str = ""
    closing: str = ""

    def parse(self, offer: Offer) -> Parser:
        return self.parser(Rules(self.new_id, offer.knows))

    def form(self, offer: Offer) -> Form:
        """Of an answer that is calls and nothing else."""
        tags = [
            {
                "type": "tag",
                "begin": self.begin.replace("{name}", tool.name),
                "content": _arguments(parameters_of(tool, f"tools.{tool.name}.parameters")),
                "end": self.end,
            }
            for tool in offer.tools
        ]
        calls: Form = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not offer.parallel,
        }
        around = [_constant(self.opening), calls, _constant(self.closing)]
        return calls if not self.opening else {"type": "sequence", "elements": around}


FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        HermesParser, _long_id, TOOL_CALL + '\n{"name": "{name}", "arguments": ', "}\n" + END_TOOL_CALL, "\n"
    ),
    "llama": Format(LlamaParser, _long_id, '{"name": "{name}", "parameters": ', "}", "; "),
    "mistral": Format(MistralParser, _short_id, '{"name": "{name}", "arguments": ', "}", ", ", TOOL_CALLS + "[", "]"),
}  # fmt: skip

SIGNS: tuple[tuple[str, str], ...] = ((TOOL_CALL, "hermes"), (TOOL_CALLS, "mistral"), (PYTHON_TAG, "llama"), ('"parameters":', "llama"))
"""What a template has in it → the format that its model was taught."""


def detect(template: str) -> str | None:
    """The format that a chat template speaks of; None for one that takes no tools."""
    if "tools" not in template:
        return None
    return next((name for sign, name in SIGNS if sign in template), None)


def _arguments(schema: dict[str, Any]) -> Form:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _constant(text: str) -> Form:
    return {"type": "const_string", "value": text}

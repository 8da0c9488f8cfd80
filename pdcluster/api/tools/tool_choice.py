"""The tools that a request offers, and which of them the model must, may or must not call: shapes and checks of `tools`
and `tool_choice`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

MAX_TOOLS = 512
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class Function(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """cache_control: a hint for servers that cache on demand. Here everything is cached."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: object = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    """cache_control: as in Function. defer_loading: it may be called, but the prompt does not show it."""

    function: Function
    type: Literal["function"] = "function"
    cache_control: object = None
    defer_loading: bool | None = None


def definition_text(tool: ToolDefinition) -> str:
    """How a prompt shows a tool where it was loaded, behind the tools that it began with."""
    function = tool.function
    shown = {"description": function.description, "name": function.name, "parameters": function.parameters}
    return f"<functions>\n<function>{msgspec.json.encode(shown).decode()}</function>\n</functions>"


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class AllowedTool(Struct, forbid_unknown_fields=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class NamedChoice(Struct, forbid_unknown_fields=True):
    """One function that must be called, or those of the shown ones that may be."""

    function: NamedFunction | None = None
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class Offer(msgspec.Struct, frozen=True):
    """must: a call is required. `tools` may be called; the prompt shows all `shown` but those of defer_loading.
    parallel: several calls are allowed.
    """

    tools: Sequence[Function]
    shown: Sequence[ToolDefinition]
    must: bool
    parallel: bool

    @property
    def is_limited(self) -> bool:
        """Whether tools are shown that may not be called."""
        return len(self.tools) < len(self.shown)

    @property
    def is_strict(self) -> bool:
        """Whether some tool's arguments must match its schema."""
        return any(tool.strict for tool in self.tools)

    def knows(self, name: str) -> bool:
        return any(tool.name == name for tool in self.tools)

    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates expect them."""
        return [
            {"type": "function", "function": _plain(tool.function)} for tool in self.shown if not tool.defer_loading
        ]


def offer_of(tools: Sequence[ToolDefinition] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """None when nothing may be called. Raises BadRequest."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest(
                "tool_choice asks for a call, but there are no tools; send tools or leave tool_choice out",
                "tool_choice",
            )
        return None
    _check(tools)
    if choice == "none":
        return None
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedChoice):
        return _chosen(functions, tools, choice, parallel)
    return Offer(functions, tools, choice == "required", parallel is not False)


def _chosen(
    functions: Sequence[Function], tools: Sequence[ToolDefinition], choice: NamedChoice, parallel: bool | None
) -> Offer:
    allowed = choice.allowed_tools
    if choice.type == "function":
        if choice.function is None or allowed is not None:
            raise BadRequest("tool_choice.function is missing; it is required, and comes alone", "tool_choice.function")
        return Offer([_named(functions, choice.function.name)], tools, True, False)
    if allowed is None or not allowed.tools or choice.function is not None:
        raise BadRequest(
            "tool_choice.allowed_tools must have tools, and come without function", "tool_choice.allowed_tools"
        )
    names = dict.fromkeys(tool.function.name for tool in allowed.tools)
    return Offer([_named(functions, name) for name in names], tools, allowed.mode == "required", parallel is not False)


def _named(functions: Sequence[Function], name: str) -> Function:
    for function in functions:
        if function.name == name:
            return function
    raise BadRequest(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")


def _check(tools: Sequence[ToolDefinition]) -> None:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name, at = tool.function.name, f"tools[{index}].function"
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"{at}.name is {shown(name)}; a name has 1 to 128 letters, digits, underscores, dots and dashes",
                f"{at}.name",
            )
        if name in names:
            raise BadRequest(f"{at}.name is {shown(name)}, as that of another tool; names must differ", f"{at}.name")
        names.add(name)


def parameters_of(function: Function, param: str) -> dict[str, Any]:
    """The schema of its arguments, for a grammar. An absent schema means no arguments."""
    schema = {"type": "object", **(function.parameters or {"properties": {}})}
    if schema["type"] != "object":
        raise BadRequest(f"{param} has type {shown(schema['type'])}; arguments of a function are an object", param)
    return schema


def _plain(function: Function) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(function)
    plain.pop("strict", None)
    plain.pop("cache_control", None)
    return plain

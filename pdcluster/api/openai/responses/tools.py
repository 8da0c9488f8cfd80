"""Tools of a Responses request as the functions that a chat offers, and calls as their client names them.

1. A tool in a namespace becomes a function with a name of its own. The same tools always get the same names.
2. A custom tool becomes a function with one text, `input`.
3. Tools that a server would run are left out. Nothing here runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, structs

from pdcluster.api.tools.tool_choice import (
    MAX_TOOLS,
    NAME,
    AllowedTool,
    AllowedTools,
    Function,
    NamedChoice,
    NamedFunction,
    ToolChoice,
    ToolDefinition,
    definition_text,
)
from pdcluster.api.validate import convert, shown
from pdcluster.core.errors import BadRequest

INPUT = "input"
LONGEST_NAME = 64
# Characters of a digest that makes a name unique.
DIGEST = 8
# Kinds of tools that the model is told of.
OFFERED = ("function", "custom", "namespace")


class OfferedFunction(Struct):
    """Tools accept unknown fields, as clients gain them often."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct):
    name: str
    description: str | None = None
    format: InputFormat | None = None


class ToolNamespace(Struct):
    name: str
    description: str | None = None
    tools: list[dict[str, Any]] = []


class ToolName(Struct, frozen=True):
    """A tool as its client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


Chosen = Literal["none", "auto", "required"] | dict[str, Any] | None


class Toolbox:
    """definitions: the tools as a chat offers them. choice: which of them a chat may or must call."""

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], choice: Chosen = None, later: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """later: tools that items bring; those that are offered already are passed over. Raises BadRequest naming the
        tool.
        """
        self._needs_call = choice not in (None, "auto", "none")
        self._offered: list[tuple[ToolName, Function]] = []
        self._later: set[ToolName] = set()
        self._is_later = False
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")
        self._is_later = True
        for tool in later:
            self._add(tool, "a tool in input")
        self._named = _unique_names([tool for tool, _ in self._offered])
        self._functions = {(tool.name, tool.namespace): name for name, tool in self._named.items()}
        self.definitions = [
            ToolDefinition(structs.replace(function, name=name), defer_loading=tool in self._later or None)
            for name, (tool, function) in zip(self._named, self._offered, strict=True)
        ]
        self.choice = self._chosen(choice)

    def client_name(self, function: str) -> ToolName:
        """The tool whose function was called."""
        return self._named.get(function) or ToolName(function)

    def function_name(self, name: str, namespace: str | None) -> str:
        """The function of a tool, or of one that was offered before."""
        found = self._functions.get((name, namespace))
        return found or (name if namespace is None else flat_name(name, namespace))

    def loaded_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """How a prompt shows those of an item's tools that were not offered before; "" for none."""
        names = {self.function_name(name, namespace) for name, namespace in _names_of(tools)}
        shown = [each for each in self.definitions if each.defer_loading and each.function.name in names]
        return "\n".join(map(definition_text, shown))

    # ------------------------------------------------------------ what is offered

    def _add(self, tool: Mapping[str, Any], at: str, inside: ToolNamespace | None = None) -> None:
        kind = tool.get("type", "function")
        if kind == "namespace" and inside is None:
            namespace = convert(tool, ToolNamespace, {"": ToolNamespace}, at)
            _check_name(namespace.name, f"{at}.name")
            for index, each in enumerate(namespace.tools):
                self._add(each, f"{at}.tools[{index}]", namespace)
        elif kind == "function":
            given = convert(tool, OfferedFunction, {"": OfferedFunction}, at)
            self._offer(Function(given.name, given.description, given.parameters, given.strict), at, inside)
        elif kind == "custom":
            custom = convert(tool, CustomTool, {"": CustomTool, "format": InputFormat}, at)
            self._offer(_function_of(custom, at, is_enforced=self._needs_call), at, inside, is_custom=True)
        elif not isinstance(kind, str):
            raise BadRequest(f"{at}.type is {shown(kind)}; it must be a string, such as function", f"{at}.type")

    def _offer(self, function: Function, at: str, inside: ToolNamespace | None, *, is_custom: bool = False) -> None:
        """The description of a namespace stands in that of its first tool."""
        _check_name(function.name, f"{at}.name")
        if len(self._offered) == MAX_TOOLS:
            raise BadRequest(f"tools has more than {MAX_TOOLS} functions and custom tools; send fewer", "tools")
        tool = ToolName(function.name, None if inside is None else inside.name, is_custom)
        others = {(each.name, each.namespace) for each, _ in self._offered}
        if (tool.name, tool.namespace) in others and self._is_later:
            return
        if self._is_later:
            self._later.add(tool)
        if (tool.name, tool.namespace) in others:
            raise BadRequest(
                f"{at}.name is {shown(tool.name)}, as that of another tool; names must differ", f"{at}.name"
            )
        is_first = all(namespace != tool.namespace for _, namespace in others)
        if inside is not None and inside.description and is_first:
            function.description = f"{inside.description}\n\n{function.description or ''}".rstrip()
        self._offered.append((tool, function))

    # ------------------------------------------------------------ what is chosen

    def _chosen(self, choice: Chosen) -> ToolChoice | None:
        if not isinstance(choice, dict):
            if choice == "required" and not self._offered:
                raise BadRequest(
                    "tool_choice asks for a call, but there is no function, custom tool or namespace; send one, or "
                    "leave tool_choice out",
                    "tool_choice",
                )
            return choice
        kind = choice.get("type")
        if kind == "allowed_tools":
            return self._allowed(choice)
        named = self._functions_of(choice, "tool_choice", must=True)
        return NamedChoice(NamedFunction(named[0]))

    def _allowed(self, choice: Mapping[str, Any]) -> ToolChoice:
        mode, listed = choice.get("mode", "auto"), choice.get("tools")
        if mode not in ("auto", "required"):
            raise BadRequest(f"tool_choice.mode is {shown(mode)}; it must be auto or required", "tool_choice.mode")
        is_listed = isinstance(listed, list) and all(isinstance(each, dict) for each in listed)
        if not isinstance(listed, list) or not is_listed or len(listed) > MAX_TOOLS:
            what = f"a list of at most {MAX_TOOLS} tools, each with type and name"
            raise BadRequest(f"tool_choice.tools must be {what}", "tool_choice.tools")
        names = [
            name
            for index, each in enumerate(listed)
            for name in self._functions_of(each, f"tool_choice.tools[{index}]", must=False)
        ]
        if not names:
            if mode == "auto":
                return "none"
            raise BadRequest(
                "tool_choice asks for a call, but names no function, custom tool or namespace; name one",
                "tool_choice.tools",
            )
        allowed = [AllowedTool(NamedFunction(name)) for name in dict.fromkeys(names)]
        return NamedChoice(type="allowed_tools", allowed_tools=AllowedTools(mode, allowed))

    def _functions_of(self, tool: Mapping[str, Any], at: str, *, must: bool) -> list[str]:
        """The functions that a choice names. must: one that a server would run is refused."""
        kind, name, namespace = tool.get("type"), tool.get("name"), tool.get("namespace")
        if kind not in OFFERED:
            if must:
                raise BadRequest(
                    f"{at}.type is {shown(kind)}, a tool that is not run here; choose a function or a custom tool, or "
                    "leave tool_choice out",
                    f"{at}.type",
                )
            return []
        if kind == "namespace":
            found = [function for function, each in self._named.items() if each.namespace == name]
        else:
            found = [
                function
                for function, each in self._named.items()
                if (each.name, each.is_custom) == (name, kind == "custom") and namespace in (each.namespace, None)
            ][:1]
        if not found:
            raise BadRequest(f"{at} names {shown(name)}, which is not among the tools", at)
        return found


def _names_of(tools: Sequence[Mapping[str, Any]], namespace: str | None = None) -> list[tuple[str, str | None]]:
    """Names and namespaces of tools whose shape the toolbox has checked."""
    found: list[tuple[str, str | None]] = []
    for tool in tools:
        if tool.get("type") == "namespace" and namespace is None:
            found += _names_of(tool.get("tools", ()), tool["name"])
        elif "name" in tool:
            found.append((tool["name"], namespace))
    return found


def _unique_names(tools: Sequence[ToolName]) -> dict[str, ToolName]:
    """A function name for each, in order. Tools outside namespaces keep theirs."""
    taken = {tool.name for tool in tools if tool.namespace is None}
    named: dict[str, ToolName] = {}
    for tool in tools:
        name = tool.name
        if tool.namespace is not None:
            name = flat_name(tool.name, tool.namespace)
            name = digest_name(tool.name, tool.namespace) if name in taken else name
            if name in taken:
                raise BadRequest(
                    f"tools has {shown(name)} and a namespace whose function is named so; rename one", "tools"
                )
            taken.add(name)
        named[name] = tool
    return named


def flat_name(name: str, namespace: str) -> str:
    """The name of a function in a namespace, as models read it."""
    joined = f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
    return joined if len(joined) <= LONGEST_NAME else digest_name(name, namespace)


def digest_name(name: str, namespace: str) -> str:
    """The same, made unique by a digest and no longer than names may be."""
    digest = hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:DIGEST]
    return f"{f'{namespace}__{name}'[: LONGEST_NAME - DIGEST - 1]}_{digest}"


def _check_name(name: str, at: str) -> None:
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"{at} is {shown(name)}; a name has 1 to {LONGEST_NAME} letters, digits, underscores, dots and dashes", at
        )


def _function_of(tool: CustomTool, at: str, *, is_enforced: bool) -> Function:
    """is_enforced: the arguments follow a grammar. A regular expression can be a part of it."""
    text: dict[str, Any] = {"type": "string"}
    lines = [tool.description] if tool.description else []
    lines.append('The arguments are an object with one text: {"input": "…"}.')
    given = tool.format
    if given is not None and given.type == "grammar":
        if given.syntax is None or not given.definition:
            missing = "syntax" if given.syntax is None else "definition"
            raise BadRequest(f"{at}.format.{missing} is missing; a grammar needs it", f"{at}.format.{missing}")
        lines.append(f"The text matches this {given.syntax} grammar:\n{given.definition}")
        if given.syntax == "regex" and is_enforced:
            text["pattern"] = f"^(?:{given.definition})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Function(tool.name, "\n\n".join(lines), schema)

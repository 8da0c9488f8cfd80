"""Requests in Anthropic's words: the bodies of /v1/messages and /v1/messages/count_tokens, as chats.

Unknown fields are ignored: these clients gain some each month. Unknown blocks and kinds of tools are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pdcluster.api import validate
from pdcluster.api.anthropic.blocks import InputBlock, MessageTurn, continues_last, loaded_in, messages_of
from pdcluster.api.openai import requests as openai
from pdcluster.api.structured.constraints import JsonSchema, ResponseFormat
from pdcluster.api.tools.tool_choice import (
    Function,
    NamedChoice,
    NamedFunction,
    ToolChoice,
    ToolDefinition,
    definition_text,
)
from pdcluster.core.errors import BadRequest

# Known fields that change nothing here.
WITHOUT_EFFECT = frozenset({
    "metadata", "cache_control", "container", "service_tier", "context_management", "inference_geo", "betas", "speed",
    "diagnostics", "fallbacks", "fallback_credit_token", "workspace_id", "thread", "compaction", "billing_policy",
})  # fmt: skip

# Of a field whose value is nobody's text.
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ThinkingMode(Struct):
    """The budget is a hint that no template takes."""

    type: Literal["enabled", "adaptive", "disabled"]
    display: str | None = None


class SchemaFormat(Struct):
    type: Literal["json_schema"]
    schema: object = None


class OutputConfig(Struct):
    format: SchemaFormat | None = None
    effort: openai.Hint | None = None


class ToolUseChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class InputTool(Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class CountRequest(openai.OwnFields, kw_only=True):
    """What both endpoints read."""

    model: str
    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    system: str | list[InputBlock] | None = None
    thinking: ThinkingMode | None = None
    tool_choice: ToolUseChoice | None = None
    tools: list[InputTool] | None = None
    output_config: OutputConfig | None = None
    # the older name of output_config.format
    output_format: SchemaFormat | None = None
    # would change the output
    mcp_servers: list[object] | None = None
    # pdcluster's
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: openai.Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


NESTED: Mapping[str, type[Struct]] = {
    "messages[…]": MessageTurn,
    "messages[…].content[…]": InputBlock,
    "system[…]": InputBlock,
    "thinking": ThinkingMode,
    "tool_choice": ToolUseChoice,
    "tools[…]": InputTool,
    "output_config": OutputConfig,
    "output_config.format": SchemaFormat,
}

_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountRequest)
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ChatAsked(Struct, frozen=True):
    """A request as a chat.

    omits_thinking: the answer's thinking is sent without its text.
    ignored: names of fields that nobody here knows.
    """

    chat: openai.ChatRequest
    omits_thinking: bool
    ignored: Sequence[str]


def decode_messages(body: bytes) -> ChatAsked:
    request = validate.decode(body, _MESSAGES, {"": MessagesRequest, **NESTED})
    chat = _chat_of(request)
    chat.max_tokens, chat.stream = request.max_tokens, request.stream
    chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    chat.stop = request.stop_sequences or None
    chat.stream_options = openai.StreamOptions(include_usage=True) if request.stream else None
    openai.check_stops(request.stop_sequences or (), "stop_sequences")
    thinking = request.thinking
    omits = thinking is not None and thinking.display == "omitted"
    return ChatAsked(openai.checked_chat(chat), omits, _unknown(body, MessagesRequest))


def decode_count(body: bytes) -> ChatAsked:
    request = validate.decode(body, _COUNT, {"": CountRequest, **NESTED})
    return ChatAsked(openai.checked_chat(_chat_of(request)), False, _unknown(body, MessagesRequest))


def _unknown(body: bytes, known: type[Struct]) -> list[str]:
    names = _NAMES.decode(body).keys() - {*known.__struct_fields__} - WITHOUT_EFFECT
    return sorted(name for name in names if _FIELD.fullmatch(name))


def _chat_of(request: CountRequest) -> openai.ChatRequest:
    if request.mcp_servers:
        raise BadRequest("mcp_servers are not called from here; leave them out and send their tools", "mcp_servers")
    tools, loaded = [_tool(tool, at) for at, tool in enumerate(request.tools or ())], loaded_in(request.messages)
    messages = messages_of(
        request.system, request.messages, {tool.function.name: definition_text(tool) for tool in tools}
    )
    chat = openai.ChatRequest(model=request.model, messages=messages)
    chat.continue_final_message = continues_last(messages) or None
    chat.tools = [tool for tool in tools if not tool.defer_loading or tool.function.name in loaded] or None
    chat.tool_choice, chat.parallel_tool_calls = _choice(request.tool_choice)
    chat.response_format = _format(request)
    chat.reasoning_effort = None if request.output_config is None else request.output_config.effort
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    chat.chat_template_kwargs = openai.thinking_switch(thinks) | (request.chat_template_kwargs or {})
    for name in openai.OwnFields.__struct_fields__:
        setattr(chat, name, getattr(request, name))
    return chat


def _tool(tool: InputTool, at: int) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise BadRequest(
            f"tools[{at}].type is {validate.shown(tool.type)}, which nobody runs here; only custom tools with an "
            "input_schema are taken",
            f"tools[{at}].type",
        )
    if tool.name is None:
        raise BadRequest(f"tools[{at}].name is missing; it is required", f"tools[{at}].name")
    function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
    return ToolDefinition(function, defer_loading=tool.defer_loading)


def _choice(choice: ToolUseChoice | None) -> tuple[ToolChoice | None, bool | None]:
    """The choice of a tool, and whether calls may be parallel."""
    if choice is None:
        return None, None
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice.name is missing; type tool needs it", "tool_choice.name")
        return NamedChoice(NamedFunction(choice.name)), parallel
    if choice.type == "any":
        return "required", parallel
    return choice.type, parallel


def _format(request: CountRequest) -> ResponseFormat | None:
    config = request.output_config
    asked = request.output_format if config is None or config.format is None else config.format
    if asked is None:
        return None
    if asked.schema is None:
        raise BadRequest("output_config.format.schema is missing; type json_schema needs it", "output_config.format")
    return ResponseFormat("json_schema", JsonSchema("output", schema=asked.schema, strict=True))

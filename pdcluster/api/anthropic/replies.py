"""Replies in Anthropic's words: a whole message, its usage, counts, models and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

from pdcluster.api.openai.replies import RouteReport, TokenUsage
from pdcluster.core.errors import BadRequest, ContextTooLong, PdclusterError


class CacheCreation(Struct, frozen=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(Struct, kw_only=True):
    """The whole prompt has input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    pdcluster: RouteReport | msgspec.UnsetType = msgspec.UNSET


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Mapping[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]


class MessageReply(Struct, kw_only=True):
    id: str
    model: str
    content: Sequence[ContentBlock]
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None


def usage_of(usage: TokenUsage) -> MessageUsage:
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        pdcluster=usage.pdcluster,
    )


def stop_reason_of(finish: str | None, *, by_string: bool, is_cut: bool) -> StopReason:
    """finish: OpenAI's word for it. is_cut: more tokens were asked for than the context had left."""
    if finish == "length":
        return "model_context_window_exceeded" if is_cut else "max_tokens"
    if finish == "tool_calls":
        return "tool_use"
    if finish == "abort":  # an operator ended it; sent back, it goes on
        return "pause_turn"
    return "stop_sequence" if by_string else "end_turn"


# ---------------------------------------------------------------- counts, models


class TokenCount(Struct):
    input_tokens: int


class MessagesModel(Struct, kw_only=True):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    max_tokens: int


class MessagesModels(Struct):
    data: Sequence[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model_of(name: str, created: int, max_len: int) -> MessagesModel:
    """created: Unix seconds."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MessagesModel(id=name, display_name=name, created_at=at, max_input_tokens=max_len, max_tokens=max_len)


def list_of(models: Sequence[MessagesModel]) -> MessagesModels:
    return MessagesModels(models, models[0].id if models else None, models[-1].id if models else None)


# ---------------------------------------------------------------- errors


class MessagesErrorBody(Struct):
    type: str
    message: str


class MessagesErrorReply(Struct):
    error: MessagesErrorBody
    request_id: str
    type: Literal["error"] = "error"


# Status → type. Other statuses below 500 are invalid requests, others above are errors of the API.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesErrors:
    """Errors as clients of Messages know them (exchange.ErrorShape)."""

    def status(self, error: PdclusterError) -> int:
        return 529 if error.http_status == 503 else error.http_status

    def body(self, error: PdclusterError, trace: str) -> bytes:
        status = self.status(error)
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode(MessagesErrorReply(MessagesErrorBody(kind, _message(error)), trace))


def _message(error: PdclusterError) -> str:
    """Clients shorten a conversation where a prompt is too long in these words, and look for both numbers."""
    if isinstance(error, ContextTooLong) and error.num_prompt is not None:
        return f"prompt is too long: {error.num_prompt} tokens > {error.max_len - 1} maximum. {error}"
    if isinstance(error, BadRequest) and error.param is not None:  # a tool of a chat has its fields in a function
        return str(error).replace(error.param, error.param.replace(".function", ""))
    return str(error)

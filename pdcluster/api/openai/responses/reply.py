"""A response as an object: its output items, usage and error, and everything that it repeats of its request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from pdcluster.api.openai.replies import RouteReport, TokenUsage
from pdcluster.api.openai.responses.requests import ResponseTerms, client_error
from pdcluster.api.text.logprobs import ChatTokenLogprob
from pdcluster.core.errors import BadRequest, PdclusterError

Status = Literal["in_progress", "completed", "incomplete", "failed"]

# ---------------------------------------------------------------- output items


class OutputText(Struct):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []
    type: Literal["output_text"] = "output_text"


class ReasoningText(Struct):
    text: str = ""
    type: Literal["reasoning_text"] = "reasoning_text"


class SummaryText(Struct):
    text: str = ""
    type: Literal["summary_text"] = "summary_text"


class MessageOutput(Struct):
    id: str
    content: list[OutputText] = []
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class ReasoningOutput(Struct):
    """content and summary: one of them has the whole reasoning."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    status: Status = "in_progress"
    type: Literal["reasoning"] = "reasoning"


class FunctionCallOutput(Struct):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET
    status: Status = "in_progress"
    type: Literal["function_call"] = "function_call"


class CustomCallOutput(Struct):
    id: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET
    status: Status = "in_progress"
    type: Literal["custom_tool_call"] = "custom_tool_call"


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput | CustomCallOutput

# ---------------------------------------------------------------- usage and errors


class InputTokensDetails(Struct):
    """cache_write_tokens: that are charged for; none are."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    pdcluster: RouteReport

    @classmethod
    def of(cls, usage: TokenUsage, num_reasoning: int) -> ResponseUsage:
        details = usage.prompt_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(0 if details is None else details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(num_reasoning),
            total_tokens=usage.total_tokens,
            pdcluster=usage.pdcluster,
        )


class ResponseFault(Struct):
    code: str
    message: str

    @classmethod
    def of(cls, error: PdclusterError) -> ResponseFault:
        """A code by which clients know whether to send the request again."""
        named = client_error(error)
        code = named.code if named.code == "context_length_exceeded" else FAULT_CODES.get(named.http_status)
        return cls(code or ("invalid_prompt" if isinstance(named, BadRequest) else "server_error"), str(named))


FAULT_CODES: Mapping[int, str] = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}
# Of an answer that the cluster ended with what it had.
CUT_SHORT = ResponseFault("server_error", "the cluster ended the response before it was complete; send it again")


class IncompleteReason(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


# ---------------------------------------------------------------- the object


class ResponseObject(Struct, kw_only=True):
    """created_at, completed_at: seconds since 1970. Fields of kind Raw repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    completed_at: int | None = None
    conversation: None = None
    error: ResponseFault | None = None
    frequency_penalty: Raw
    incomplete_details: IncompleteReason | None = None
    instructions: Raw
    max_output_tokens: Raw
    max_tool_calls: Raw
    metadata: Raw
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: Raw
    presence_penalty: Raw
    previous_response_id: None = None
    prompt: None = None
    prompt_cache_key: Raw
    reasoning: Raw
    safety_identifier: Raw
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_logprobs: Raw
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: Raw


def response_of(terms: ResponseTerms, reply_id: str, model: str, temperature: float, top_p: float) -> ResponseObject:
    """A response that begins now. temperature, top_p: of its sampling."""
    repeated = terms.repeated
    return ResponseObject(
        id=reply_id,
        created_at=int(time.time()),
        frequency_penalty=repeated["frequency_penalty"],
        instructions=repeated["instructions"],
        max_output_tokens=repeated["max_output_tokens"],
        max_tool_calls=repeated["max_tool_calls"],
        metadata=repeated["metadata"],
        model=model,
        parallel_tool_calls=repeated["parallel_tool_calls"],
        presence_penalty=repeated["presence_penalty"],
        prompt_cache_key=repeated["prompt_cache_key"],
        reasoning=repeated["reasoning"],
        safety_identifier=repeated["safety_identifier"],
        temperature=temperature,
        text=repeated["text"],
        tool_choice=repeated["tool_choice"],
        tools=repeated["tools"],
        top_logprobs=repeated["top_logprobs"],
        top_p=top_p,
        user=repeated["user"],
    )

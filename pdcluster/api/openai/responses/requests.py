"""Requests of OpenAI's Responses: the body of /v1/responses, its checks, and the chat that it means.

A field is served, taken without effect, or refused by name, as in `api.openai.requests`. That module checks the chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pdcluster.api import validate
from pdcluster.api.openai.requests import (
    EXTENSIONS,
    ChatRequest,
    Count,
    Hint,
    OwnFields,
    Seed,
    StreamOptions,
    checked_chat,
)
from pdcluster.api.openai.responses.items import messages_from, tools_within
from pdcluster.api.openai.responses.tools import Chosen, Toolbox
from pdcluster.api.structured.constraints import JsonSchema, ResponseFormat
from pdcluster.core.errors import BadRequest, PdclusterError
from pdcluster.core.sampling import LEAST_REPETITION, MAX_LOGPROBS, MOST_REPETITION

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class ReasoningOptions(Struct):
    """Hints. Unknown ones are ignored. summary: where the reasoning stands in the reply, see `wants_summary`."""

    effort: Hint | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def wants_summary(self) -> bool:
        """Whether the reasoning comes as a summary. The summary is the whole reasoning."""
        return (self.summary or self.generate_summary or "none") != "none"


class TextFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: object = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Hint | None = None


class ResponsesRequest(OwnFields, kw_only=True, forbid_unknown_fields=True):
    """Objects that a reply repeats are plain values. Their shapes are TextOptions, ReasoningOptions, those of `tools`
    and those of `items`.
    """

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Chosen = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: object = None
    # as in a chat
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION, le=MOST_REPETITION)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # without effect
    user: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_retention: object = None
    prompt_cache_options: object = None
    client_metadata: object = None
    access_programs: object = None
    max_tool_calls: object = None
    image: object = None
    background_options: object = None
    request_id: object = None
    # would change the answer, see REFUSED_FIELDS
    previous_response_id: object = None
    conversation: object = None
    background: object = None
    prompt: object = None
    truncation: object = None
    context_management: object = None
    moderation: object = None


# Refused fields → values that ask for nothing, and what to send instead.
REFUSED_FIELDS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), "routers keep no responses; send the whole conversation in input"),
    "conversation": ((), "routers keep no conversations; send the whole one in input"),
    "background": ((False,), "responses come over the connection that asks for them; set stream to true"),
    "prompt": ((), "routers keep no prompts; send its text in instructions and input"),
    "truncation": (("disabled",), "nothing is dropped from input here; send less of it"),
    "context_management": (([],), "nothing is compacted here; send a shorter input"),
    "moderation": ((), "leave it out"),
}

# Fields that a chat has, too.
SAME_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stream", "top_logprobs", "parallel_tool_calls", "chat_template_kwargs", "prompt_cache_key",
    *OwnFields.__struct_fields__,
)  # fmt: skip

# Fields that a reply repeats as they came.
REPEATED = ("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")

# Fields of the chat → fields of the body, for errors.
CLIENT_NAMES: Mapping[str, str] = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}

_BODY = msgspec.json.Decoder(ResponsesRequest)


class ResponseTerms(Struct, frozen=True):
    """What a response needs of its request. The body may be large, and ends before the response does.

    wants_summary, wants_encrypted: how reasoning comes.
    repeated: fields that the response repeats, as JSON.
    """

    model: str
    temperature: float | None
    top_p: float | None
    wants_summary: bool
    wants_encrypted: bool
    toolbox: Toolbox
    repeated: Mapping[str, msgspec.Raw]


class ResponseAsked(Struct, frozen=True):
    """The chat that a request means, and the terms of its response."""

    chat: ChatRequest
    terms: ResponseTerms


def decode_responses(body: bytes) -> ResponseAsked:
    """Raises BadRequest naming the field."""
    request = validate.decode(body, _BODY, {"": ResponsesRequest}, EXTENSIONS)
    _check_refused(request)
    toolbox = Toolbox(request.tools or (), request.tool_choice, tools_within(request.input or ""))
    if request.input is None:
        raise BadRequest("input is missing; it is required", "input")
    text = validate.convert(request.text or {}, TextOptions, {"": TextOptions, "format": TextFormat}, "text")
    reasoning = validate.convert(request.reasoning or {}, ReasoningOptions, {"": ReasoningOptions}, "reasoning")
    chat = ChatRequest(
        model=request.model,
        messages=messages_from(request.input, request.instructions, toolbox),
        tools=toolbox.definitions or None,
        tool_choice=toolbox.choice,
        response_format=_response_format(text.format),
        verbosity=text.verbosity,
        reasoning_effort=reasoning.effort,
        max_completion_tokens=request.max_output_tokens,
        logprobs=True if LOGPROBS in (request.include or ()) or request.top_logprobs else None,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        **{name: getattr(request, name) for name in SAME_FIELDS},
    )
    terms = ResponseTerms(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        wants_summary=reasoning.wants_summary,
        wants_encrypted=ENCRYPTED in (request.include or ()),
        toolbox=toolbox,
        repeated=_repeated(request),
    )
    return ResponseAsked(checked_chat(chat), terms)


def _repeated(request: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Made once and now: where an answer is written, fewer levels of nesting may be left."""
    text = {name: value for name, value in (request.text or {}).items() if value is not None}
    values = {name: getattr(request, name) for name in REPEATED} | {
        "frequency_penalty": request.frequency_penalty or 0.0,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
    }
    try:
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}
    except RecursionError as error:
        raise BadRequest(validate.NESTED_TOO_DEEPLY) from error


def _check_refused(request: ResponsesRequest) -> None:
    for name, (neutral, way_out) in REFUSED_FIELDS.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name} is {validate.shown(value)}, which is not served here: {way_out}", name)
    if (request.stream_options or {}).get("include_obfuscation"):
        raise BadRequest(
            "stream_options.include_obfuscation is not supported; leave it out", "stream_options.include_obfuscation"
        )


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type != "json_schema":
        if given.schema is not None:
            raise BadRequest(
                f"text.format.schema is set, but its type is {given.type}; set the type to json_schema",
                "text.format.schema",
            )
        return ResponseFormat(given.type)
    return ResponseFormat(given.type, JsonSchema(given.name, given.description, given.schema, given.strict))


def client_error(error: PdclusterError) -> PdclusterError:
    """The error with the names of the body's fields in place of the chat's."""
    if not isinstance(error, BadRequest) or error.param is None:
        return error
    for name, own in CLIENT_NAMES.items():
        rest = error.param.removeprefix(name)
        if error.param.startswith(name) and rest[:1] in ("", ".", "["):
            param = own if name == "messages" else own + rest
            named = BadRequest(str(error).replace(error.param, param), param)
            named.code, named.http_status = error.code, error.http_status
            return named
    return error

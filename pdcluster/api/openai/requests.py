"""Requests in OpenAI's words: the bodies of the /v1 endpoints, /tokenize and /detokenize, and their checks.

A field is supported, accepted without effect, or refused by name. Unknown fields are always refused. Known fields that
we cannot honour are refused when their value would change the output. `api.openai.limits` checks lengths against the
model; `api.openai.replies` has the replies.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct

from pdcluster.api import validate
from pdcluster.api.body_bound import check_bulk
from pdcluster.api.openai.token_list import LONG_BYTES, MARK, cut_list, token_list
from pdcluster.api.structured.constraints import JsonSchema, ResponseFormat, StructuredOutputs
from pdcluster.api.text.chat_template import RESERVED
from pdcluster.api.tools.arguments import arguments_of
from pdcluster.api.tools.tool_choice import (
    AllowedTool,
    AllowedTools,
    Function,
    NamedChoice,
    NamedFunction,
    ToolDefinition,
)
from pdcluster.core.errors import BadRequest
from pdcluster.core.sampling import LEAST_REPETITION, MAX_BAD_WORDS, MAX_LOGPROBS, MOST_REPETITION
from pdcluster.core.weights import Label

SYSTEM_ROLES = ("system", "developer")
MAX_STOPS = 16
# Of one stop string. Text that begins one is held back and compared with every token.
MAX_STOP_CHARACTERS = 1024
# They go to the nodes with every choice and every attempt.
MAX_STOP_TOKENS = 256

Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# 0: nothing is generated, see `_check_length`.
Length: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = int
Hint: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OwnFields(Struct, kw_only=True):
    """Fields of no API but this one. All APIs take them."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] | None = None
    pdcluster_mode: Literal["auto", "remote", "local"] | None = None
    weights: Label | None = None
    weights_change: Literal["fail", "replay"] | None = None


class Common(OwnFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and plain completions share. `_check_unsupported` handles fields typed `object`, or
    nobody does.
    """

    model: str
    max_tokens: Length | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION, le=MOST_REPETITION)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    # without effect
    user: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    request_id: object = None
    cache_prompt: object = None
    # would change the output
    length_penalty: object = None
    best_of: object = None
    use_beam_search: object = None
    include_stop_str_in_output: object = None
    truncate_prompt_tokens: object = None
    spaces_between_special_tokens: object = None
    return_tokens_as_token_ids: object = None
    allowed_token_ids: object = None


class FunctionCall(Struct):
    """Parts of messages accept unknown fields: clients and other servers keep fields there that no template shows."""

    name: str
    arguments: str | dict[str, Any] | None = None


class HistoryToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = "function"


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # other servers' name of reasoning_content, and the content of a refusal
    reasoning: object = None
    refusal: object = None
    # would change the output, see UNSUPPORTED_IN_MESSAGES
    audio: object = None
    function_call: object = None
    images: object = None
    videos: object = None
    prefix: object = None
    partial: object = None


class ChatRequest(Common, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    # hints that the template may use
    reasoning_effort: Hint | None = None
    verbosity: Hint | None = None
    # without effect
    prediction: object = None
    # would change the output
    chat_template: object = None
    functions: object = None
    function_call: object = None
    audio: object = None
    modalities: object = None
    web_search_options: object = None
    documents: object = None
    echo: object = None
    include_reasoning: object = None
    separate_reasoning: object = None


class CompletionRequest(Common, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: object = None


class _BareCompletion(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """The same with its prompt as raw JSON."""

    prompt: msgspec.Raw  # type: ignore[assignment]


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


NESTED: Mapping[str, type[Struct]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
    "structured_outputs": StructuredOutputs,
    "tools[…]": ToolDefinition,
    "tools[…].function": Function,
    "tool_choice": NamedChoice,
    "tool_choice.function": NamedFunction,
    "tool_choice.allowed_tools": AllowedTools,
    "tool_choice.allowed_tools.tools[…]": AllowedTool,
    "tool_choice.allowed_tools.tools[…].function": NamedFunction,
    "messages[…]": ChatMessage,
    "messages[…].content[…]": ContentPart,
    "messages[…].tool_calls[…]": HistoryToolCall,
    "messages[…].tool_calls[…].function": FunctionCall,
}

# Known fields that we cannot honour → values, besides null, that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "allowed_token_ids": ([],),
    "suffix": ("",),
}

# Fields of other servers that some clients always send. null, false and what is empty ask for nothing.
EXTENSIONS = frozenset({
    # vLLM's
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "guided_whitespace_pattern", "structural_tag", "logits_processors", "mm_processor_kwargs", "media_io_kwargs",
    "kv_transfer_params", "vllm_xargs", "prompt_embeds", "repetition_detection", "thinking_token_budget",
    # SGLang's
    "regex", "ebnf", "json_schema", "stop_regex", "no_stop_trim", "lora_path", "session_params", "custom_params",
    "custom_logit_processor", "return_hidden_states", "return_routed_experts", "rid", "extra_key", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "data_parallel_rank",
    # of clients
    "extra_body", "extra_headers", "extra_query", "thinking", "enable_thinking", "provider",
})  # fmt: skip

# Fields of messages that other servers act on → the way out. Empty or false values ask for nothing.
UNSUPPORTED_IN_MESSAGES: Mapping[str, str] = {
    "audio": "leave it out",
    "function_call": "send tool_calls",
    "images": "only text is taken",
    "videos": "only text is taken",
    "prefix": "set continue_final_message of the request",
    "partial": "set continue_final_message of the request",
}

_CHAT_UNSUPPORTED = tuple(name for name in ChatRequest.__struct_fields__ if name in UNSUPPORTED)
_COMPLETION_UNSUPPORTED = tuple(
    name for name in CompletionRequest.__struct_fields__ if name in UNSUPPORTED and name != "echo"
)

_COMPLETION_SCHEMAS: Mapping[str, type[Struct]] = {"": CompletionRequest, **NESTED}

_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_IDS_BEGIN = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*\[')
_BARE_COMPLETION = msgspec.json.Decoder(_BareCompletion)
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def decode_chat(body: bytes) -> ChatRequest:
    return checked_chat(validate.decode(body, _CHAT, {"": ChatRequest, **NESTED}, EXTENSIONS))


def chat_of(fields: Mapping[str, object]) -> ChatRequest:
    """The same from plain values, for protocols other than JSON over HTTP."""
    return checked_chat(validate.convert(fields, ChatRequest, {"": ChatRequest, **NESTED}))


def checked_chat(request: ChatRequest) -> ChatRequest:
    """The same. Raises BadRequest for values that cannot be honoured."""
    _check_unsupported(request, _CHAT_UNSUPPORTED, request.n)
    _check_common(request)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest(
            f"top_logprobs is {request.top_logprobs} but logprobs is not true; set logprobs to true", "top_logprobs"
        )
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise BadRequest("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    _check_length(getattr(request, param), param, scores_prompt=request.prompt_logprobs is not None)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    return check_completion(read_completion(body))


def read_completion(body: bytes) -> CompletionRequest:
    """Decode a body and check its form. `check_completion` checks its values."""
    request = _with_token_list(body) if len(body) > LONG_BYTES else None
    return request or validate.decode(body, _COMPLETION, _COMPLETION_SCHEMAS, EXTENSIONS)


def _with_token_list(body: bytes) -> CompletionRequest | None:
    """The body with its prompt packed. None where the prompt is no list of token ids, or something is wrong; the full
    decoder then reports it.
    """
    cut = cut_list(body, _IDS_BEGIN)
    check_bulk(body if cut is None else cut[1].replace(MARK, b"[]"))
    try:
        bare = _BARE_COMPLETION.decode(body if cut is None else cut[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    packed, is_prompt = (
        (token_list(memoryview(bare.prompt)), True) if cut is None else (cut[0], bytes(bare.prompt) == MARK)
    )
    if packed is None or not is_prompt:
        return None
    others = {name: getattr(bare, name) for name in CompletionRequest.__struct_fields__ if name != "prompt"}
    return CompletionRequest(prompt=cast(Any, packed), **others)


def completion_of(fields: Mapping[str, object]) -> CompletionRequest:
    """The same from plain values, for protocols other than JSON over HTTP."""
    return check_completion(validate.convert(fields, CompletionRequest, _COMPLETION_SCHEMAS))


def check_completion(request: CompletionRequest) -> CompletionRequest:
    _check_unsupported(request, _COMPLETION_UNSUPPORTED, request.n)
    _check_common(request)
    scores_prompt = bool(request.echo) or request.prompt_logprobs is not None
    _check_length(request.max_tokens, "max_tokens", scores_prompt=scores_prompt)
    return request


def decode_tokenize(body: bytes) -> TokenizeRequest:
    request = validate.decode(body, _TOKENIZE, {"": TokenizeRequest, **NESTED}, EXTENSIONS)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("send either prompt (a string) or messages (a list)", "prompt")
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    return validate.decode(body, _DETOKENIZE, {"": DetokenizeRequest})


def prompts_of(request: CompletionRequest) -> list[str | Sequence[int]]:
    """One entry per prompt: text, or token ids."""
    return prompts_in(request.prompt, "prompt")


def prompts_in(prompt: str | list[str | int | list[TokenId]], param: str) -> list[str | Sequence[int]]:
    """The same, of a field with this name."""
    if isinstance(packed := cast(object, prompt), array):
        return [packed]
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest(
            f"{param} is an empty list; send a string, a list of strings, token ids, or a list of token id lists",
            param,
        )
    if isinstance(prompt[0], int) and (token_ids := _packed(prompt)) is not None:
        return [token_ids]
    kind = type(prompt[0])
    for index, entry in enumerate(prompt):
        if type(entry) is not kind:
            raise BadRequest(
                f"{param}[{index}] is of another kind than {param}[0]; send only strings, token ids, or token id lists",
                param,
            )
    return [entry for entry in prompt if not isinstance(entry, int)]


def _packed(prompt: Sequence[object]) -> Sequence[int] | None:
    """Pack the ids where all are whole numbers and fit; otherwise None. Later checks of 100,000 packed ids are fast. A
    struct packs in a third of an array's time.
    """
    try:
        return array("i", struct.pack(f"{len(prompt)}i", *prompt))
    except struct.error:
        return cast(list[int], prompt) if all(isinstance(entry, int) for entry in prompt) else None


def stops_of(request: Common) -> tuple[str, ...]:
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def messages_of(messages: list[ChatMessage]) -> list[dict[str, object]]:
    """Messages for a chat template: plain text, and tool arguments as objects. Raises BadRequest for what a model
    cannot be shown.
    """
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def with_system_first(request: ChatRequest) -> ChatRequest | None:
    """The request with system messages behind the first as words of the user, joined to those beside them; None where
    there are none.
    """
    messages = request.messages
    if not any(message.role in SYSTEM_ROLES for message in messages[1:]):
        return None
    moved = messages[:1]
    for message in messages[1:]:
        if message.role in SYSTEM_ROLES:
            message = msgspec.structs.replace(message, role="user")
        last = moved[-1]
        if message.role == last.role == "user":
            message = msgspec.structs.replace(last, content=[*_parts_of(last), *_parts_of(message)])
            moved.pop()
        moved.append(message)
    return msgspec.structs.replace(request, messages=moved)


def _parts_of(message: ChatMessage) -> list[ContentPart]:
    content = message.content
    return content if isinstance(content, list) else [ContentPart("text", content or "")]


# ---------------------------------------------------------------- checks


def _check_unsupported(request: Common, fields: Sequence[str], n: int | None) -> None:
    given = attrgetter(*fields)(request)
    if given.count(None) == len(given):
        return
    for name, value in zip(fields, given, strict=True):
        if value is None or value in UNSUPPORTED[name] or (name == "best_of" and value == n):
            continue
        raise BadRequest(f"{name} is {validate.shown(value)}, but {name} is not supported yet; leave it out", name)


def _check_length(max_tokens: int | None, param: str, *, scores_prompt: bool) -> None:
    if max_tokens == 0 and not scores_prompt:
        way_out = "to score a prompt without an output set echo or prompt_logprobs"
        raise BadRequest(f"{param} must be at least 1, got 0; {way_out}", param)


def check_stops(stops: Sequence[str], param: str = "stop") -> None:
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{param} has {len(stops)} strings; at most {MAX_STOPS} are allowed", param)
    if not all(stops):
        raise BadRequest(f"{param} has an empty string, which would match everywhere; leave it out", param)
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise BadRequest(
            f"{param} has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed, send how it "
            "begins",
            param,
        )


def _check_common(request: Common) -> None:
    if request.stop is not None:
        check_stops(stops_of(request))
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest(
            "prompt_logprobs is set and stream is true; they come with whole replies only, set stream to false",
            "prompt_logprobs",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest(
            "stream_options is set but stream is not true; set stream to true or leave stream_options out",
            "stream_options",
        )
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise BadRequest(
            "stream_options.include_obfuscation is not supported; leave it out", "stream_options.include_obfuscation"
        )


def template_kwargs_of(request: ChatRequest) -> dict[str, Any] | None:
    """The template's arguments besides the messages: those from hints, overridden by the request's own. None for
    nothing.
    """
    check_template_kwargs(request.chat_template_kwargs)
    effort, verbosity = request.reasoning_effort, request.verbosity
    if effort is None and verbosity is None:
        return request.chat_template_kwargs
    hints: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    if effort is not None:
        hints |= thinking_switch(False) if effort == "none" else {"reasoning_effort": effort}
    return hints | (request.chat_template_kwargs or {})


def thinking_switch(is_on: bool) -> dict[str, Any]:
    """The arguments that switch thinking in chat templates, under the names that families of models use."""
    return {"enable_thinking": is_on, "thinking": is_on}


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    clash = sorted(RESERVED & set(kwargs or ()))
    if clash:
        raise BadRequest(
            f"chat_template_kwargs may not set {', '.join(clash)}; use the request's own fields", "chat_template_kwargs"
        )


def _plain_message(message: ChatMessage, path: str) -> dict[str, object]:
    for name, way_out in UNSUPPORTED_IN_MESSAGES.items():
        if getattr(message, name):
            raise BadRequest(f"{path}.{name} is not supported; {way_out}", f"{path}.{name}")
    plain: dict[str, object] = {"role": message.role, "content": _plain_content(message, path)}
    texts = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning_of(message)}
    for name, text in texts.items():
        if text is not None:
            plain[name] = text
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return plain


def reasoning_of(message: ChatMessage) -> str | None:
    if message.reasoning_content is None and isinstance(message.reasoning, str):
        return message.reasoning
    return message.reasoning_content


def _plain_content(message: ChatMessage, path: str) -> str:
    """The text for the template. Absent content of an assistant or a tool is empty, because some templates would write
    None or fail.
    """
    content = message.content
    if isinstance(content, list):
        return "\n".join([_plain_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)])
    if content is None and message.role not in ("assistant", "tool"):
        raise BadRequest(
            f"{path}.content is missing; a {message.role} message needs content (a string or a list of text parts)",
            f"{path}.content",
        )
    return content or (message.refusal if isinstance(message.refusal, str) else "")


def _plain_part(part: ContentPart, path: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type != "text":
        raise BadRequest(
            f"{path}.type is {validate.shown(part.type)}; only text parts are supported, no images, audio or files",
            f"{path}.type",
        )
    if part.text is None:
        raise BadRequest(f"{path}.text is missing; a text part needs it", f"{path}.text")
    return part.text


def _plain_call(call: HistoryToolCall, path: str) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments, path)}
    named: dict[str, object] = {} if call.id is None else {"id": call.id}
    return named | {"type": "function", "function": function}

"""Generate's protobuf messages as the requests and replies of the HTTP API, so that both mean the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import Message as Proto

from pdcluster.api.body_bound import MOST_STRINGS, check_bulk
from pdcluster.api.openai import requests
from pdcluster.api.openai.replies import RouteReport, TokenUsage
from pdcluster.api.openai.sampling_fields import check_num_biases
from pdcluster.api.structured.constraints import parsed
from pdcluster.api.text.choice_text import TextPiece, Token
from pdcluster.api.tools.tool_choice import MAX_TOOLS
from pdcluster.core.errors import BadRequest
from pdcluster.rpc import inference_pb2 as pb

# Optional fields that are called and mean the same over HTTP.
_SAME_NAME = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n",
    "ignore_eos", "skip_special_tokens", "add_special_tokens", "cache_salt", "priority",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs",
    "prompt_cache_key", "weights", "weights_change",
)  # fmt: skip

_FINISH = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "abort": pb.FINISH_REASON_ABORT,
}
_TOOL_MODES = {
    pb.TOOL_MODE_UNSPECIFIED: None,
    pb.TOOL_MODE_AUTO: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}

# Messages of a chat, and calls in them: as many as a JSON body may have.
MOST_TURNS = MOST_STRINGS // 4


def request_from_proto(message: pb.GenerateRequest, model: str) -> requests.ChatRequest | requests.CompletionRequest:
    """model: for a request that names none. Raises BadRequest naming the field, as for a JSON body."""
    fields = _given(message, *_SAME_NAME)
    fields |= {
        "model": message.model or model,
        "stop": list(message.stop),
        "stop_token_ids": list(message.stop_token_ids),
    }
    fields["return_token_ids"] = message.return_prompt_token_ids
    check_num_biases(len(message.logit_bias))  # half a million of them fit into a message, and take a second to unpack
    fields |= {
        "logit_bias": {str(token): bias for token, bias in message.logit_bias.items()},
        "bad_words": list(message.bad_words),
    }
    if message.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured(message.structured_outputs)
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise BadRequest("the request has no prompt; set text, token_ids or chat", "prompt")
    return (
        requests.chat_of(fields | _chat_fields(message))
        if kind == "chat"
        else requests.completion_of(fields | _plain_fields(message, kind))
    )


def _structured(asked: pb.StructuredOutputs) -> dict[str, object]:
    kind = asked.WhichOneof("kind")
    if kind is None:
        return {}
    return {kind: list(asked.choice.texts) if kind == "choice" else getattr(asked, kind)}


def _chat_fields(message: pb.GenerateRequest) -> dict[str, object]:
    if message.HasField("echo"):
        raise BadRequest("echo is for text and token_ids, not for chat; leave it out", "echo")
    chat = message.chat
    _check_number(chat)
    fields: dict[str, object] = {"messages": [_message_fields(said) for said in chat.messages]}
    fields |= _given(chat, "add_generation_prompt", "continue_final_message", "parallel_tool_calls")
    if chat.tools:
        fields["tools"] = [
            _tool_fields(tool, f"chat.tools[{index}].parameters") for index, tool in enumerate(chat.tools)
        ]
    if chat.HasField("tool_choice"):
        fields["tool_choice"] = _tool_choice(chat.tool_choice)
    if chat.HasField("template_kwargs"):
        fields["chat_template_kwargs"] = parsed(chat.template_kwargs, "chat.template_kwargs")
    return fields | ({"logprobs": True, "top_logprobs": message.logprobs} if message.HasField("logprobs") else {})


def _check_number(chat: pb.Chat) -> None:
    """A few bytes here are a thousand as plain values. The size of a message bounds what is in them."""
    if len(chat.tools) > MAX_TOOLS:
        raise BadRequest(f"chat.tools has {len(chat.tools)} entries, at most {MAX_TOOLS} are allowed", "tools")
    num_turns = len(chat.messages)
    if num_turns <= MOST_TURNS:
        num_turns += sum(len(said.tool_calls) for said in chat.messages)
    if num_turns > MOST_TURNS:
        raise BadRequest(
            f"chat.messages has {num_turns} messages and calls, at most {MOST_TURNS} are taken; send several requests",
            "messages",
        )
    check_bulk("".join(tool.parameters for tool in chat.tools).encode(), "chat.tools")


def _message_fields(said: pb.ChatMessage) -> dict[str, object]:
    fields: dict[str, object] = {"role": said.role, "content": said.content, **_given(said, "tool_call_id", "name")}
    if said.HasField("reasoning"):
        fields["reasoning_content"] = said.reasoning
    if said.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in said.tool_calls
        ]
    return fields


def _tool_fields(tool: pb.Tool, param: str) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, **_given(tool, "description", "strict")}
    if tool.HasField("parameters"):
        function["parameters"] = parsed(tool.parameters, param)
    return {"type": "function", "function": function}


def _tool_choice(choice: pb.ToolChoice) -> object:
    if choice.WhichOneof("kind") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    if choice.mode not in _TOOL_MODES:
        known = ", ".join(pb.ToolMode.Name(mode) for mode in _TOOL_MODES if mode)
        raise BadRequest(f"chat.tool_choice.mode is {choice.mode}; it must be one of {known}", "tool_choice")
    return _TOOL_MODES[choice.mode]


def _given(message: Proto, *names: str) -> dict[str, object]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _plain_fields(message: pb.GenerateRequest, kind: str) -> dict[str, object]:
    if kind == "token_ids" and not message.token_ids.ids:
        raise BadRequest("token_ids is empty; send at least one token id", "token_ids")
    fields: dict[str, object] = {"prompt": message.text if kind == "text" else list(message.token_ids.ids)}
    return fields | _given(message, "logprobs", "echo")


def piece_to_proto(index: int, piece: TextPiece, position: int, *, logprobs: bool) -> pb.GenerateReply:
    """position: of the piece's first output token."""
    reply = pb.GenerateReply(
        index=index, text=piece.text, token_ids=[token.id for token in piece.tokens], position=position,
        finish_reason=_FINISH[piece.finish] if piece.finish else None, prompt_token_ids=piece.prompt_token_ids or (),
    )  # fmt: skip
    if piece.reasoning:
        reply.reasoning = piece.reasoning
    for call in piece.calls:
        reply.tool_calls.add(index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments)
    if logprobs:
        reply.logprobs.extend(_logprobs(piece.tokens))
    reply.prompt_logprobs.extend(_logprobs(piece.echo if piece.prompt_logprobs is None else piece.prompt_logprobs))
    return reply


def _logprobs(tokens: Iterable[Token]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(token_id=token.id)
        if token.logprobs is None
        else pb.TokenLogprobs(
            token_id=token.id,
            logprob=token.logprobs.logprob,
            top_ids=token.logprobs.top_ids,
            top_logprobs=token.logprobs.top_logprobs,
        )
        for token in tokens
    ]


def add_route(reply: pb.GenerateReply, mode: str, prefill: str | None, decode: str | None, transfer: str) -> None:
    reply.route.CopyFrom(pb.Route(mode=mode, prefill=prefill or "", decode=decode or "", transfer=transfer))


def add_first_timings(reply: pb.GenerateReply, ttft_s: float | None) -> None:
    _set(reply.timings, ttft_s=ttft_s)


def add_report(reply: pb.GenerateReply, report: RouteReport) -> None:
    """Where a choice that ended ran, and how long what took."""
    add_route(reply, report.mode, report.prefill, report.decode, report.transfer)
    for each in report.weights:
        reply.weights.add(
            from_position=each.first, to_position=each.to, label=each.label, digest=each.digest, epoch=each.epoch
        )
    _set(reply.timings, attempts=report.attempts)
    if (timeline := report.timeline) is not None:
        _set(
            reply.timings, ttft_s=timeline.ttft_s, ttst_s=timeline.ttst_s, queue_s=timeline.queue_s,
            prefill_s=timeline.prefill_s,
            transfer_s=timeline.transfer_s, exposed_s=timeline.exposed_s, decode_s=timeline.decode_s,
            transfer_bytes=timeline.transfer_bytes,
            placed_s=timeline.placed_s,
        )  # fmt: skip


def add_usage(reply: pb.GenerateReply, usage: TokenUsage) -> None:
    _set(reply.usage, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
    if usage.prompt_tokens_details is not None:
        _set(reply.usage, cached_tokens=usage.prompt_tokens_details.cached_tokens)


def _set(message: Proto, **values: float | int | None) -> None:
    message.SetInParent()
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


def models_to_proto(models: Sequence[tuple[str, int, int, int]]) -> pb.ListModelsReply:
    """(id, created, max_len, vocab_size) of each."""
    return pb.ListModelsReply(
        models=[
            pb.Model(id=name, created=created, max_len=max_len, vocab_size=vocab)
            for name, created, max_len, vocab in models
        ]
    )

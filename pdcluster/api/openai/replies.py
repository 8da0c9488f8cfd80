"""Replies in OpenAI's words: chat and plain completions, whole or as chunks of a stream, usage, models, errors.

A format makes bytes. It knows neither sockets nor the source of the tokens. `UNSET` fields are left out of the JSON;
None is written as null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from pdcluster.api import sse
from pdcluster.api.text.choice_text import TextPiece
from pdcluster.api.text.detokenizer import Pieces
from pdcluster.api.text.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from pdcluster.api.tools.calls import ToolCallDelta
from pdcluster.core.errors import BadRequest, PdclusterError
from pdcluster.core.weights import WeightsVersion

_encode = msgspec.json.Encoder().encode


# ---------------------------------------------------------------- usage and route


class Timeline(Struct, frozen=True):
    """Seconds of one choice's life; None where there is no such moment, as without a second token.

    ttft and ttst are the request's, over all attempts. The rest belongs to the final attempt, which got its nodes
    placed_s after the request came. What no node reported is as the router saw it. A transfer that a stop string cut
    has no time and no bytes.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    ttft_s: float | None = None
    ttst_s: float | None = None
    decode_s: float = 0.0
    decode_tokens: int = 0
    transfer_bytes: int = 0
    pulled_tokens: int = 0
    placed_s: float | None = None


class OutputWeights(Struct, frozen=True):
    """Which weights made the output tokens from `first` up to, and without, `to`."""

    first: int = msgspec.field(name="from")
    to: int
    label: str
    digest: str
    epoch: int

    @classmethod
    def of(cls, weights: WeightsVersion, first: int, to: int) -> OutputWeights:
        return cls(first, to, weights.label, weights.digest, weights.epoch)


def ranges_within(ranges: Sequence[OutputWeights], num_output: int) -> list[OutputWeights]:
    """Those of the first num_output tokens: a stop string may cut an answer before the last one that a node made."""
    if not ranges or ranges[-1].to <= num_output:
        return list(ranges)
    return [structs.replace(each, to=min(each.to, num_output)) for each in ranges if each.first < num_output]


class RouteReport(Struct):
    """Where one choice ran, and which weights made its tokens."""

    mode: str
    prefill: str | None
    decode: str | None
    transfer: str
    attempts: int | None
    timeline: Timeline | None
    weights: list[OutputWeights] = []
    choices: list[RouteReport] | UnsetType = UNSET


class PromptTokensDetails(Struct):
    cached_tokens: int


class TokenUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    pdcluster: RouteReport


class UsageSoFar(Struct):
    """Usage of all choices together, in chunks of a stream that asks for it."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int = 0

    def add(self, num_output: int) -> None:
        self.completion_tokens += num_output
        self.total_tokens = self.prompt_tokens + self.completion_tokens


# ---------------------------------------------------------------- chat


class CalledFunction(Struct, omit_defaults=True):
    arguments: str
    name: str | UnsetType = UNSET


class CalledTool(Struct):
    """A whole call. With an index it continues the call of that index."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatReplyMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatReplyMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UsageSoFar | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


# ---------------------------------------------------------------- plain completions


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionReply(Struct):
    """The same object whole and as a chunk, as OpenAI has it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UsageSoFar | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


# ---------------------------------------------------------------- formats


class Head(Struct, frozen=True):
    """What all chunks of one reply share.
    pieces: for the text of tokens in logprobs.
    so_far: the usage that chunks report; None for none.
    num_prompt: tokens of all prompts.
    is_cut: more tokens were asked for than the context has left.
    temperature, top_p: of the sampling.
    """

    id: str
    created: int
    model: str
    pieces: Pieces
    logprobs: bool
    token_ids: bool
    include_usage: bool
    so_far: UsageSoFar | None = None
    num_prompt: int = 0
    is_cut: bool = False
    temperature: float = 1.0
    top_p: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether chunks differ only in text, so that prepared parts can be joined."""
        return not (self.logprobs or self.token_ids or self.so_far is not None)


class ReplyFormat(Protocol):
    @property
    def is_plain(self) -> bool:
        """Whether chunks have nothing but the answer: no logprobs, no token ids, no usage."""
        ...

    def opening(self, index: int, cached_tokens: int | None) -> bytes:
        """The events before a choice's first piece; b"" for none. cached_tokens: of the prompt; None: not known yet."""
        ...

    def chunk(self, index: int, piece: TextPiece) -> bytes: ...

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """The JSON before and after the text of chunks that carry nothing else; None where some carry more."""
        ...

    def ending(self, usage: TokenUsage | None) -> bytes:
        """What follows the last piece of a stream. usage: None where it was not asked for."""
        ...

    @property
    def failure(self) -> Callable[[PdclusterError], bytes] | None:
        """Makes the last event of a stream that fails; None: it is the API's error event."""
        ...

    @property
    def ping(self) -> bytes:
        """An event that says nothing, for streams that are silent for long; b"" for none."""
        ...

    def whole(self, pieces: Sequence[TextPiece], usage: TokenUsage) -> bytes: ...


class ChatFormat:
    failure = None
    ping = b""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.is_plain = head.is_plain
        self._plain: _PlainChunks | None = None

    def opening(self, index: int, cached_tokens: int | None) -> bytes:
        return sse.event(self._encode_chunk(index, TextPiece(), ChatDelta(role="assistant", content=""), empty=True))

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        if index == 0 and piece.finish is None and self.is_plain and not (piece.reasoning or piece.calls):
            return self._plain_chunks().event(piece.text)
        delta = _delta(piece)
        _count(self._head, piece)
        return sse.event(self._encode_chunk(index, piece, delta))

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        return self._plain_chunks().around if index == 0 and self.is_plain else None

    def _plain_chunks(self) -> _PlainChunks:
        if self._plain is None:
            self._plain = _PlainChunks(self._encode_chunk(0, TextPiece(), ChatDelta(content="")), b'"content":""')
        return self._plain

    def ending(self, usage: TokenUsage | None) -> bytes:
        if usage is None:
            return sse.DONE
        return sse.event(_encode(ChatChunk(self._head.id, self._head.created, self._head.model, [], usage))) + sse.DONE

    def whole(self, pieces: Sequence[TextPiece], usage: TokenUsage) -> bytes:
        choices = [
            ChatChoice(
                index,
                _message(piece),
                piece.finish,
                self._logprobs(piece),
                _prompt_ids(piece),
                _token_ids(self._head, piece),
            )
            for index, piece in enumerate(pieces)
        ]
        reply = ChatReply(self._head.id, self._head.created, self._head.model, choices, usage)
        reply.prompt_logprobs = _prompt_logprobs(self._head, pieces[0])
        return _encode(reply)

    def _encode_chunk(self, index: int, piece: TextPiece, delta: ChatDelta, *, empty: bool = False) -> bytes:
        logprobs = None if empty else self._logprobs(piece)
        token_ids = UNSET if empty else _token_ids(self._head, piece)
        choice = ChatChunkChoice(index, delta, piece.finish, logprobs, _prompt_ids(piece), token_ids)
        head = self._head
        return _encode(ChatChunk(head.id, head.created, head.model, [choice], _usage_in_chunks(head)))

    def _logprobs(self, piece: TextPiece) -> ChatLogprobs | None:
        return chat_logprobs(piece.scored, self._head.pieces) if self._head.logprobs else None


def _delta(piece: TextPiece) -> ChatDelta:
    """The delta of a piece. An empty piece has a delta without text, so that logprobs and token ids have a place. The
    last piece has an empty delta.
    """
    delta = ChatDelta()
    if piece.text or (piece.finish is None and not piece.reasoning and not piece.calls):
        delta.content = piece.text
    if piece.reasoning:
        delta.reasoning_content = piece.reasoning
    if piece.calls:
        delta.tool_calls = [_more_of(call) for call in piece.calls]
    return delta


def _more_of(call: ToolCallDelta) -> CalledTool:
    if call.id is None or call.name is None:
        return CalledTool(CalledFunction(call.arguments), index=call.index)
    return CalledTool(CalledFunction(call.arguments, call.name), call.id, "function", call.index)


def _message(piece: TextPiece) -> ChatReplyMessage:
    calls = _whole_calls(piece.calls)
    return ChatReplyMessage(
        piece.text if piece.text or not calls else None,
        reasoning_content=piece.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[CalledTool]:
    arguments: list[list[str]] = []
    firsts: list[ToolCallDelta] = []
    for delta in deltas:
        if delta.id is not None:
            firsts.append(delta)
            arguments.append([])
        arguments[-1].append(delta.arguments)
    return [
        CalledTool(CalledFunction("".join(parts), first.name or ""), first.id or "", "function")
        for first, parts in zip(firsts, arguments, strict=True)
    ]


class CompletionFormat:
    failure = None
    ping = b""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.is_plain = head.is_plain
        self._plain: _PlainChunks | None = None

    def opening(self, index: int, cached_tokens: int | None) -> bytes:
        return b""

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        if index == 0 and piece.finish is None and self.is_plain:
            return self._plain_chunks().event(piece.text)
        _count(self._head, piece)
        return sse.event(self._encode_chunk(index, piece))

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        return self._plain_chunks().around if index == 0 and self.is_plain else None

    def _plain_chunks(self) -> _PlainChunks:
        if self._plain is None:
            self._plain = _PlainChunks(self._encode_chunk(0, TextPiece()), b'"text":""')
        return self._plain

    def ending(self, usage: TokenUsage | None) -> bytes:
        if usage is None:
            return sse.DONE
        head = self._head
        return sse.event(_encode(CompletionReply(head.id, head.created, head.model, [], usage))) + sse.DONE

    def whole(self, pieces: Sequence[TextPiece], usage: TokenUsage) -> bytes:
        choices = (
            [self._choice(0, pieces[0])]
            if len(pieces) == 1
            else [self._choice(index, piece) for index, piece in enumerate(pieces)]
        )
        return _encode(CompletionReply(self._head.id, self._head.created, self._head.model, choices, usage))

    def _encode_chunk(self, index: int, piece: TextPiece) -> bytes:
        head, choice = self._head, self._choice(index, piece)
        return _encode(CompletionReply(head.id, head.created, head.model, [choice], _usage_in_chunks(head)))

    def _choice(self, index: int, piece: TextPiece) -> CompletionChoice:
        if self.is_plain and piece.prompt_token_ids is None and piece.prompt_logprobs is None:
            return CompletionChoice(index, piece.text, piece.finish, None)
        logprobs = completion_logprobs([*piece.echo, *piece.scored], self._head.pieces) if self._head.logprobs else None
        of_prompt = _prompt_logprobs(self._head, piece)
        return CompletionChoice(
            index, piece.text, piece.finish, logprobs, _prompt_ids(piece), _token_ids(self._head, piece), of_prompt
        )


class _PlainChunks:
    """Chunks of the first choice that carry only text. Everything around the text is encoded once."""

    def __init__(self, example: bytes, empty: bytes) -> None:
        before, after = sse.one_line(example).split(empty, 1)
        self.around = b"data: " + before + empty[:-2], after + b"\n\n"

    def event(self, text: str) -> bytes:
        before, after = self.around
        return before + sse.text_json(text) + after


def _count(head: Head, piece: TextPiece) -> None:
    if head.so_far is not None:
        head.so_far.add(len(piece.tokens))


def _usage_in_chunks(head: Head) -> UsageSoFar | UnsetType | None:
    """With include_usage every chunk but the last has `usage: null`, or the usage so far. Without either the field is
    absent.
    """
    if head.so_far is not None:
        return head.so_far
    return None if head.include_usage else UNSET


def _token_ids(head: Head, piece: TextPiece) -> list[int] | UnsetType:
    return [token.id for token in piece.tokens] if head.token_ids else UNSET


def _prompt_ids(piece: TextPiece) -> list[int] | UnsetType:
    return UNSET if piece.prompt_token_ids is None else piece.prompt_token_ids


def _prompt_logprobs(head: Head, piece: TextPiece) -> PromptLogprobs | UnsetType:
    return UNSET if piece.prompt_logprobs is None else prompt_logprobs(piece.prompt_logprobs, head.pieces)


# ---------------------------------------------------------------- models, tokens


class ModelCard(Struct):
    """parent: of a LoRA adapter, the model that it changes. weights: label of the version that requests for it get;
    left out where that is chosen.
    """

    id: str
    created: int
    max_model_len: int
    parent: str | UnsetType = UNSET
    weights: str | UnsetType = UNSET
    object: Literal["model"] = "model"
    owned_by: str = "pdcluster"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeReply(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(Struct):
    prompt: str


# ---------------------------------------------------------------- errors


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    error: ErrorBody


ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


def error_body(error: PdclusterError) -> bytes:
    """Any of our errors in OpenAI's shape."""
    status = error.http_status
    kind = "invalid_request_error" if 400 <= status < 429 else ERROR_TYPES.get(status, "server_error")
    param = error.param if isinstance(error, BadRequest) else None
    return _encode(ErrorReply(ErrorBody(str(error), kind, param, error.code)))

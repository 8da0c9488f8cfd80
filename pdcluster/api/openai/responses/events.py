"""The events of a response, and its output items, from the pieces of its text.

1. One item is open at a time: reasoning, a message or a call. It is announced, grows and is done.
2. Items of events and of the whole response are the same objects.
3. Sequence numbers count all events of a stream from 0.

Pure: pieces in, bytes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, structs

from pdcluster.api import sse
from pdcluster.api.openai.replies import Head, TokenUsage
from pdcluster.api.openai.responses.custom_input import InputReader
from pdcluster.api.openai.responses.items import encrypted
from pdcluster.api.openai.responses.reply import (
    CUT_SHORT,
    CustomCallOutput,
    FunctionCallOutput,
    IncompleteReason,
    MessageOutput,
    OutputItem,
    OutputText,
    ReasoningOutput,
    ReasoningText,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
    Status,
    SummaryText,
    response_of,
)
from pdcluster.api.openai.responses.requests import ResponseTerms
from pdcluster.api.text.choice_text import TextPiece, Token
from pdcluster.api.text.logprobs import ChatTokenLogprob, chat_logprobs
from pdcluster.api.tools.calls import ToolCallDelta
from pdcluster.core.errors import PdclusterError

# Of response ids.
RESPONSE_PREFIX = "resp_"

_encode = msgspec.json.Encoder().encode

# Emits an event: its type and its fields.
Emit = Callable[..., None]


class _OpenMessage:
    def __init__(self, item_id: str) -> None:
        self.item = MessageOutput(item_id)
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self, emit: Emit) -> None:
        emit("response.content_part.added", content_index=0, part=OutputText())

    def add(self, emit: Emit, text: str, logprobs: list[ChatTokenLogprob]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        emit("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def end(self, emit: Emit, status: Status) -> None:
        part = OutputText("".join(self._texts), logprobs=self._logprobs)
        emit("response.output_text.done", content_index=0, text=part.text, logprobs=part.logprobs)
        emit("response.content_part.done", content_index=0, part=part)
        self.item = structs.replace(self.item, content=[part], status=status)


class _OpenReasoning:
    """is_summary: the reasoning comes as a summary."""

    def __init__(self, item_id: str, *, is_summary: bool, is_encrypted: bool) -> None:
        self.item = ReasoningOutput(item_id)
        self._is_summary, self._is_encrypted = is_summary, is_encrypted
        self._texts: list[str] = []

    def begin(self, emit: Emit) -> None:
        if self._is_summary:
            emit("response.reasoning_summary_part.added", summary_index=0, part=SummaryText())
        else:
            emit("response.content_part.added", content_index=0, part=ReasoningText())

    def add(self, emit: Emit, text: str) -> None:
        self._texts.append(text)
        if self._is_summary:
            emit("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            emit("response.reasoning_text.delta", content_index=0, delta=text)

    def end(self, emit: Emit, status: Status) -> None:
        text = "".join(self._texts)
        self.item = structs.replace(
            self.item, status=status, encrypted_content=encrypted(text) if self._is_encrypted else None
        )
        if self._is_summary:
            summary = SummaryText(text)
            emit("response.reasoning_summary_text.done", summary_index=0, text=text)
            emit("response.reasoning_summary_part.done", summary_index=0, part=summary)
            self.item.summary = [summary]
        else:
            content = ReasoningText(text)
            emit("response.reasoning_text.done", content_index=0, text=text)
            emit("response.content_part.done", content_index=0, part=content)
            self.item.content = [content]


class _OpenFunctionCall:
    def __init__(self, item: FunctionCallOutput) -> None:
        self.item = item
        self._arguments: list[str] = []

    def begin(self, emit: Emit) -> None:
        """Nothing follows its announcement."""

    def add(self, emit: Emit, arguments: str) -> None:
        if arguments:
            self._arguments.append(arguments)
            emit("response.function_call_arguments.delta", delta=arguments)

    def end(self, emit: Emit, status: Status) -> None:
        self.item = structs.replace(self.item, arguments="".join(self._arguments), status=status)
        emit("response.function_call_arguments.done", name=self.item.name, arguments=self.item.arguments)


class _OpenCustomCall:
    def __init__(self, item: CustomCallOutput) -> None:
        self.item = item
        self._reader = InputReader()
        self._inputs: list[str] = []

    def begin(self, emit: Emit) -> None:
        """Nothing follows its announcement."""

    def add(self, emit: Emit, arguments: str) -> None:
        self._more(emit, self._reader.feed(arguments))

    def end(self, emit: Emit, status: Status) -> None:
        self._more(emit, self._reader.flush())
        self.item = structs.replace(self.item, input="".join(self._inputs), status=status)
        emit("response.custom_tool_call_input.done", input=self.item.input)

    def _more(self, emit: Emit, text: str) -> None:
        if text:
            self._inputs.append(text)
            emit("response.custom_tool_call_input.delta", delta=text)


OpenItem = _OpenMessage | _OpenReasoning | _OpenFunctionCall | _OpenCustomCall


class OutputItems:
    """Output items from the pieces of one answer.

    emit: takes the events; None where nobody wants them.
    """

    def __init__(self, terms: ResponseTerms, head: Head, emit: Emit | None) -> None:
        self._terms, self._head, self._emit = terms, head, emit
        self.done: list[OutputItem] = []
        self._open: OpenItem | None = None
        # Tokens of the text, which come with its next part.
        self._unscored: list[Token] = []
        self.num_reasoning = 0

    def take(self, piece: TextPiece) -> None:
        self.num_reasoning += piece.num_reasoning
        self._unscored += piece.scored_text
        if piece.reasoning:
            self._reasoning().add(self._emit_within, piece.reasoning)
        for part in piece.parts or ((piece.text,) if piece.text else ()):
            if not isinstance(part, str):
                self._take_call(part)
            elif part:
                self._message().add(self._emit_within, part, self._scored())

    def close(self, status: Status) -> None:
        """The answer is over. status: of the item that is open."""
        if not self.done and self._open is None:
            self._message()
        self._close(status)

    def so_far(self) -> list[OutputItem]:
        """The items of a response that fails."""
        emit, self._emit = self._emit, None
        self._close("incomplete")
        self._emit = emit
        return self.done

    def _reasoning(self) -> _OpenReasoning:
        if isinstance(self._open, _OpenReasoning):
            return self._open
        item = _OpenReasoning(
            self._new_id("rs"), is_summary=self._terms.wants_summary, is_encrypted=self._terms.wants_encrypted
        )
        self._begin(item)
        return item

    def _message(self) -> _OpenMessage:
        if isinstance(self._open, _OpenMessage):
            return self._open
        item = _OpenMessage(self._new_id("msg"))
        self._begin(item)
        return item

    def _take_call(self, delta: ToolCallDelta) -> None:
        if delta.id is not None:
            self._begin(self._new_call(delta.id, delta.name or ""))
        assert isinstance(self._open, _OpenFunctionCall | _OpenCustomCall)  # a call begins with its id
        self._open.add(self._emit_within, delta.arguments)

    def _new_call(self, call_id: str, function: str) -> _OpenFunctionCall | _OpenCustomCall:
        tool = self._terms.toolbox.client_name(function)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return _OpenCustomCall(CustomCallOutput(self._new_id("ctc"), call_id, tool.name, namespace=namespace))
        return _OpenFunctionCall(FunctionCallOutput(self._new_id("fc"), call_id, tool.name, namespace=namespace))

    def _new_id(self, kind: str) -> str:
        index = len(self.done) + (self._open is not None)
        return f"{kind}_{self._head.id.partition('_')[2]}_{index}"

    def _begin(self, item: OpenItem) -> None:
        self._close("completed")
        self._open = item
        if self._emit is not None:
            self._emit("response.output_item.added", output_index=len(self.done), item=item.item)
        item.begin(self._emit_within)

    def _close(self, status: Status) -> None:
        if self._open is None:
            return
        self._open.end(self._emit_within, status)
        if self._emit is not None:
            self._emit("response.output_item.done", output_index=len(self.done), item=self._open.item)
        self.done.append(self._open.item)
        self._open = None

    def _emit_within(self, kind: str, **fields: Any) -> None:
        """Emit an event of the open item."""
        if self._emit is not None and self._open is not None:
            self._emit(kind, item_id=self._open.item.id, output_index=len(self.done), **fields)

    def _scored(self) -> list[ChatTokenLogprob]:
        if not self._unscored:
            return []
        tokens, self._unscored = self._unscored, []
        return chat_logprobs(tokens, self._head.pieces).content


class ResponseEvents:
    """Events that were emitted and not taken yet, each with its number."""

    def __init__(self) -> None:
        self._events = bytearray()
        self._num_events = 0

    def emit(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events += sse.named_event(kind.encode(), _encode(event))

    def begin(self, response: ResponseObject) -> None:
        self.emit("response.created", response=response)
        self.emit("response.in_progress", response=response)

    def fail(self, response: ResponseObject, error: PdclusterError, output: list[OutputItem]) -> None:
        self.emit(
            "response.failed",
            response=structs.replace(response, status="failed", error=ResponseFault.of(error), output=output),
        )

    def take(self) -> bytes:
        events, self._events = bytes(self._events), bytearray()
        return events


class ResponsesFormat:
    """Implements replies.ReplyFormat."""

    # Every piece is looked at, as its tokens may be of the reasoning.
    is_plain = False
    ping = b""

    def __init__(self, terms: ResponseTerms, head: Head) -> None:
        self._terms, self._head = terms, head
        self._response = response_of(terms, head.id, head.model, head.temperature, head.top_p)
        self._stream = ResponseEvents()
        self._items = OutputItems(terms, head, self._stream.emit)
        self._finish: str | None = None

    def opening(self, index: int, cached_tokens: int | None) -> bytes:
        self._stream.begin(self._response)
        return self._stream.take()

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        self._items.take(piece)
        if piece.finish is not None:
            self._finish = piece.finish
            self._items.close(_status_of(piece.finish))
        return self._stream.take()

    def around(self, index: int) -> None:
        """Each event has another number."""
        return None

    def ending(self, usage: TokenUsage | None) -> bytes:
        response = self._ended(self._items, self._finish, usage)
        self._stream.emit(f"response.{response.status}", response=response)
        return self._stream.take()

    def failure(self, error: PdclusterError) -> bytes:
        self._stream.fail(self._response, error, self._items.so_far())
        return self._stream.take()

    def whole(self, pieces: Sequence[TextPiece], usage: TokenUsage) -> bytes:
        items = OutputItems(self._terms, self._head, None)
        items.take(pieces[0])
        items.close(_status_of(pieces[0].finish))
        return _encode(self._ended(items, pieces[0].finish, usage))

    def _ended(self, items: OutputItems, finish: str | None, usage: TokenUsage | None) -> ResponseObject:
        response = structs.replace(
            self._response,
            output=items.done,
            usage=None if usage is None else ResponseUsage.of(usage, items.num_reasoning),
        )
        if finish == "length":
            return structs.replace(response, status="incomplete", incomplete_details=IncompleteReason())
        if finish == "abort":
            return structs.replace(response, status="failed", error=CUT_SHORT)
        return structs.replace(response, status="completed", completed_at=int(time.time()))


def failed_stream(terms: ResponseTerms, reply_id: str, error: PdclusterError) -> bytes:
    """The events of a response that fails before it has a token."""
    stream = ResponseEvents()
    response = response_of(terms, reply_id, terms.model, _or_one(terms.temperature), _or_one(terms.top_p))
    stream.begin(response)
    stream.fail(response, error, [])
    return stream.take()


def _or_one(given: float | None) -> float:
    return 1.0 if given is None else given


def _status_of(finish: str | None) -> Status:
    """Of the item that was open at the end."""
    return "incomplete" if finish in ("length", "abort") else "completed"

"""An answer of Messages, as a stream of events or as a whole.

The order of events, which clients rely on:

1. message_start comes with the first token, because it has the real usage of the prompt.
2. Blocks have the indexes 0, 1, 2 and so on. One is open at a time, and only blocks with something in them are opened.
3. The deltas of thinking end with one signature_delta.
4. message_delta has the reason and the cumulative usage. message_stop is last. An error ends the stream instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from pdcluster.api import sse
from pdcluster.api.anthropic.blocks import SIGNATURE, signature_of
from pdcluster.api.anthropic.replies import (
    ContentBlock,
    MessageReply,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    stop_reason_of,
    usage_of,
)
from pdcluster.api.openai.replies import Head, TokenUsage
from pdcluster.api.text.choice_text import TextPiece
from pdcluster.api.tools.arguments import ArgumentStream, arguments_of
from pdcluster.api.tools.calls import Part, ToolCallDelta

_encode = msgspec.json.Encoder().encode

PING = sse.named_event(b"ping", b'{"type":"ping"}')


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageReply


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class MessagesFormat:
    """Implements openai.replies.ReplyFormat for one choice."""

    is_plain = True
    failure = None
    ping = PING

    def __init__(self, head: Head, *, omits_thinking: bool = False) -> None:
        self._head = head
        self._omits_thinking = omits_thinking
        self._index = -1
        # Kind of the open block; None for none.
        self._open: type[ContentBlock] | None = None
        self._thought: list[str] = []
        self._arguments = ArgumentStream()
        self._finish: str | None = None
        self._stop_string: str | None = None

    def opening(self, index: int, cached_tokens: int | None) -> bytes:
        cached = min(cached_tokens or 0, self._head.num_prompt)
        fresh = self._head.num_prompt - cached
        usage = MessageUsage(input_tokens=fresh, cache_read_input_tokens=cached, output_tokens=0)
        return _event(MessageStart(self._message([], usage))) + PING

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        events: list[bytes] = []
        if piece.reasoning:
            self._think(piece.reasoning, events)
        for part in piece.parts or [piece.text]:
            if isinstance(part, ToolCallDelta):
                self._call(part, events)
            elif part:
                self._enter(TextBlock, TextBlock(""), events)
                events.append(_event(BlockDelta(self._index, TextDelta(part))))
        if piece.finish is not None:
            self._finish, self._stop_string = piece.finish, piece.stop_string
            self._close(events)
        return b"".join(events)

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        return None

    def ending(self, usage: TokenUsage | None) -> bytes:
        assert usage is not None  # asked for with every stream
        delta = StopDelta(*self._stopped(self._finish, self._stop_string))
        return _event(MessageDelta(delta, usage_of(usage))) + _event(MessageStop())

    def whole(self, pieces: Sequence[TextPiece], usage: TokenUsage) -> bytes:
        piece = pieces[0]
        message = self._message(self._blocks(piece), usage_of(usage))
        message.stop_reason, message.stop_sequence = self._stopped(piece.finish, piece.stop_string)
        return _encode(message)

    # ------------------------------------------------ inside

    def _message(self, content: Sequence[ContentBlock], usage: MessageUsage) -> MessageReply:
        return MessageReply(id=self._head.id, model=self._head.model, content=content, usage=usage)

    def _stopped(self, finish: str | None, stop_string: str | None) -> tuple[StopReason, str | None]:
        """Why it ended, and the stop sequence where that is why."""
        reason = stop_reason_of(finish, by_string=stop_string is not None, is_cut=self._head.is_cut)
        return reason, stop_string if reason == "stop_sequence" else None

    def _think(self, text: str, events: list[bytes]) -> None:
        self._enter(ThinkingBlock, ThinkingBlock("", ""), events)
        if self._omits_thinking:
            self._thought.append(text)
        else:
            events.append(_event(BlockDelta(self._index, ThinkingDelta(text))))

    def _call(self, part: ToolCallDelta, events: list[bytes]) -> None:
        if part.id is not None:
            self._close(events)
            self._arguments = ArgumentStream()
            self._enter(ToolUseBlock, ToolUseBlock(part.id, part.name or "", {}), events)
        arguments = self._arguments.feed(part.arguments)
        if arguments:
            events.append(_event(BlockDelta(self._index, InputDelta(arguments))))

    def _enter(self, kind: type[ContentBlock], block: ContentBlock, events: list[bytes]) -> None:
        """Open a block, unless one of that kind is."""
        if self._open is kind:
            return
        self._close(events)
        self._index += 1
        self._open = kind
        events.append(_event(BlockStart(self._index, block)))

    def _close(self, events: list[bytes]) -> None:
        if self._open is None:
            return
        if self._open is ThinkingBlock:
            signature = SignatureDelta(self._signature("".join(self._thought)))
            events.append(_event(BlockDelta(self._index, signature)))
        events.append(_event(BlockStop(self._index)))
        self._open = None

    def _signature(self, thought: str) -> str:
        return signature_of(thought) if self._omits_thinking else SIGNATURE

    def _blocks(self, piece: TextPiece) -> list[ContentBlock]:
        blocks: list[ContentBlock] = []
        if piece.reasoning:
            shown = "" if self._omits_thinking else piece.reasoning
            blocks.append(ThinkingBlock(shown, self._signature(piece.reasoning)))
        for run in _runs(piece.parts or [piece.text]):
            if isinstance(run, str):
                blocks.append(TextBlock(run))
            else:
                first, arguments = run
                blocks.append(ToolUseBlock(first.id or "", first.name or "", _input(arguments)))
        return blocks


def _runs(parts: Sequence[Part]) -> list[str | tuple[ToolCallDelta, str]]:
    """Texts, and calls with all their arguments, in order."""
    runs: list[str | tuple[ToolCallDelta, str]] = []
    for part in parts:
        last = runs[-1] if runs else None
        if isinstance(part, str):
            if part and isinstance(last, str):
                runs[-1] = last + part
            elif part:
                runs.append(part)
        elif part.id is not None or last is None or isinstance(last, str):
            runs.append((part, part.arguments))
        else:
            runs[-1] = last[0], last[1] + part.arguments
    return runs


def _input(arguments: str) -> Mapping[str, Any]:
    """The arguments as far as they are an object."""
    found = arguments_of(arguments, "arguments")
    return found if isinstance(found, Mapping) else {}


def _event(event: MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop) -> bytes:
    return sse.named_event(str(event.__struct_config__.tag).encode(), _encode(event))

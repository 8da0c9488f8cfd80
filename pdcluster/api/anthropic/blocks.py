"""Turns of a conversation in Anthropic's blocks, as messages for a chat template.

1. Consecutive turns of one role are one message, which is what Anthropic makes of them.
2. The results of tools are messages of their own.
3. A line at the start of a system text that only bills is dropped. It changes with each request, and no prompt would
   share its prefix with the one before.
4. What a template cannot show is refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from pdcluster.api.openai.requests import ChatMessage, ContentPart, FunctionCall, HistoryToolCall
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

BILLING = "x-anthropic-billing-header"

# A signature signs nothing here. Behind the colon stands thinking whose text was left out of an answer, as base64.
SIGNATURE = "pdcluster:"

Content = str | list["InputBlock"] | None


class InputBlock(Struct):
    """The fields of all kinds of blocks. Others are hints, and ignored."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None


class MessageTurn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


def messages_of(
    system: str | list[InputBlock] | None, turns: Sequence[MessageTurn], definitions: Mapping[str, str]
) -> list[ChatMessage]:
    """definitions: of tools, by name, for results that load one. Raises BadRequest for blocks that nobody can show a
    model.
    """
    made = _Messages(definitions)
    for at, text in enumerate(_texts(system, "system")):
        made.say("system", text if at else _without_billing(text))
    for number, turn in enumerate(turns):
        path = f"messages[{number}].content"
        if turn.role == "assistant":
            made.assistant(turn.content, path)
        elif turn.role == "system":
            made.say("system", *_texts(turn.content, path))
        else:
            made.user(turn.content, path)
    made.close()
    last = made.messages[-1] if made.messages else None
    if last is not None and last.role == "assistant" and not last.content and not last.tool_calls:
        made.messages.pop()  # nothing to go on with
    return made.messages


def loaded_in(turns: Sequence[MessageTurn]) -> set[str]:
    """Names of tools that results have loaded."""
    blocks = [block for turn in turns if not isinstance(turn.content, str) for block in turn.content]
    return {
        part.tool_name
        for block in blocks
        if block.type == "tool_result" and isinstance(block.content, list)
        for part in block.content
        if part.type == "tool_reference" and part.tool_name is not None
    }


def continues_last(messages: Sequence[ChatMessage]) -> bool:
    """Whether the answer goes on with the last message. Raises BadRequest for a call without its result."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        return False
    if last.tool_calls:
        raise BadRequest("messages ends with a tool_use; send its tool_result behind it", "messages")
    return True


def signature_of(thinking: str) -> str:
    """Of thinking whose text is left out."""
    return SIGNATURE + base64.b64encode(thinking.encode()).decode()


class _Messages:
    def __init__(self, definitions: Mapping[str, str]) -> None:
        self.messages: list[ChatMessage] = []
        self._definitions = definitions
        # Of the last message.
        self._thoughts: list[str] = []

    def close(self) -> None:
        """Nothing more is said in the last message."""
        if self._thoughts:
            self.messages[-1].reasoning_content = "\n".join(self._thoughts)
            self._thoughts = []

    def say(self, role: Literal["system", "user"], *texts: str) -> None:
        """Text of this role, joined to a last message of the same."""
        parts = [ContentPart("text", text) for text in texts if text]
        if not parts and role == "system":
            return
        message = self._last(role)
        assert isinstance(message.content, list)
        message.content += parts

    def user(self, content: str | list[InputBlock], path: str) -> None:
        if isinstance(content, str):
            self.say("user", content)
            return
        for at, block in enumerate(content):
            where = f"{path}[{at}]"
            if block.type == "tool_result":
                self._result(block, where)
            elif block.type == "mid_conv_system":
                self.say("system", *_texts(block.content, f"{where}.content"))
            else:
                self.say("user", _text(block, where, "text, tool_result"))

    def assistant(self, content: str | list[InputBlock], path: str) -> None:
        message = self._last("assistant")
        assert isinstance(message.content, list)
        blocks = [InputBlock("text", content)] if isinstance(content, str) else content
        for at, block in enumerate(blocks):
            where = f"{path}[{at}]"
            if block.type == "thinking":
                thought = block.thinking or _thought_in(block.signature)
                self._thoughts += [thought] if thought else []
            elif block.type == "tool_use":
                message.tool_calls = [] if message.tool_calls is None else message.tool_calls
                message.tool_calls.append(_call(block, where))
            elif block.type != "redacted_thinking":
                text = _text(block, where, "text, thinking, redacted_thinking, tool_use")
                message.content += [ContentPart("text", text)] if text else []

    def _result(self, block: InputBlock, path: str) -> None:
        if block.tool_use_id is None:
            raise BadRequest(f"{path}.tool_use_id is missing; a tool_result needs it", f"{path}.tool_use_id")
        text = "\n".join(_texts(block.content, f"{path}.content", self._definitions))
        if block.is_error:
            text = f"Error: {text}" if text else "Error"
        self.close()
        self.messages.append(ChatMessage("tool", text, tool_call_id=block.tool_use_id))

    def _last(self, role: Literal["system", "user", "assistant"]) -> ChatMessage:
        if not self.messages or self.messages[-1].role != role:
            self.close()
            self.messages.append(ChatMessage(role, []))
        return self.messages[-1]


def _call(block: InputBlock, path: str) -> HistoryToolCall:
    for name in ("id", "name"):
        if getattr(block, name) is None:
            raise BadRequest(f"{path}.{name} is missing; a tool_use needs it", f"{path}.{name}")
    assert block.name is not None  # checked above
    return HistoryToolCall(FunctionCall(block.name, block.input or {}), block.id)


def _texts(content: Content, path: str, definitions: Mapping[str, str] | None = None) -> list[str]:
    """definitions: of tools that it may load; None where it may load none."""
    if content is None or isinstance(content, str):
        return [content or ""]
    texts = []
    for at, block in enumerate(content):
        where = f"{path}[{at}]"
        if block.type != "tool_reference" or definitions is None:
            texts.append(_text(block, where, "text"))
        elif (definition := definitions.get(block.tool_name or "")) is not None:
            texts.append(definition)
        else:
            raise BadRequest(
                f"{where}.tool_name is {shown(block.tool_name)}, which is not among the tools", f"{where}.tool_name"
            )
    return texts


def _text(block: InputBlock, path: str, taken: str) -> str:
    if block.type != "text":
        raise BadRequest(f"{path}.type is {shown(block.type)}; only {taken} is taken here", f"{path}.type")
    if block.text is None:
        raise BadRequest(f"{path}.text is missing; a text block needs it", f"{path}.text")
    return block.text


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _thought_in(signature: str | None) -> str:
    """Thinking that an answer carried in its signature; "" for none, also in the signatures of others."""
    if signature is None or not signature.startswith(SIGNATURE):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(SIGNATURE), validate=True).decode()
    except ValueError:  # no base64, or no text
        return ""

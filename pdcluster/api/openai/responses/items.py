"""Input items of a Responses request as the messages of a chat.

1. A turn of the assistant is one message: its reasoning, its text and its calls.
2. Messages of the system and the developer before all others are one message.
3. Items of tools that a server would run are left out. Unknown items are refused by name.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from pdcluster.api.openai.requests import ChatMessage, ContentPart, FunctionCall, HistoryToolCall
from pdcluster.api.openai.responses.tools import INPUT, Toolbox
from pdcluster.api.validate import convert, shown
from pdcluster.core.errors import BadRequest

# Begins reasoning of ours that a client gives back. What follows is its text in base64, which hides nothing.
OWN_REASONING = "pdcluster."
TEXT_PARTS = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text"))
LEADING_ROLES = ("system", "developer")
BETWEEN_MESSAGES = "\n\n"

# Refused items → what to send instead.
REFUSED: Mapping[str, str] = {
    "item_reference": "routers keep no items; send the item itself",
    "compaction": "only its server can read it; send the messages that it stands for, or a summary as a message",
    "compaction_trigger": "conversations are not compacted here; ask for a summary in a message",
}
# Items without a text for the model. Others of hosted tools end in _call and _call_output.
LEFT_OUT = frozenset((
    "tool_search_output", "additional_tools", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "program", "program_output",
))  # fmt: skip
# Items that bring tools of their own.
WITH_TOOLS = ("additional_tools", "tool_search_output")


class ItemPart(Struct):
    """Items and their parts accept unknown fields, as clients give back what other servers sent."""

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ItemPart] | None = None


class CallItem(Struct):
    name: str
    call_id: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None


class CustomCallItem(Struct):
    name: str
    call_id: str | None = None
    namespace: str | None = None
    input: str | None = None


class CallOutputItem(Struct):
    call_id: str | None = None
    output: str | list[ItemPart] | None = None


class ReasoningItem(Struct):
    content: list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None


class ConfigurationItem(Struct):
    text: dict[str, Any] | None = None


def tools_within(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools that items bring with them."""
    if isinstance(items, str):
        return []
    return [tool for item in items if item.get("type") in WITH_TOOLS for tool in _tools_of(item)]


def _tools_of(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = item.get("tools")
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def messages_from(
    items: str | Sequence[Mapping[str, Any]], instructions: str | None, toolbox: Toolbox
) -> list[ChatMessage]:
    """Raises BadRequest naming the item."""
    conversation = _Conversation(toolbox)
    if instructions:
        conversation.add(ChatMessage("system", instructions))
    if isinstance(items, str):
        conversation.add(ChatMessage("user", items))
    else:
        for index, item in enumerate(items):
            conversation.take(item, f"input[{index}]")
    messages = conversation.finish()
    if not messages:
        raise BadRequest("input has no messages; send a text or a list with at least one message", "input")
    return messages


class _Conversation:
    def __init__(self, toolbox: Toolbox) -> None:
        self._messages: list[ChatMessage] = []
        self._toolbox = toolbox
        # The assistant's, while it goes on, and its reasoning.
        self._turn: ChatMessage | None = None
        self._thoughts: list[str] = []
        # Messages before all others.
        self._leading: list[ChatMessage] = []
        self._takers: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._message,
            "function_call": self._call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "reasoning": self._reasoning,
            "configuration_update": self._configuration,
            **dict.fromkeys(WITH_TOOLS, self._loaded),
        }

    def add(self, message: ChatMessage) -> None:
        if not self._messages and message.role in LEADING_ROLES:
            self._leading.append(message)
        else:
            self._end_turn()
            self._append(message)

    def finish(self) -> list[ChatMessage]:
        """The messages. Nothing is added any more."""
        self._end_turn()
        self._end_leading()
        return self._messages

    def take(self, item: Mapping[str, Any], at: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind is None and "id" in item:
            kind = "item_reference"
        taker = self._takers.get(kind) if isinstance(kind, str) else None
        if taker is not None:
            taker(item, at)
        elif not _is_left_out(kind):
            way_out = REFUSED.get(kind) if isinstance(kind, str) else None
            way_out = way_out or f"known are {', '.join(self._takers)}"
            raise BadRequest(f"{at}.type is {shown(kind)}, which is not taken here: {way_out}", f"{at}.type")

    def _message(self, item: Mapping[str, Any], at: str) -> None:
        given = convert(item, MessageItem, {"": MessageItem}, at)
        content = _content(given.content, f"{at}.content")
        if given.role != "assistant":
            self.add(ChatMessage(given.role, content))
            return
        turn = self._of_assistant()
        if turn.content is None:
            turn.content = content
        elif turn.tool_calls:
            turn.content = _parts(turn.content)
            turn.content += _parts(content)
        else:
            self._end_turn()
            self._of_assistant().content = content

    def _of_assistant(self) -> ChatMessage:
        """The assistant's turn."""
        if self._turn is None:
            self._turn = ChatMessage("assistant")
            self._append(self._turn)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None and self._thoughts:
            self._turn.reasoning_content = "\n".join(self._thoughts)
        self._turn, self._thoughts = None, []

    def _append(self, message: ChatMessage) -> None:
        self._end_leading()
        self._messages.append(message)

    def _end_leading(self) -> None:
        if len(self._leading) > 1:
            texts = [_joined(message.content) for message in self._leading]
            self._messages.append(ChatMessage(self._leading[0].role, BETWEEN_MESSAGES.join(texts)))
        else:
            self._messages += self._leading
        self._leading = []

    def _call(self, item: Mapping[str, Any], at: str) -> None:
        given = convert(item, CallItem, {"": CallItem}, at)
        self._add_call(given, given.arguments)

    def _custom_call(self, item: Mapping[str, Any], at: str) -> None:
        given = convert(item, CustomCallItem, {"": CustomCallItem}, at)
        self._add_call(given, {INPUT: given.input or ""})

    def _add_call(self, item: CallItem | CustomCallItem, arguments: str | dict[str, Any] | None) -> None:
        turn = self._of_assistant()
        function = self._toolbox.function_name(item.name, item.namespace)
        call = HistoryToolCall(FunctionCall(function, arguments), item.call_id)
        if turn.tool_calls is None:
            turn.tool_calls = []
        turn.tool_calls.append(call)

    def _output(self, item: Mapping[str, Any], at: str) -> None:
        given = convert(item, CallOutputItem, {"": CallOutputItem}, at)
        self.add(ChatMessage("tool", _content(given.output, f"{at}.output"), tool_call_id=given.call_id))

    def _reasoning(self, item: Mapping[str, Any], at: str) -> None:
        given = convert(item, ReasoningItem, {"": ReasoningItem}, at)
        text = _joined(_content(given.content, f"{at}.content"))
        text = text or own_reasoning(given.encrypted_content, f"{at}.encrypted_content")
        text = text or _joined(_content(given.summary, f"{at}.summary"))
        if not text:
            return
        if self._turn is not None and self._turn.content is not None and not self._turn.tool_calls:
            self._end_turn()
        self._of_assistant()
        self._thoughts.append(text)

    def _loaded(self, item: Mapping[str, Any], at: str) -> None:
        """Tools that come later are shown where they come, so that the prompt before them stays as it was."""
        if text := self._toolbox.loaded_text(_tools_of(item)):
            self.add(ChatMessage("developer", text))

    def _configuration(self, item: Mapping[str, Any], at: str) -> None:
        """An effort is a hint. A form of answers is the request's."""
        if convert(item, ConfigurationItem, {"": ConfigurationItem}, at).text:
            raise BadRequest(f"{at}.text is not taken here; send text of the request", f"{at}.text")


def _is_left_out(kind: object) -> bool:
    return isinstance(kind, str) and (kind in LEFT_OUT or kind.endswith(("_call", "_call_output")))


def _content(given: str | list[ItemPart] | None, at: str) -> str | list[ContentPart]:
    if not isinstance(given, list):
        return given or ""
    parts = [_text_part(part, f"{at}[{index}]") for index, part in enumerate(given)]
    return parts if parts else ""


def _text_part(part: ItemPart, at: str) -> ContentPart:
    if part.type == "refusal":
        return ContentPart("refusal", refusal=part.refusal)
    if part.type not in TEXT_PARTS:
        raise BadRequest(
            f"{at}.type is {shown(part.type)}; only texts are taken, no images, audio or files", f"{at}.type"
        )
    if part.text is None:
        raise BadRequest(f"{at}.text is missing; a text part needs it", f"{at}.text")
    return ContentPart("text", part.text)


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    return content if isinstance(content, list) else [ContentPart("text", content or "")]


def _joined(content: str | list[ContentPart] | None) -> str:
    """As a chat joins parts."""
    return "\n".join([part.text or part.refusal or "" for part in _parts(content)])


# ---------------------------------------------------------------- reasoning that a client keeps


def encrypted(reasoning: str) -> str:
    """What stands for the reasoning in `encrypted_content`: its text in base64."""
    return OWN_REASONING + base64.b64encode(reasoning.encode()).decode()


def own_reasoning(given: str | None, at: str) -> str:
    """The text of reasoning that came from here; "" for that of other servers, which nobody here can read."""
    if given is None or not given.startswith(OWN_REASONING):
        return ""
    try:
        return base64.b64decode(given.removeprefix(OWN_REASONING), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{at} was changed; send it as it came, or leave the item out", at) from error

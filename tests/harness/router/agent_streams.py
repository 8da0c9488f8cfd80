"""What official clients hold streams of Messages and of Responses to, as checks that build the answer from its events.

The clients append at each start and index at each delta. So a gap, a second open block or an event of a part that was
not announced ends them, or is lost. Each rule stands in an assertion that shows the event.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

Json = dict[str, Any]

STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
BLOCK_OF_DELTA = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "thinking",
    "input_json_delta": "tool_use",
}
FIELD_OF_DELTA = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
REQUIRED_OF_A_RESPONSE = (
    "id", "object", "created_at", "model", "output", "parallel_tool_calls", "tool_choice", "tools", "status", "error",
    "incomplete_details", "instructions", "metadata", "temperature", "top_p", "usage", "text", "reasoning",
)  # fmt: skip


def events_of(body: str) -> list[Json]:
    """The events of a stream but pings and comments. Each has its type as its name, too."""
    found: list[Json] = []
    assert body.endswith("\n\n"), body[-100:]
    for block in body.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        assert len(lines) == 2 and lines[0].startswith("event: ") and lines[1].startswith("data: "), block
        event = json.loads(lines[1].removeprefix("data: "))
        assert event["type"] == lines[0].removeprefix("event: "), block
        if event["type"] != "ping":
            found.append(event)
    return found


# ---------------------------------------------------------------- Messages


class MessageStream:
    """A message as its events build it. `error` is what ended it early."""

    def __init__(self, body: str) -> None:
        self.message: Json = {}
        self.error: Json | None = None
        self._open: Json | None = None
        self._arguments = ""
        self._is_over = False
        for event in events_of(body):
            assert not self._is_over, f"after the end: {event}"
            getattr(self, "_" + event["type"])(event)
        assert self._is_over, "neither message_stop nor error"

    def _message_start(self, event: Json) -> None:
        message = event["message"]
        check_message(message)
        assert not self.message and message["content"] == [] and message["stop_reason"] is None, event
        assert message["stop_sequence"] is None and num_prompt_tokens(message["usage"]) > 0, event
        self.message = message

    def _content_block_start(self, event: Json) -> None:
        content, block = self.message["content"], event["content_block"]
        assert self._open is None and event["index"] == len(content), event
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
        assert block.items() >= empty[block["type"]].items(), event
        self._open, self._arguments = dict(block), ""
        content.append(self._open)

    def _content_block_delta(self, event: Json) -> None:
        delta, block = event["delta"], self._block(event)
        assert block["type"] == BLOCK_OF_DELTA[delta["type"]] and not block.get("signature"), event
        if delta["type"] == "signature_delta":
            block["signature"] = delta["signature"]
            return
        added = delta[FIELD_OF_DELTA[delta["type"]]]
        assert isinstance(added, str), event
        if block["type"] == "tool_use":
            self._arguments += added
            from_json(self._arguments or "{}", allow_partial=True)  # as the client does with each delta
        else:
            block[block["type"]] += added

    def _content_block_stop(self, event: Json) -> None:
        block = self._block(event)
        if block["type"] == "tool_use":
            block["input"] = from_json(self._arguments or "{}", allow_partial=True)
        check_block(block)
        self._open = None

    def _block(self, event: Json) -> Json:
        assert self._open is not None and event["index"] == len(self.message["content"]) - 1, event
        return self._open

    def _message_delta(self, event: Json) -> None:
        message, usage = self.message, event["usage"]
        assert self._open is None and message["stop_reason"] is None and event["delta"]["stop_reason"], event
        said = {name: count for name, count in usage.items() if count is not None}
        assert said["output_tokens"] >= message["usage"]["output_tokens"], event
        before = message["usage"]
        assert num_prompt_tokens(before | said) == num_prompt_tokens(before), "the prompt changed its length"
        message["usage"] = before | said
        message |= {name: event["delta"].get(name) for name in ("stop_reason", "stop_sequence")}

    def _message_stop(self, event: Json) -> None:
        check_message(self.message)
        check_end(self.message)
        self._is_over = True

    def _error(self, event: Json) -> None:
        check_message_error(event)
        self.error, self._is_over = event, True


def num_prompt_tokens(usage: Json) -> int:
    """Whole: input_tokens are without what a cache had."""
    named = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in named)


def check_message(message: Json) -> None:
    assert (message["type"], message["role"]) == ("message", "assistant") and message["id"].startswith("msg_"), message
    assert isinstance(message["model"], str) and {"stop_reason", "stop_sequence"} <= message.keys(), message
    usage = message["usage"]
    assert usage["input_tokens"] >= 0 and usage["output_tokens"] >= 0, usage


def check_block(block: Json) -> None:
    """Of an answer, whole. A block that says nothing is not sent."""
    kind = block["type"]
    if kind == "text":
        assert block["text"], block
    elif kind == "thinking":
        assert block["signature"] and isinstance(block["thinking"], str), block
    else:
        assert kind == "tool_use" and block["id"] and block["name"] and isinstance(block["input"], dict), block


def check_end(message: Json) -> None:
    """A message that ended: its blocks, and why."""
    for block in message["content"]:
        check_block(block)
    reason, kinds = message["stop_reason"], [block["type"] for block in message["content"]]
    assert reason in STOP_REASONS and (message["stop_sequence"] is not None) == (reason == "stop_sequence"), message
    assert reason != "tool_use" or "tool_use" in kinds, message
    assert "tool_use" not in kinds or reason not in ("end_turn",), message
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids), ids


def check_message_error(body: Json) -> None:
    error = body["error"]
    assert body["type"] == "error" and set(error) == {"type", "message"} and body["request_id"], body
    assert error["type"] in ERROR_TYPES.values() and len(error["message"]) > 10, body


# ---------------------------------------------------------------- Responses


class ResponseStream:
    """A response as its events build it."""

    def __init__(self, body: str) -> None:
        self.response: Json = {}
        self.items: list[Json] = []
        self._item: Json | None = None
        self._parts: list[Json] = []
        self._part: Json | None = None
        self._said = ""
        # Whether the event came that repeats what was said whole.
        self._is_told = False
        self._id = ""
        self._is_over = False
        for number, event in enumerate(events_of(body)):
            assert event["sequence_number"] == number and not self._is_over, event
            if number < 2:
                assert event["type"] == ("response.created", "response.in_progress")[number], event
            getattr(self, "_" + event["type"].removeprefix("response.").replace(".", "_"))(event)
        assert self._is_over, "no last event"

    def _created(self, event: Json) -> None:
        check_response(event["response"], "in_progress")
        assert event["response"]["output"] == [] and event["response"]["usage"] is None, event
        self._id = self._id or event["response"]["id"]
        assert event["response"]["id"] == self._id, event

    _in_progress = _created

    def _output_item_added(self, event: Json) -> None:
        assert self._item is None and event["output_index"] == len(self.items), event
        item = event["item"]
        empty = {
            "message": "content",
            "reasoning": "summary",
            "function_call": "arguments",
            "custom_tool_call": "input",
        }
        assert not item[empty[item["type"]]] and item["id"], event
        assert item.get("status", "in_progress") == "in_progress", event
        self._item, self._parts, self._said, self._is_told = item, [], "", False

    def _content_part_added(self, event: Json) -> None:
        item = self._of_item(event)
        assert self._part is None and event["content_index"] == len(self._parts), event
        part = event["part"]
        kinds = {"message": ("output_text", "refusal"), "reasoning": ("reasoning_text",)}
        assert part["type"] in kinds[item["type"]] and part["text"] == "", event
        self._part, self._said, self._is_told = part, "", False

    def _content_part_done(self, event: Json) -> None:
        self._of_part(event)
        part = event["part"]
        assert part["type"] == (self._part or {})["type"] and part["text"] == self._said and self._is_told, event
        self._parts.append(part)
        self._part = None

    def _output_text_delta(self, event: Json) -> None:
        self._of_part(event)
        assert isinstance(event["logprobs"], list), event
        self._said += event["delta"]

    def _output_text_done(self, event: Json) -> None:
        self._of_part(event)
        assert event["text"] == self._said and isinstance(event["logprobs"], list), event
        self._is_told = True

    def _reasoning_text_delta(self, event: Json) -> None:
        self._of_part(event)
        self._said += event["delta"]

    def _reasoning_text_done(self, event: Json) -> None:
        self._of_part(event)
        assert event["text"] == self._said, event
        self._is_told = True

    def _reasoning_summary_part_added(self, event: Json) -> None:
        assert self._of_item(event)["type"] == "reasoning" and event["part"] == {"type": "summary_text", "text": ""}
        self._part, self._said, self._is_told = event["part"], "", False

    def _reasoning_summary_text_delta(self, event: Json) -> None:
        assert self._of_item(event) and self._part is not None and event["summary_index"] == 0, event
        self._said += event["delta"]

    def _reasoning_summary_text_done(self, event: Json) -> None:
        assert self._of_item(event) and event["text"] == self._said and event["summary_index"] == 0, event
        self._is_told = True

    def _reasoning_summary_part_done(self, event: Json) -> None:
        assert self._of_item(event) and event["part"] == {"type": "summary_text", "text": self._said}, event
        assert self._is_told, event
        self._part = None

    def _function_call_arguments_delta(self, event: Json) -> None:
        assert self._of_item(event)["type"] == "function_call", event
        self._said += event["delta"]

    def _function_call_arguments_done(self, event: Json) -> None:
        item = self._of_item(event)
        assert event["arguments"] == self._said and event["name"] == item["name"], event
        self._is_told = True

    def _custom_tool_call_input_delta(self, event: Json) -> None:
        assert self._of_item(event)["type"] == "custom_tool_call", event
        self._said += event["delta"]

    def _custom_tool_call_input_done(self, event: Json) -> None:
        assert self._of_item(event) and event["input"] == self._said, event
        self._is_told = True

    def _output_item_done(self, event: Json) -> None:
        began, item = self._item or {}, event["item"]
        assert event["output_index"] == len(self.items) and self._part is None, event
        same = ("id", "type", "call_id", "name", "namespace", "role")
        assert {name: began.get(name) for name in same} == {name: item.get(name) for name in same}, event
        check_item(item)
        if item["type"] == "message":
            assert item["content"] == self._parts, event
        elif item["type"] == "reasoning":
            said = [part["text"] for part in self._parts] or ([self._said] if self._said else [])
            assert [part["text"] for part in item["content"] or item["summary"]] == said, event
        else:
            said = item["arguments" if item["type"] == "function_call" else "input"]
            assert said == self._said and self._is_told, event
        self.items.append(item)
        self._item = None

    def _of_item(self, event: Json) -> Json:
        assert self._item is not None and event["item_id"] == self._item["id"], event
        assert event["output_index"] == len(self.items), event
        return self._item

    def _of_part(self, event: Json) -> None:
        self._of_item(event)
        assert self._part is not None and event["content_index"] == len(self._parts), event

    def _completed(self, event: Json) -> None:
        response, status = event["response"], event["type"].removeprefix("response.")
        check_response(response, status)
        assert response["id"] == self._id and self._item is None and response["output"] == self.items, event
        self.response, self._is_over = response, True

    _incomplete = _completed

    def _failed(self, event: Json) -> None:
        check_response(event["response"], "failed")
        assert event["response"]["id"] == self._id, event
        self.response, self._is_over = event["response"], True

    def _error(self, event: Json) -> None:
        """It may come before the last event. Without `error` inside, so that clients read it as an event."""
        assert event["message"] and "error" not in event and {"code", "param"} <= event.keys(), event


def check_response(response: Json, status: str) -> None:
    missing = [name for name in REQUIRED_OF_A_RESPONSE if name not in response]
    assert not missing and response["object"] == "response" and response["id"].startswith("resp_"), missing
    assert response["status"] == status and isinstance(response["parallel_tool_calls"], bool), response
    assert (response["error"] is not None) == (status == "failed"), response
    assert (response["incomplete_details"] is not None) == (status == "incomplete"), response
    if status in ("completed", "incomplete"):
        assert response["usage"] is not None, response
        check_usage(response["usage"])
        ids = [item["id"] for item in response["output"]]
        assert len(set(ids)) == len(ids), ids
        for item in response["output"]:
            check_item(item)
        if status == "completed":
            assert {item.get("status", "completed") for item in response["output"]} <= {"completed"}, response["output"]
    if status == "failed":
        assert response["error"]["code"] and response["error"]["message"], response


def check_usage(usage: Json) -> None:
    cached, reasoning = usage["input_tokens_details"], usage["output_tokens_details"]
    assert 0 <= cached["cached_tokens"] <= usage["input_tokens"] and cached["cache_write_tokens"] >= 0, usage
    assert 0 <= reasoning["reasoning_tokens"] <= usage["output_tokens"], usage
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage


def check_item(item: Json) -> None:
    assert item["id"] and item.get("status", "completed") in ("completed", "incomplete"), item
    if item["type"] == "message":
        assert item["role"] == "assistant" and item["content"], item
        assert all({"text", "annotations"} <= part.keys() for part in item["content"]), item
    elif item["type"] == "reasoning":
        assert isinstance(item["summary"], list), item
    else:
        assert item["call_id"] and item["name"] and item["call_id"] != item["id"], item
        assert isinstance(item["arguments" if item["type"] == "function_call" else "input"], str), item

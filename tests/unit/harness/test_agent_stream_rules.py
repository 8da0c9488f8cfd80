"""The checks of streams for agents fail where official clients would: each rule is broken once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from agent_streams import Json, MessageStream, ResponseStream

MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "tiny", "content": [], "stop_reason": None,
    "stop_sequence": None, "usage": {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 1},
}  # fmt: skip
MESSAGES: list[Json] = [
    {"type": "message_start", "message": MESSAGE},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "ping"},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "So"}},
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "t1", "name": "a", "input": {}},
    },
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
    {"type": "content_block_stop", "index": 2},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 9, "input_tokens": 4},
    },
    {"type": "message_stop"},
]


def text_of(events: list[Json]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def test_a_stream_of_a_message_adds_up() -> None:
    message = MessageStream(text_of(MESSAGES)).message
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "So"},
        {"type": "tool_use", "id": "t1", "name": "a", "input": {"a": 1}},
    ]
    assert message["usage"] == {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 9}
    error = {"type": "error", "error": {"type": "api_error", "message": "it went wrong"}, "request_id": "req_1"}
    assert MessageStream(text_of([*MESSAGES[:3], error])).error == error


def put(path: str, value: Any) -> Callable[[list[Json]], None]:
    """Set what stands at `3.delta.text`."""

    def change(events: list[Json]) -> None:
        first, *names = path.split(".")
        found: Any = events[int(first)]
        for name in names[:-1]:
            found = found[name]
        found[names[-1]] = value

    return change


def drop(*numbers: int) -> Callable[[list[Json]], None]:
    def change(events: list[Json]) -> None:
        for number in sorted(numbers, reverse=True):
            del events[number]

    return change


def move(number: int, to: int) -> Callable[[list[Json]], None]:
    def change(events: list[Json]) -> None:
        events.insert(to, events.pop(number))

    return change


def repeat(number: int) -> Callable[[list[Json]], None]:
    def change(events: list[Json]) -> None:
        events.insert(number, copy.deepcopy(events[number]))

    return change


BROKEN_MESSAGES = [
    drop(0), drop(4), drop(6), drop(8), drop(12), drop(13), drop(14), drop(3), drop(7), repeat(0), repeat(1), repeat(3), repeat(4),
    repeat(13), repeat(14), move(8, 9), move(7, 9), move(3, 2), move(13, 12), put("1.index", 1), put("6.index", 2), put("7.index", 0),
    put("12.index", 1), put("7.delta.type", "thinking_delta"), put("11.delta.partial_json", "x}"), put("0.message.id", "x"),
    put("10.delta.partial_json", "[{"), put("0.message.usage", {"input_tokens": 0, "output_tokens": 1}), put("13.usage", {"output_tokens": 9, "input_tokens": 0}),
    put("13.usage.output_tokens", 0), put("13.delta.stop_reason", "end_turn"), put("13.delta.stop_reason", None),
    put("13.delta.stop_reason", "stop_sequence"), put("13.delta.stop_sequence", "END"), put("9.content_block.id", ""),
    put("1.content_block.thinking", "early"), put("9.content_block.input", {"a": 1}), put("0.message.content", [{"type": "text"}]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN_MESSAGES)))
def test_a_broken_stream_of_a_message_is_found(number: int) -> None:
    events = copy.deepcopy(MESSAGES)
    BROKEN_MESSAGES[number](events)
    with pytest.raises((AssertionError, AttributeError, KeyError, ValueError)):
        MessageStream(text_of(events))


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text + "data: [DONE]\n\n",
        lambda text: text.replace("event: message_stop\n", ""),
        lambda text: text.replace("event: content_block_stop", "event: content_block_start"),
        lambda text: text[:-1],
    ],
)
def test_lines_that_clients_do_not_read_are_found(broken: Callable[[str], str]) -> None:
    with pytest.raises(AssertionError):
        MessageStream(broken(text_of(MESSAGES)))


def response(status: str, output: list[Json], usage: Json | None) -> Json:
    nulls = ("error", "incomplete_details", "instructions", "temperature", "top_p", "reasoning", "text")
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "tiny", "output": output, "status": status,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "usage": usage,
    } | dict.fromkeys(nulls)  # fmt: skip


USAGE = {
    "input_tokens": 4, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0}, "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 9,
}  # fmt: skip
PART = {"type": "output_text", "text": "So", "annotations": [], "logprobs": []}
SAID = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [PART]}
CALLED = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "a",
    "arguments": "{}",
    "status": "completed",
}
IN_MESSAGE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
IN_CALL = {"item_id": "fc_1", "output_index": 1}
RESPONSES: list[Json] = [
    {"type": "response.created", "response": response("in_progress", [], None)},
    {"type": "response.in_progress", "response": response("in_progress", [], None)},
    {"type": "response.output_item.added", "output_index": 0, "item": SAID | {"content": [], "status": "in_progress"}},
    {"type": "response.content_part.added", **IN_MESSAGE, "part": PART | {"text": ""}},
    {"type": "response.output_text.delta", **IN_MESSAGE, "delta": "S", "logprobs": []},
    {"type": "response.output_text.delta", **IN_MESSAGE, "delta": "o", "logprobs": []},
    {"type": "response.output_text.done", **IN_MESSAGE, "text": "So", "logprobs": []},
    {"type": "response.content_part.done", **IN_MESSAGE, "part": PART},
    {"type": "response.output_item.done", "output_index": 0, "item": SAID},
    {
        "type": "response.output_item.added",
        "output_index": 1,
        "item": CALLED | {"arguments": "", "status": "in_progress"},
    },
    {"type": "response.function_call_arguments.delta", **IN_CALL, "delta": "{}"},
    {"type": "response.function_call_arguments.done", **IN_CALL, "name": "a", "arguments": "{}"},
    {"type": "response.output_item.done", "output_index": 1, "item": CALLED},
    {"type": "response.completed", "response": response("completed", [SAID, CALLED], USAGE)},
]


def numbered(events: list[Json]) -> str:
    return text_of([event | {"sequence_number": number} for number, event in enumerate(events)])


def test_a_stream_of_a_response_adds_up() -> None:
    assert ResponseStream(numbered(RESPONSES)).response["output"] == [SAID, CALLED]


BROKEN_RESPONSES = [
    *(drop(number) for number in range(14)),
    *(repeat(number) for number in (0, 2, 3, 8, 9, 12, 13)), move(8, 9), move(7, 8), move(3, 4), put("2.output_index", 1),
    put("9.output_index", 0), put("4.item_id", "msg_2"), put("5.content_index", 1), put("6.text", "no"), put("7.part.text", "no"),
    put("8.item.id", "msg_2"), put("12.item.call_id", "call_2"), put("12.item.arguments", "{} "), put("11.arguments", ""),
    put("11.name", "b"), put("13.response.output", [SAID]), put("13.response.id", "resp_2"), put("13.response.usage", None),
    put("13.response.status", "incomplete"), put("13.response.output", [SAID, CALLED | {"id": "fc_2"}]),
    put("8.item.status", "in_progress"), put("12.item.status", "incomplete"), put("1.response.id", "resp_2"),
    put("13.response.usage.total_tokens", 4), put("9.item.arguments", "{}"), put("2.item.content", [PART]),
    put("8.item.content", []), put("0.response.usage", USAGE), put("13.response.error", {"code": "a", "message": "b"}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN_RESPONSES)))
def test_a_broken_stream_of_a_response_is_found(number: int) -> None:
    events = copy.deepcopy(RESPONSES)
    BROKEN_RESPONSES[number](events)
    with pytest.raises((AssertionError, KeyError)):
        ResponseStream(numbered(events))


def test_numbers_that_skip_are_found() -> None:
    with pytest.raises(AssertionError):
        ResponseStream(numbered(RESPONSES).replace('"sequence_number": 4', '"sequence_number": 5'))

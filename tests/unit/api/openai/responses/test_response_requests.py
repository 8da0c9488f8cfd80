"""Fields of /v1/responses: what each means for the chat, what has no effect, and what is refused with a way out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdcluster.api.openai.requests import ChatMessage, ChatRequest, decode_chat, messages_of, template_kwargs_of
from pdcluster.api.openai.responses.requests import (
    REFUSED_FIELDS,
    ResponseAsked,
    ResponsesRequest,
    client_error,
    decode_responses,
)
from pdcluster.api.structured.constraints import JsonSchema, ResponseFormat
from pdcluster.core.errors import BadRequest, ContextTooLong

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def asked(**fields: Any) -> ResponseAsked:
    return decode_responses(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return asked(**fields).chat


def test_a_text_is_a_users_message_behind_the_instructions() -> None:
    assert chat().messages == [ChatMessage("user", "hi")]
    assert chat(instructions="Be brief.").messages == [ChatMessage("system", "Be brief."), ChatMessage("user", "hi")]
    assert chat(instructions="").messages == chat(instructions=None).messages == [ChatMessage("user", "hi")]


SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
    ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25}),
    ({"top_k": 5, "min_p": 0.1, "seed": 3}, {"top_k": 5, "min_p": 0.1, "seed": 3}),
    (
        {"repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -1},
        {"repetition_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": -1.0},
    ),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ({"tool_choice": "auto"}, {"tool_choice": "auto"}),
    ({"stream": True}, {"stream": True}),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": None}),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ({"top_logprobs": 0}, {"logprobs": None}),
    ({"text": {"format": {"type": "text"}}}, {"response_format": ResponseFormat("text")}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": ResponseFormat("json_object")}),
    (
        {
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
            }
        },
        {"response_format": ResponseFormat("json_schema", JsonSchema("n", "d", SCHEMA, True))},
    ),
    ({"text": None, "reasoning": None, "tools": None, "include": None}, {"response_format": None, "tools": None}),
    ({"text": {"verbosity": "low"}}, {"verbosity": "low", "response_format": None}),
    ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
    ({"reasoning": {"effort": None, "context": "auto", "mode": "standard"}}, {"reasoning_effort": None}),
    ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k"}),
    ({"cache_salt": "s", "priority": 2}, {"cache_salt": "s", "priority": 2}),
    ({"pdcluster_mode": "local"}, {"pdcluster_mode": "local"}),
    ({"weights": "v1", "weights_change": "fail"}, {"weights": "v1", "weights_change": "fail"}),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    ({"temperature": "0.5", "stream": "true"}, {"temperature": 0.5, "stream": True}),
]


@pytest.mark.parametrize(("fields", "expected"), SERVED, ids=lambda value: json.dumps(value, default=str)[:60])
def test_a_served_field_is_the_chats(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made = chat(**fields)
    assert {name: getattr(made, name) for name in expected} == expected


IDLE: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s",
    "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}, "client_metadata": {"x": "y"},
    "access_programs": {"cyber": "standard"}, "max_tool_calls": 3, "image": {"context_compression": "auto"},
    "request_id": "r", "background_options": {}, "truncation": "disabled", "background": False, "context_management": [],
    "previous_response_id": None, "conversation": None, "prompt": None, "moderation": None,
    "include": ["reasoning.encrypted_content", "file_search_call.results"],
    "stream_options": {"include_obfuscation": False}, "tools": [],
}  # fmt: skip


def test_what_has_no_effect_changes_nothing_of_the_chat() -> None:
    assert chat(**IDLE) == chat()
    assert chat(enable_thinking=None, extra_body={}) == chat(), "as in a chat: what asks for nothing"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation in input"),
    ({"conversation": "conv_1"}, "conversation", "in input"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "in input"),
    ({"background": True}, "background", "set stream to true"),
    ({"prompt": {"id": "p"}}, "prompt", "in instructions and input"),
    ({"truncation": "auto"}, "truncation", "send less of it"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "a shorter input"),
    ({"moderation": {"model": "omni"}}, "moderation", "leave it out"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "leave it out"),
    ({"input": None}, "input", "it is required"),
    ({"input": []}, "input", "at least one message"),
    ({"input": ["a text"]}, "input[0]", "must be an object"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"temperature": 3}, "temperature", "at most 2"),
    ({"top_logprobs": -1}, "top_logprobs", "at least 0"),
    ({"tool_choice": "any"}, "tool_choice", "must be one of none, auto, required"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be one of text, json_object, json_schema"),
    ({"text": {"formt": {}}}, "text.formt", "did you mean format?"),
    ({"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text.format.schema", "set the type to json_schema"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be a string"),
    ({"messages": []}, "messages", "unknown field messages"),
    ({"max_output_token": 3}, "max_output_token", "did you mean max_output_tokens?"),
    ({"response_format": {"type": "text"}}, "response_format", "unknown field"),
]


@pytest.mark.parametrize(("fields", "param", "way_out"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_refused_field_says_what_to_send(fields: dict[str, Any], param: str, way_out: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(**fields)
    assert refused.value.param == param and way_out in str(refused.value), str(refused.value)


def test_every_field_is_in_one_of_the_tables() -> None:
    served = {name for fields, _ in SERVED for name in fields}
    tables = served | IDLE.keys() | REFUSED_FIELDS.keys() | {"model", "input", "instructions", "tools"}
    assert set(ResponsesRequest.__struct_fields__) == tables
    assert {name for fields, *_ in REFUSED for name in fields} >= REFUSED_FIELDS.keys()


def test_the_same_conversation_is_the_same_chat() -> None:
    """Messages for the template, one by one, as a client of chats sends them."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "assistant", "content": "2."},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "more?"}]},
    ]
    items = [
        {"role": "user", "content": "1+1?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "more?"}]},
    ]
    body = {"model": "m", "messages": messages, "reasoning_effort": "low", "verbosity": "high"}
    expected = decode_chat(json.dumps(body).encode())
    made = chat(input=items, instructions="Be brief.", reasoning={"effort": "low"}, text={"verbosity": "high"})
    assert messages_of(made.messages) == messages_of(expected.messages)
    assert template_kwargs_of(made) == template_kwargs_of(expected)


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (ContextTooLong(9, "messages has 12 tokens", "messages"), "input", "However, input has 12 tokens"),
        (BadRequest("max_tokens must be 1", "max_tokens"), "max_output_tokens", "max_output_tokens must be 1"),
        (
            BadRequest("response_format.json_schema.schema is 3", "response_format.json_schema.schema"),
            "text.format.schema", "text.format.schema is 3",
        ),
        (BadRequest("messages[3].tool_calls[0] is deep", "messages[3].tool_calls[0]"), "input", "input is deep"),
        (BadRequest("messages_of is no field", "messages_of"), "messages_of", "messages_of is no field"),
        (BadRequest("tools is long", "tools"), "tools", "tools is long"),
        (BadRequest("wrong"), None, "wrong"),
    ],
)  # fmt: skip
def test_errors_of_the_chat_name_the_bodys_fields(error: BadRequest, param: str | None, message: str) -> None:
    named = client_error(error)
    assert isinstance(named, BadRequest)
    assert (named.param, named.code, named.http_status) == (param, error.code, error.http_status)
    assert message in str(named)

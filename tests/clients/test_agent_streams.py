"""The official clients' own parsers over drawn answers: thoughts, texts and calls in any order, in chunks of any size.
What a stream adds up to is what comes without one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, APIStatusError
from conftest import HERE, REPOSITORY, Served
from openai import OpenAI

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("get_weather", "add")
DRAWN = range(60)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served]:
    argv = [REPOSITORY / ".venv/bin/python", HERE / "drawn_server.py"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline().split()
        assert len(line) == 2, "the server did not start"
        yield Served(*line)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def messages_fields(served: Served, words: str) -> dict[str, Any]:
    tools = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in NAMES]
    asked = [{"role": "user", "content": words}]
    return {"model": served.model, "max_tokens": 1000, "messages": asked, "tools": tools}


def responses_fields(served: Served, words: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
    return {"model": served.model, "input": words, "tools": tools}


def without_ids(parts: list[Any]) -> list[dict[str, Any]]:
    """Of the parts of an answer, what two answers of the same tokens have in common."""
    drawn = {"id", "call_id", "signature", "parsed_output", "parsed_arguments", "parsed"}
    return [
        {
            name: without_ids(value) if name == "content" and value else value
            for name, value in part.model_dump().items()
            if name not in drawn
        }
        if hasattr(part, "model_dump")
        else {name: value for name, value in part.items() if name not in drawn}
        for part in parts
    ]


@pytest.mark.parametrize("is_beta", [False, True])
def test_messages_add_up(scripted: Served, is_beta: bool) -> None:
    client = Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    api = client.beta.messages if is_beta else client.messages
    kinds: set[str] = set()
    for number in DRAWN:
        fields = messages_fields(scripted, f"draw {number}")
        whole = api.create(**fields)
        with api.stream(**fields) as stream:
            events = [event.type for event in stream]
            message = stream.get_final_message()
        assert events[0] == "message_start" and events[-1] == "message_stop"
        assert events.count("content_block_stop") == len(message.content)
        assert without_ids(message.content) == without_ids(whole.content), number
        assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        assert message.usage.input_tokens == whole.usage.input_tokens > 0
        assert message.usage.output_tokens == whole.usage.output_tokens > 0
        kinds |= {block.type for block in message.content}
    assert kinds == {"thinking", "text", "tool_use"}


def test_responses_add_up(scripted: Served) -> None:
    client = OpenAI(base_url=scripted.base_url, api_key="none", max_retries=0)
    kinds: set[str] = set()
    for number in DRAWN:
        fields = responses_fields(scripted, f"draw {number}")
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            events = [event.type for event in stream]
            response = stream.get_final_response()
        assert events[:2] == ["response.created", "response.in_progress"] and events[-1] == "response.completed"
        assert without_ids(response.output) == without_ids(whole.output), number
        assert response.output_text == whole.output_text and response.usage is not None
        assert response.usage.output_tokens == (whole.usage and whole.usage.output_tokens)
        kinds |= {item.type for item in response.output}
    assert kinds == {"reasoning", "message", "function_call"}


def test_a_failure_within_a_stream_is_the_clients_exception(scripted: Served) -> None:
    client = Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    for number in range(10):
        with (
            pytest.raises(APIStatusError) as failed,
            client.messages.stream(**messages_fields(scripted, f"fail {number}")) as stream,
        ):
            stream.get_final_message()
        assert failed.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
        assert failed.value.body["request_id"] == failed.value.request_id  # type: ignore[index]


def test_a_failure_within_a_response_is_its_last_event(scripted: Served) -> None:
    client = OpenAI(base_url=scripted.base_url, api_key="none", max_retries=0)
    for number in range(10):
        events = list(client.responses.create(**responses_fields(scripted, f"fail {number}"), stream=True))
        last = events[-1]
        assert last.type == "response.failed" and last.response.status == "failed" and last.response.error is not None


def test_a_count_is_the_usage_and_models_are_listed(scripted: Served) -> None:
    client = Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    fields = messages_fields(scripted, "draw 1")
    usage = client.messages.create(**fields).usage
    del fields["max_tokens"]
    count = client.messages.count_tokens(**fields).input_tokens
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.beta.messages.count_tokens(**fields).input_tokens == count
    (listed,) = client.models.list().data
    assert (listed.id, listed.type) == (scripted.model, "model") and listed.display_name
    assert client.models.retrieve(scripted.model).id == scripted.model
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.models.retrieve("nobody")
    assert unknown.value.type == "not_found_error" and unknown.value.request_id

"""litellm, as a proxy or an agent calls it: chat, streams, tools, structured output, its errors."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from conftest import Served
from conversation import ASKED, WEATHER
from pydantic import BaseModel


class Event(BaseModel):
    name: str
    day: int


@pytest.fixture
def options(served: Served) -> dict[str, Any]:
    return {"model": f"openai/{served.model}", "api_base": served.base_url, "api_key": "none", "max_retries": 0}


def test_a_chat_and_its_next_turn(options: dict[str, Any]) -> None:
    first = litellm.completion(messages=ASKED, max_tokens=20, **options)
    said = first.choices[0].message
    assert said.content and first.usage.completion_tokens > 0
    assert (
        litellm.completion(messages=[*ASKED, said.model_dump(), *ASKED], max_tokens=5, **options)
        .choices[0]
        .message.content
    )


async def test_a_stream_is_put_together(options: dict[str, Any]) -> None:
    stream = await litellm.acompletion(
        messages=ASKED, max_tokens=20, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = [chunk async for chunk in stream]
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0


def test_tools(options: dict[str, Any]) -> None:
    reply = litellm.completion(messages=ASKED, tools=[WEATHER], tool_choice="required", max_tokens=200, **options)
    said = reply.choices[0].message
    assert json.loads(said.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    answer = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "name": "get_weather", "content": "20 degrees"}
    assert litellm.completion(messages=[*ASKED, said, answer], tools=[WEATHER], max_tokens=5, **options).choices


def test_structured_output(options: dict[str, Any]) -> None:
    reply = litellm.completion(messages=ASKED, response_format=Event, max_tokens=400, temperature=0, **options)
    if reply.choices[0].finish_reason == "stop":
        Event.model_validate_json(reply.choices[0].message.content)


def test_reasoning_effort_passes(options: dict[str, Any]) -> None:
    hinted = litellm.completion(
        messages=ASKED, reasoning_effort="low", max_tokens=5, allowed_openai_params=["reasoning_effort"], **options
    )
    assert hinted.choices[0].message.content


def test_plain_completions(options: dict[str, Any]) -> None:
    plain = {**options, "model": options["model"].replace("openai/", "text-completion-openai/")}
    assert litellm.text_completion(prompt="import os\n", max_tokens=5, **plain).choices[0].text


def test_a_long_prompt_is_a_context_window_error(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 100_000}], **options)

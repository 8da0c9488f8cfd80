"""openai: chat, streams, tools, structured output, scoring."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

import pytest
from conftest import Served
from conversation import ASKED, WEATHER
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel


class Event(BaseModel):
    name: Literal["party", "talk"]
    day: Literal["Monday", "Sunday"]


@pytest.fixture
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key="none", max_retries=0)


def test_a_chat_and_its_next_turn(client: OpenAI, served: Served) -> None:
    first = client.chat.completions.create(model=served.model, messages=ASKED, max_tokens=20)
    said = first.choices[0].message
    assert said.content and first.usage is not None and first.usage.completion_tokens <= 20
    history = [*ASKED, said.model_dump(), {"role": "user", "content": "And `shutil.move`?"}]
    second = client.chat.completions.create(model=served.model, messages=history, max_tokens=20, reasoning_effort="low")
    assert second.choices[0].message.content


async def test_a_stream_with_usage(served: Served) -> None:
    client = AsyncOpenAI(base_url=served.base_url, api_key="none")
    stream = await client.chat.completions.create(
        model=served.model, messages=ASKED, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


def test_tools_are_called_and_their_answers_sent_back(client: OpenAI, served: Served) -> None:
    asked = [{"role": "user", "content": "What is it like in Rome?"}]
    reply = client.chat.completions.create(
        model=served.model,
        messages=asked,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    said = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and said.tool_calls
    assert json.loads(said.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "20 degrees"} for call in said.tool_calls]
    last = client.chat.completions.create(
        model=served.model, messages=[*asked, said, *answers], tools=[WEATHER], max_tokens=10
    )
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_call_that_was_cut_can_be_sent_back(client: OpenAI, served: Served) -> None:
    asked = [{"role": "user", "content": "What is it like in Rome?"}]
    for max_tokens in range(12, 30, 3):
        cut = client.chat.completions.create(
            model=served.model, messages=asked, tools=[WEATHER], tool_choice="required", max_tokens=max_tokens
        )
        said = cut.choices[0].message
        again = [
            *asked,
            said,
            *[{"role": "tool", "tool_call_id": call.id, "content": "?"} for call in said.tool_calls or ()],
        ]
        assert client.chat.completions.create(
            model=served.model, messages=[*again, *asked], tools=[WEATHER], max_tokens=2
        ).choices


def test_structured_output_is_parsed_and_can_be_sent_back(client: OpenAI, served: Served) -> None:
    reply = client.chat.completions.parse(
        model=served.model, messages=ASKED, response_format=Event, max_tokens=400, temperature=0
    )
    message = reply.choices[0].message
    assert isinstance(message.parsed, Event)
    history = [*ASKED, message.model_dump(), *ASKED]
    assert client.chat.completions.create(model=served.model, messages=history, max_tokens=5).choices[0].message.content


def test_a_stream_of_structured_output(client: OpenAI, served: Served) -> None:
    with client.chat.completions.stream(
        model=served.model, messages=ASKED, response_format=Event, max_tokens=400
    ) as stream:
        kinds = {event.type for event in stream}
    assert "content.delta" in kinds


def test_a_prompt_is_scored(client: OpenAI, served: Served) -> None:
    prompts = ["import os", "def read_lines(path):"]
    reply = client.completions.create(model=served.model, prompt=prompts, max_tokens=0, echo=True, logprobs=1)
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        assert choice.logprobs is not None and choice.text == prompt == "".join(choice.logprobs.tokens or [])
        assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None  # type: ignore[comparison-overlap]
        assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert reply.usage is not None and reply.usage.completion_tokens == 0


def test_errors_are_those_that_clients_know(client: OpenAI, served: Served) -> None:
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model=served.model, prompt="word " * 100_000)
    assert long.value.code == "context_length_exceeded" and "maximum context length is" in str(long.value)
    with pytest.raises(NotFoundError) as unknown:
        client.responses.create(model="nobody", input="hi")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="embeds nothing"):
        client.embeddings.create(model=served.model, input="hi")


def test_a_stream_goes_on_over_a_kill(client: OpenAI, served: Served, over_a_kill: Callable[[Program], str]) -> None:
    def program(on_piece: OnPiece) -> str:
        text = ""
        for chunk in client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": LONG_ASKED}],
            max_tokens=LONG_TOKENS,
            temperature=0,
            stream=True,
        ):
            if piece := chunk.choices[0].delta.content:
                text += piece
                on_piece()
        return text

    assert over_a_kill(program)

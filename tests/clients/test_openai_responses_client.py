"""openai's Responses: text, streams, tools, structured output, its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

import pytest
from conftest import Served
from conversation import ASKED, FUNCTION
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel


class Event(BaseModel):
    name: Literal["party", "talk"]
    day: Literal["Monday", "Sunday"]


@pytest.fixture
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key="none", max_retries=0)


def test_a_response_and_its_next_turn(client: OpenAI, served: Served) -> None:
    first = client.responses.create(
        model=served.model, instructions="Be brief.", input="What does `shutil.copyfile` do?", max_output_tokens=5
    )
    assert first.output_text and first.usage is not None and first.usage.output_tokens == 5
    assert first.status == "incomplete" and first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens" and not first.store
    history = [*ASKED, *first.output, {"role": "user", "content": "And `shutil.move`?"}]
    second = client.responses.create(model=served.model, input=history, max_output_tokens=5, store=False)
    assert second.output_text


async def test_a_stream_gives_its_final_response(served: Served) -> None:
    client = AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0)
    async with client.responses.stream(
        model=served.model, input=LONG_ASKED, max_output_tokens=LONG_TOKENS, temperature=0
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == final.output_text != ""
    assert final.status == "completed" and final.usage is not None and final.usage.output_tokens > 0


def test_tools_are_called_and_their_outputs_sent_back(client: OpenAI, served: Served) -> None:
    asked = [{"role": "user", "content": "What is it like in Rome?"}]
    said = client.responses.create(
        model=served.model, input=asked, tools=[FUNCTION], tool_choice="required", max_output_tokens=200
    )
    calls = [item for item in said.output if item.type == "function_call"]
    assert calls and json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"} for call in calls]
    last = client.responses.create(
        model=served.model, input=[*asked, *said.output, *outputs], tools=[FUNCTION], max_output_tokens=10
    )
    assert last.status in ("completed", "incomplete")


def test_structured_output_is_parsed(client: OpenAI, served: Served) -> None:
    reply = client.responses.parse(
        model=served.model, input=ASKED, text_format=Event, max_output_tokens=400, temperature=0
    )
    assert isinstance(reply.output_parsed, Event)


def test_a_response_has_the_tokens_of_a_chat(client: OpenAI, served: Served) -> None:
    chat = client.chat.completions.create(model=served.model, messages=ASKED, max_tokens=50, temperature=0)
    response = client.responses.create(model=served.model, input=ASKED, max_output_tokens=50, temperature=0)
    assert response.output_text == chat.choices[0].message.content


def test_what_a_server_would_keep_is_refused(client: OpenAI, served: Served) -> None:
    with pytest.raises(BadRequestError, match="previous_response_id"):
        client.responses.create(model=served.model, input="hi", previous_response_id="resp_1")
    with pytest.raises(BadRequestError) as long:
        client.responses.create(model=served.model, input="word " * 100_000)
    assert long.value.code == "context_length_exceeded"


def test_a_stream_goes_on_over_a_kill(client: OpenAI, served: Served, over_a_kill: Callable[[Program], str]) -> None:
    def program(on_piece: OnPiece) -> str:
        with client.responses.stream(
            model=served.model, input=LONG_ASKED, max_output_tokens=LONG_TOKENS, temperature=0
        ) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    on_piece()
            return stream.get_final_response().output_text

    assert over_a_kill(program)

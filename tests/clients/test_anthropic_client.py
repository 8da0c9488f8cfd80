"""anthropic: messages, streams, tools, structured output, counted tokens, models, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from anthropic import Anthropic, AsyncAnthropic, BadRequestError, NotFoundError
from conftest import Served
from conversation import ASKED, TOOL
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program
from openai import OpenAI
from pydantic import BaseModel

# The newest types have no temperature.
GREEDY = {"temperature": 0}


class Event(BaseModel):
    """Of bounded length, as the small model goes on for ever where it may."""

    name: Literal["party", "concert"]
    day: Literal[5, 6]


@pytest.fixture
def client(served: Served) -> Anthropic:
    return Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_a_message_and_its_next_turn(client: Anthropic, served: Served) -> None:
    first = client.messages.create(model=served.model, max_tokens=5, system="Be brief.", messages=ASKED)
    assert first.content[0].type == "text" and first.content[0].text
    assert first.stop_reason == "max_tokens" and first.usage.output_tokens == 5
    history = [
        *ASKED,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And `shutil.move`?"},
    ]
    second = client.messages.create(model=served.model, max_tokens=5, messages=history)
    assert second.content and second.usage.output_tokens == 5


async def test_a_stream_gives_its_final_message(served: Served) -> None:
    client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
    async with client.messages.stream(model=served.model, max_tokens=5, messages=ASKED) as stream:
        pieces = [piece async for piece in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(pieces) == final.content[0].text and final.usage.output_tokens == 5
    assert final.stop_reason == "max_tokens"


def test_tools_are_called_and_their_results_sent_back(client: Anthropic, served: Served) -> None:
    asked = [{"role": "user", "content": "What is it like in Rome?"}]
    with client.messages.stream(
        model=served.model,
        max_tokens=200,
        messages=asked,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": TOOL["name"]},
    ) as stream:
        said = stream.get_final_message()
    assert said.stop_reason == "tool_use"
    call = next(block for block in said.content if block.type == "tool_use")
    assert call.name == "get_weather" and call.input["city"] in ("Rome", "Oslo")
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "20 degrees"}
        for block in said.content
        if block.type == "tool_use"
    ]
    last = client.messages.create(
        model=served.model,
        max_tokens=10,
        messages=[*asked, {"role": "assistant", "content": said.content}, {"role": "user", "content": results}],
        tools=[TOOL],
    )
    assert last.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_structured_output_is_parsed(client: Anthropic, served: Served) -> None:
    reply = client.messages.parse(
        model=served.model, max_tokens=400, extra_body=GREEDY, messages=ASKED, output_format=Event
    )
    if reply.stop_reason == "end_turn":
        assert isinstance(reply.parsed_output, Event)


def test_counted_tokens_are_those_of_usage(client: Anthropic, served: Served) -> None:
    asked = {"model": served.model, "messages": ASKED, "system": "Be brief.", "tools": [TOOL]}
    usage = client.messages.create(max_tokens=1, **asked).usage
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )


def test_a_message_has_the_tokens_of_a_chat(client: Anthropic, served: Served) -> None:
    chat = OpenAI(base_url=served.base_url, api_key="none").chat.completions.create(
        model=served.model, messages=ASKED, max_tokens=50, extra_body=GREEDY
    )
    message = client.messages.create(model=served.model, messages=ASKED, max_tokens=50, extra_body=GREEDY)
    assert message.content[0].text == chat.choices[0].message.content


def test_the_model_is_listed(client: Anthropic, served: Served) -> None:
    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).type == "model"


def test_a_stop_sequence_ends_it(client: Anthropic, served: Served) -> None:
    whole = client.messages.create(model=served.model, messages=ASKED, max_tokens=50, extra_body=GREEDY).content[0].text
    stop = whole[10:13]
    cut = client.messages.create(
        model=served.model, messages=ASKED, max_tokens=50, extra_body=GREEDY, stop_sequences=[stop]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]


def test_errors_are_those_that_clients_know(client: Anthropic, served: Served) -> None:
    with pytest.raises(BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        client.messages.create(
            model=served.model, max_tokens=5, messages=[{"role": "user", "content": "word " * 100_000}]
        )
    with pytest.raises(NotFoundError) as unknown:
        client.messages.create(model="nobody", max_tokens=5, messages=ASKED)
    assert unknown.value.body["error"]["type"] == "not_found_error" and unknown.value.request_id


def test_a_stream_goes_on_over_a_kill(client: Anthropic, served: Served, over_a_kill: Callable[[Program], str]) -> None:
    def program(on_piece: OnPiece) -> str:
        with client.messages.stream(
            model=served.model,
            max_tokens=LONG_TOKENS,
            extra_body=GREEDY,
            messages=[{"role": "user", "content": LONG_ASKED}],
        ) as stream:
            for _ in stream.text_stream:
                on_piece()
            return stream.get_final_text()

    assert over_a_kill(program)

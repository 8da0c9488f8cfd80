"""openai-agents on Responses: an agent that answers, streams and calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from conftest import Served
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program
from openai import AsyncOpenAI

set_tracing_disabled(True)

# The library raises where an answer ends by length.
SETTINGS = ModelSettings(max_tokens=LONG_TOKENS, temperature=0)


@function_tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"20 degrees in {city}"


def model_of(served: Served) -> OpenAIResponsesModel:
    """A client holds its event loop's connections, so each program has its own."""
    client = AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0)
    return OpenAIResponsesModel(model=served.model, openai_client=client)


async def test_an_answer_and_its_next_turn(served: Served) -> None:
    agent = Agent("helper", instructions="Be brief.", model=model_of(served), model_settings=SETTINGS)
    first = await Runner.run(agent, "What does `shutil.copyfile` do?")
    assert first.final_output
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And `shutil.move`?"}])
    assert second.final_output


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_is_called_and_its_output_answered(served: Served, streams: bool) -> None:
    agent = Agent(
        "helper",
        tools=[get_weather],
        model=model_of(served),
        model_settings=replace(SETTINGS, tool_choice="required", parallel_tool_calls=False),
    )
    if streams:
        result = Runner.run_streamed(agent, "What is it like in Rome?", max_turns=3)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "What is it like in Rome?", max_turns=3)
    kinds = [item.type for item in result.new_items]
    assert kinds.index("tool_call_item") < kinds.index("tool_call_output_item")


def test_a_stream_goes_on_over_a_kill(served: Served, over_a_kill: Callable[[Program], str]) -> None:
    async def answer(on_piece: OnPiece) -> str:
        result = Runner.run_streamed(Agent("helper", model=model_of(served), model_settings=SETTINGS), LONG_ASKED)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                on_piece()
        return str(result.final_output)

    assert over_a_kill(lambda on_piece: asyncio.run(answer(on_piece)))

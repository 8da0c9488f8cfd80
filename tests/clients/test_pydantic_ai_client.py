"""pydantic-ai: an agent that chats, streams, calls tools and gives structured output."""

from __future__ import annotations

import pytest
from conftest import Served
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = OpenAIChatModelSettings(max_tokens=300, temperature=0.0, openai_continuous_usage_stats=True)


class Event(BaseModel):
    name: str
    day: int


@pytest.fixture
def model(served: Served) -> OpenAIChatModel:
    return OpenAIChatModel(
        served.model, provider=OpenAIProvider(base_url=served.base_url, api_key="none"), settings=SETTINGS
    )


async def test_a_chat_and_its_next_turn(model: OpenAIChatModel) -> None:
    agent = Agent(model, instructions="Be brief.")
    first = await agent.run("What does `shutil.copyfile` do?")
    assert first.output and first.usage.output_tokens > 0
    second = await agent.run("And `shutil.move`?", message_history=first.all_messages())
    assert second.output


async def test_a_stream(model: OpenAIChatModel) -> None:
    async with Agent(model).run_stream("What does `shutil.copyfile` do?") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
        assert "".join(pieces) and stream.usage.output_tokens > 0


async def test_tools_are_offered(model: OpenAIChatModel) -> None:
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"20 degrees in {city}"

    assert (await agent.run("What is it like in Rome?")).output


@pytest.mark.parametrize("output", [ToolOutput(Event), NativeOutput(Event)], ids=["tool", "native"])
async def test_structured_output(model: OpenAIChatModel, output: ToolOutput[Event] | NativeOutput[Event]) -> None:
    try:
        result = await Agent(model, output_type=output).run("When is the party?")
        assert isinstance(result.output, Event)
    except UnexpectedModelBehavior as error:  # so small a model may go on until its tokens are out
        assert "token limit" in str(error) or "output validation" in str(error) or "retries" in str(error), error

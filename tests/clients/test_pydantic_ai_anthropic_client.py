"""pydantic-ai's Anthropic model: an agent that chats, streams, calls tools and gives structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from conftest import Served
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program
from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput, UnexpectedModelBehavior
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.providers.anthropic import AnthropicProvider


class Event(BaseModel):
    name: Literal["party", "talk"]
    day: Literal["Monday", "Sunday"]


def model_of(served: Served, max_tokens: int = 100) -> AnthropicModel:
    """A provider holds its event loop's connections, so each program has its own."""
    settings = AnthropicModelSettings(max_tokens=max_tokens, temperature=0.0)
    provider = AnthropicProvider(base_url=served.url, api_key="none")
    return AnthropicModel(served.model, provider=provider, settings=settings)


async def test_a_chat_and_its_next_turn(served: Served) -> None:
    agent = Agent(model_of(served), instructions="Be brief.")
    first = await agent.run("What does `shutil.copyfile` do?")
    assert first.output and first.usage.output_tokens > 0
    second = await agent.run("And `shutil.move`?", message_history=first.all_messages())
    assert second.output


async def test_tools_are_offered(served: Served) -> None:
    agent = Agent(model_of(served))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"20 degrees in {city}"

    assert (await agent.run("What is it like in Rome?")).output


async def test_structured_output(served: Served) -> None:
    try:
        result = await Agent(model_of(served, 300), output_type=ToolOutput(Event, strict=True)).run(
            "When is the party?"
        )
        assert isinstance(result.output, Event)
    except UnexpectedModelBehavior as error:  # so small a model may go on until its tokens are out
        assert "token limit" in str(error) or "output validation" in str(error) or "retries" in str(error), error


def test_a_stream_goes_on_over_a_kill(served: Served, over_a_kill: Callable[[Program], str]) -> None:
    async def answer(on_piece: OnPiece) -> str:
        text = ""
        async with Agent(model_of(served, LONG_TOKENS)).run_stream(LONG_ASKED) as stream:
            async for piece in stream.stream_text(delta=True, debounce_by=None):
                text += piece
                on_piece()
        return text

    assert over_a_kill(lambda on_piece: asyncio.run(answer(on_piece)))

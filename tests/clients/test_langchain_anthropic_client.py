"""langchain-anthropic: chat, streams, tools, structured output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from conftest import Served
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel


class Event(BaseModel):
    """Something that happens."""

    name: Literal["party", "talk"]
    day: Literal["Monday", "Sunday"]


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"20 degrees in {city}"


@pytest.fixture
def model(served: Served) -> ChatAnthropic:
    return ChatAnthropic(
        model=served.model, base_url=served.url, api_key="none", max_retries=0, max_tokens=200, temperature=0
    )


def test_a_chat_and_its_next_turn(model: ChatAnthropic) -> None:
    first = model.invoke([("system", "Be brief."), ("user", "What does `shutil.copyfile` do?")])
    assert first.content and first.usage_metadata is not None and first.usage_metadata["output_tokens"] > 0
    assert model.invoke([HumanMessage("hi"), first, HumanMessage("And `shutil.move`?")]).content


async def test_a_stream(model: ChatAnthropic) -> None:
    whole = None
    async for chunk in model.astream("What does `shutil.copyfile` do?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0


def test_tools(model: ChatAnthropic) -> None:
    asked = [HumanMessage("What is it like in Rome?")]
    said = model.bind_tools([get_weather], tool_choice="any", strict=True).invoke(asked)
    assert isinstance(said, AIMessage) and said.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    answers = [ToolMessage("20 degrees", tool_call_id=call["id"]) for call in said.tool_calls]
    last = model.bind_tools([get_weather]).invoke([*asked, said, *answers], max_tokens=5)
    assert last.response_metadata["stop_reason"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatAnthropic, method: str) -> None:
    reply = model.with_structured_output(Event, method=method, include_raw=True).invoke("When is the party?")  # type: ignore[arg-type]
    assert reply["raw"].response_metadata["stop_reason"] == "max_tokens" or isinstance(reply["parsed"], Event)


def test_a_stream_goes_on_over_a_kill(model: ChatAnthropic, over_a_kill: Callable[[Program], str]) -> None:
    def program(on_piece: OnPiece) -> str:
        text = ""
        for chunk in model.stream(LONG_ASKED, max_tokens=LONG_TOKENS):
            if chunk.text:
                text += chunk.text
                on_piece()
        return text

    assert over_a_kill(program)

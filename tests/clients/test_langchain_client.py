"""langchain-openai: chat, streams, tools, structured output, its errors."""

from __future__ import annotations

from typing import Literal

import langchain_core.exceptions
import pytest
from conftest import Served
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Event(BaseModel):
    """Of bounded length, as the small model goes on for ever where it may."""

    name: Literal["party", "concert"]
    day: Literal[5, 6]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"20 degrees in {city}"


@pytest.fixture
def model(served: Served) -> ChatOpenAI:
    return ChatOpenAI(
        model=served.model, base_url=served.base_url, api_key="none", max_retries=0, max_tokens=200, temperature=0
    )


def test_a_chat_and_its_next_turn(model: ChatOpenAI) -> None:
    first = model.invoke([("system", "Be brief."), ("user", "What does `shutil.copyfile` do?")])
    assert first.content and first.usage_metadata is not None and first.usage_metadata["output_tokens"] > 0
    assert model.invoke([HumanMessage("hi"), first, HumanMessage("And `shutil.move`?")]).content


async def test_a_stream(model: ChatOpenAI) -> None:
    whole = None
    async for chunk in model.astream("What does `shutil.copyfile` do?", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.content and whole.usage_metadata is not None


def test_tools(model: ChatOpenAI) -> None:
    asked = [HumanMessage("What is it like in Rome?")]
    said = model.bind_tools([get_weather], tool_choice="required").invoke(asked, max_tokens=400)
    assert isinstance(said, AIMessage) and (said.tool_calls or said.invalid_tool_calls)
    answers = [
        ToolMessage("20 degrees", tool_call_id=call["id"]) for call in [*said.tool_calls, *said.invalid_tool_calls]
    ]
    assert (
        model.bind_tools([get_weather])
        .invoke([*asked, said, *answers], max_tokens=5)
        .response_metadata["finish_reason"]
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: str) -> None:
    reply = model.with_structured_output(Event, method=method, include_raw=True).invoke(
        "When is the party?", max_tokens=400
    )  # type: ignore[arg-type]
    assert reply["raw"].response_metadata["finish_reason"] == "length" or isinstance(reply["parsed"], Event)


def test_a_long_prompt_is_a_context_overflow(model: ChatOpenAI) -> None:
    with pytest.raises(langchain_core.exceptions.ContextOverflowError):
        model.invoke("word " * 100_000)

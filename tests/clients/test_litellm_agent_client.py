"""litellm in the shapes of agents: `anthropic_messages` and `responses`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest
from conftest import Served
from conversation import ASKED, FUNCTION, TOOL
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program

ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
LONG = [{"role": "user", "content": LONG_ASKED}]


@pytest.fixture
def messages_options(served: Served) -> dict[str, Any]:
    return {"model": f"anthropic/{served.model}", "api_base": served.url, "api_key": "none"}


@pytest.fixture
def responses_options(served: Served) -> dict[str, Any]:
    model = f"openai/{served.model}"
    # Of models that it does not know litellm streams only what it has read whole.
    litellm.register_model({model: {"litellm_provider": "openai", "supports_native_streaming": True}})
    return {"model": model, "api_base": served.base_url, "api_key": "none"}


async def test_messages_and_tools(messages_options: dict[str, Any]) -> None:
    reply = await litellm.anthropic_messages(
        messages=ASKED, tools=[TOOL], tool_choice=ONE_CALL, max_tokens=200, **messages_options
    )
    call = next(block for block in reply["content"] if block["type"] == "tool_use")
    assert reply["stop_reason"] == "tool_use" and call["input"]["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "20 degrees"}
    history = [*ASKED, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    last = await litellm.anthropic_messages(messages=history, tools=[TOOL], max_tokens=5, **messages_options)
    assert last["usage"]["output_tokens"] > 0


def test_a_completion_of_the_anthropic_provider(messages_options: dict[str, Any]) -> None:
    reply = litellm.completion(messages=ASKED, max_tokens=5, **messages_options)
    assert reply.choices[0].message.content and reply.usage.completion_tokens == 5


def test_responses_and_tools(responses_options: dict[str, Any]) -> None:
    reply = litellm.responses(
        input=ASKED, tools=[FUNCTION], tool_choice="required", max_output_tokens=200, **responses_options
    )
    call = next(item for item in reply.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    history = [*ASKED, call.model_dump(), output]
    last = litellm.responses(input=history, tools=[FUNCTION], max_output_tokens=5, **responses_options)
    assert last.status in ("completed", "incomplete")


def test_a_stream_of_messages_goes_on_over_a_kill(
    messages_options: dict[str, Any], over_a_kill: Callable[[Program], str]
) -> None:
    async def answer(on_piece: OnPiece) -> str:
        stream = await litellm.anthropic_messages(
            messages=LONG, max_tokens=LONG_TOKENS, temperature=0, stream=True, **messages_options
        )
        text, rest = "", b""
        async for chunk in stream:  # the bytes of the stream as they came
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (event := json.loads(line[5:]))["type"] == "content_block_delta":
                    text += event["delta"]["text"]
                    on_piece()
        return text

    assert over_a_kill(lambda on_piece: asyncio.run(answer(on_piece)))


def test_a_stream_of_responses_goes_on_over_a_kill(
    responses_options: dict[str, Any], over_a_kill: Callable[[Program], str]
) -> None:
    async def answer(on_piece: OnPiece) -> str:
        stream = await litellm.aresponses(
            input=LONG_ASKED, max_output_tokens=LONG_TOKENS, temperature=0, stream=True, **responses_options
        )
        text = ""
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                on_piece()
        return text

    assert over_a_kill(lambda on_piece: asyncio.run(answer(on_piece)))

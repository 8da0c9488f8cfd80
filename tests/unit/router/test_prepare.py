"""What is prepared beside the event loop, because it takes long."""

from __future__ import annotations

import pytest

from pdcluster.api import openai
from pdcluster.api.segments import SHORT_CHARACTERS
from pdcluster_router.prepare import MANY_MESSAGES, is_long

LONG = "a" * (SHORT_CHARACTERS + 1)


def chat(*contents: str | list[openai.ContentPart]) -> openai.ChatRequest:
    return openai.ChatRequest(model="tiny", messages=[openai.ChatMessage(role="user", content=content) for content in contents])


def said(**fields) -> openai.ChatRequest:
    return openai.ChatRequest(model="tiny", messages=[openai.ChatMessage(role="assistant", content="a", **fields)])


@pytest.mark.parametrize(
    "request_",
    [
        chat(*["a"] * (MANY_MESSAGES + 1)),
        chat(LONG[: SHORT_CHARACTERS // 2], LONG[: SHORT_CHARACTERS // 2 + 2]),
        chat([openai.ContentPart(type="text", text=LONG)]),
        said(reasoning_content=LONG),
        said(name=LONG),
        said(tool_calls=[openai.ToolCall(id="1", function=openai.FunctionCall(name=LONG, arguments="{}"))]),
        said(tool_calls=[openai.ToolCall(id="1", function=openai.FunctionCall(name="f", arguments="{}"))] * (SHORT_CHARACTERS // 16)),
        openai.ChatRequest(model="tiny", messages=[], chat_template_kwargs={"documents": [LONG]}),
        openai.CompletionRequest(model="tiny", prompt=LONG),
        openai.CompletionRequest(model="tiny", prompt=["a", LONG]),
        openai.TokenizeRequest(prompt=LONG),
    ],
    ids=["many messages", "long messages", "long part", "thoughts", "name", "tool", "many calls", "arguments", "prompt", "prompts", "tokenize"],
)
def test_what_takes_long_is_prepared_in_a_thread(request_) -> None:
    assert is_long(request_)


@pytest.mark.parametrize(
    "request_",
    [
        chat(*["a"] * MANY_MESSAGES),
        openai.CompletionRequest(model="tiny", prompt=LONG[1:]),
        openai.CompletionRequest(model="tiny", prompt=[1] * 100_000),
        openai.CompletionRequest(model="tiny", prompt=[[1] * 100_000]),
        openai.TokenizeRequest(messages=[openai.ChatMessage(role="user", content="a")]),
    ],
    ids=["messages", "prompt", "token ids", "lists of token ids", "tokenize"],
)
def test_what_is_short_or_given_as_token_ids_costs_no_thread(request_) -> None:
    assert not is_long(request_)

"""What is prepared beside the event loop, because it takes long."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import cast

import httpx
import pytest
from scripted_dispatcher import MODEL, TEXT, ScriptedDispatcher, served

from pdcluster.api.openai import requests
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.text.segments import SHORT_CHARACTERS
from pdcluster.core.errors import BadRequest
from pdcluster.core.sampling import Sampling
from pdcluster_router.frontend.prepare import (
    MANY_MESSAGES,
    OPTIONS,
    Terms,
    _plan,
    find_model,
    is_long,
    prepare_completion,
)

LONG = "a" * (SHORT_CHARACTERS + 1)


def chat(*contents: str | list[requests.ContentPart]) -> requests.ChatRequest:
    return requests.ChatRequest(
        model="tiny", messages=[requests.ChatMessage(role="user", content=content) for content in contents]
    )


def said(**fields) -> requests.ChatRequest:
    return requests.ChatRequest(model="tiny", messages=[requests.ChatMessage(role="assistant", content="a", **fields)])


@pytest.mark.parametrize(
    "request_",
    [
        chat(*["a"] * (MANY_MESSAGES + 1)),
        chat(LONG[: SHORT_CHARACTERS // 2], LONG[: SHORT_CHARACTERS // 2 + 2]),
        chat([requests.ContentPart(type="text", text=LONG)]),
        said(reasoning_content=LONG),
        said(name=LONG),
        said(tool_calls=[requests.HistoryToolCall(id="1", function=requests.FunctionCall(name=LONG, arguments="{}"))]),
        said(
            tool_calls=[requests.HistoryToolCall(id="1", function=requests.FunctionCall(name="f", arguments="{}"))]
            * (SHORT_CHARACTERS // 16)
        ),
        requests.ChatRequest(model="tiny", messages=[], chat_template_kwargs={"documents": [LONG]}),
        requests.CompletionRequest(model="tiny", prompt=LONG),
        requests.CompletionRequest(model="tiny", prompt=["a", LONG]),
        requests.TokenizeRequest(prompt=LONG),
    ],
    ids=[
        "many messages",
        "long messages",
        "long part",
        "thoughts",
        "name",
        "tool",
        "many calls",
        "arguments",
        "prompt",
        "prompts",
        "tokenize",
    ],
)
def test_what_takes_long_is_prepared_in_a_thread(request_) -> None:
    assert is_long(request_)


@pytest.mark.parametrize(
    "request_",
    [
        chat(*["a"] * MANY_MESSAGES),
        requests.CompletionRequest(model="tiny", prompt=LONG[1:]),
        requests.CompletionRequest(model="tiny", prompt=[1] * 100_000),
        requests.CompletionRequest(model="tiny", prompt=[[1] * 100_000]),
        requests.TokenizeRequest(messages=[requests.ChatMessage(role="user", content="a")]),
    ],
    ids=["messages", "prompt", "token ids", "lists of token ids", "tokenize"],
)
def test_what_is_short_or_given_as_token_ids_costs_no_thread(request_) -> None:
    assert not is_long(request_)


def test_a_deadline_counts_from_the_requests_arrival_and_not_from_the_end_of_its_preparation() -> None:
    request = requests.CompletionRequest(model=MODEL, prompt="hi")
    late, too_late = (
        prepare_completion(request, ScriptedDispatcher(), Terms("r", time.monotonic() - ago_s, 128, 60.0))
        .choices[0]
        .generation
        for ago_s in (20.0, 70.0)
    )
    assert 0.0 < late.deadline_s <= 40.0 and too_late.deadline_s == 0.0


VALUES = {
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {"7": 2.0},
    "bad_words": ["bad"],
    "stop": "end",
    "stop_token_ids": [7],
    "ignore_eos": True,
}


def planned(**fields) -> tuple[Sampling, tuple[str, ...], bool]:
    """What a request with these options gets besides its prompt."""
    request = requests.CompletionRequest(model=MODEL, prompt=[1, 2, 3], seed=5, **fields)
    choice = prepare_completion(request, ScriptedDispatcher(), Terms("r", time.monotonic(), 128, 60.0)).choices[0]
    return choice.generation.sampling, choice.text._stops._stops, 7 in choice.text._silent


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_of_a_request_becomes_that_of_another(option: str) -> None:
    plain = planned()
    own = planned(**{option: VALUES[option]})
    assert own != plain and planned() == plain and planned(**{option: VALUES[option]}) == own


def test_what_is_planned_once_depends_on_nothing_but_the_options_it_is_found_by() -> None:
    asked: set[str] = set()

    class Looked:
        def __getattr__(self, name: str) -> object:
            asked.add(name)
            return getattr(requests.CompletionRequest(model=MODEL, prompt=[1], **VALUES), name)

    _plan(cast(requests.Common, Looked()), find_model(ScriptedDispatcher(), MODEL))
    assert asked == set(OPTIONS)


def test_length_seed_and_logprobs_are_each_requests_own() -> None:
    first, second = planned(max_tokens=3, logprobs=2)[0], planned(max_tokens=4)[0]
    assert (first.max_tokens, first.logprobs, first.seed) == (3, 2, 5) and (second.max_tokens, second.logprobs) == (
        4,
        None,
    )
    with pytest.raises(BadRequest, match="min_tokens is 5, more than the 3"):
        planned(max_tokens=3, min_tokens=5)


class Stuck(ScriptedDispatcher):
    """Its text is a long time coming."""

    is_there = threading.Event()

    def text(self, model: str) -> TextModel:
        assert self.is_there.wait(30)
        return TEXT


async def test_a_request_that_waits_for_a_thread_is_answered_by_its_deadline() -> None:
    dispatcher = Stuck()
    body = {"model": MODEL, "prompt": LONG}
    try:
        async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
            reply = await client.post("/v1/completions", json=body, headers={"x-request-deadline-s": "0.05"})
            assert reply.status_code == 504 and reply.json()["error"]["code"] == "deadline_exceeded"
            dispatcher.is_there.set()
            assert (await client.post("/tokenize", json=body)).status_code == 200
    finally:
        dispatcher.is_there.set()
    assert not dispatcher.started and not [
        task for task in asyncio.all_tasks() if task.get_name().startswith("prepare")
    ]

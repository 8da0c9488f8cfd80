"""Whole numbers that a client writes as floats are taken as OpenAI and vLLM take them, and change nothing else of the
request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdcluster.api.openai import requests

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> requests.CompletionRequest:
    return requests.decode_completion(json.dumps({"model": "m", **fields}).encode())


def test_5_0_is_5_in_every_field_that_is_a_whole_number() -> None:
    numbers = {
        "max_tokens": 5.0,
        "min_tokens": 0.0,
        "top_k": -1.0,
        "prompt_logprobs": 2.0,
        "seed": -7.0,
        "n": 1e0,
        "priority": 3.0,
    }
    request = completion(prompt="hi", logprobs=1.0, stop_token_ids=[1.0, 2], **numbers)
    assert all(
        getattr(request, name) == value and type(getattr(request, name)) is int for name, value in numbers.items()
    )
    assert (request.logprobs, request.stop_token_ids) == (1, [1, 2])
    chat = requests.decode_chat(
        json.dumps(CHAT | {"max_completion_tokens": 1e2, "top_logprobs": 2.0, "logprobs": True}).encode()
    )
    assert (chat.max_completion_tokens, chat.top_logprobs) == (100, 2)


@pytest.mark.parametrize("prompt", [[1.0, 2.0], [[1, 2.0], [3.0]]])
def test_token_ids_may_be_written_so(prompt: list[Any]) -> None:
    assert completion(prompt=prompt, max_tokens=3.0).prompt == [
        [int(x) for x in p] if isinstance(p, list) else int(p) for p in prompt
    ]
    long = [float(i % 50) for i in range(30_000)]
    assert completion(prompt=long).prompt == [int(token_id) for token_id in long]


def test_floats_and_what_is_only_shown_stay_as_they_are() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"const": 5.0, "maximum": 18446744073709551615}}}
    ]
    request = requests.decode_chat(
        json.dumps(CHAT | {"tools": tools, "n": 1.0, "temperature": 1.0, "metadata": {"a": 2.0}}).encode()
    )
    assert request.n == 1 and type(request.temperature) is float and request.metadata == {"a": 2.0}
    assert request.tools is not None and request.tools[0].function.parameters is not None
    assert type(request.tools[0].function.parameters["const"]) is float
    assert request.tools[0].function.parameters["maximum"] == 18446744073709551615

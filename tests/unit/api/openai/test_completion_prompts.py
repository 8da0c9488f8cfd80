"""What a completion's prompt may be: text, token ids, or a list of one of them."""

from __future__ import annotations

import json

import pytest

from pdcluster.api.openai import requests
from pdcluster.core.errors import BadRequest


def prompts(given: object) -> list[object]:
    request = requests.decode_completion(json.dumps({"model": "m", "prompt": given}).encode())
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in requests.prompts_of(request)]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, 2**40], [[1, 2**40]]),
        ([-1], [[-1]]),
    ],
)
def test_text_and_token_ids_alone_or_in_lists_are_prompts(given: object, found: list[object]) -> None:
    assert prompts(given) == found


@pytest.mark.parametrize("given", [[1, "a"], ["a", 1], [1, [2]], [[2], 1], [2**40, "a"], [2**40, [1]]])
def test_a_list_of_two_kinds_is_refused_and_the_first_stranger_named(given: list[object]) -> None:
    with pytest.raises(BadRequest, match=r"prompt\[1\] is of another kind than prompt\[0\]"):
        prompts(given)

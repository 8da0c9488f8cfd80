"""What a body may be made of before it is decoded: many small things are refused, large things are not."""

from __future__ import annotations

import pytest

from pdcluster.api.body_bound import MOST_CONTAINERS, MOST_STRINGS, SMALL_BYTES, check_bulk
from pdcluster.api.openai import requests
from pdcluster.core.errors import BadRequest

SIZE = 8 * 2**20
USER = b'{"role":"user","content":"a"}'


def listed(entry: bytes, count: int) -> bytes:
    return b"[" + b",".join([entry] * count) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":' + listed(b"12345", SIZE // 6) + b"}",
        b'{"model":"m","prompt":"' + b"a" * SIZE + b'"}',
        b'{"model":"m","prompt":"' + b'{\\"key\\": [1, {}]}, ' * (SIZE // 20) + b'"}',
        b'{"model":"m","prompt":"' + b"\\\\" * (SIZE // 2) + b'"}',
        b'{"model":"m","prompt":' + listed(b"[1]", MOST_CONTAINERS - 2) + b"}",
    ],
    ids=["token ids", "text", "code", "backslashes", "many prompts"],
)
def test_large_bodies_of_few_things_are_decoded(body: bytes) -> None:
    assert requests.decode_completion(body).model == "m"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"model":"m","prompt":' + listed(b"[1]", SIZE // 4) + b"}", "lists and objects"),
        (b'{"model":"m","prompt":' + listed(b'"a"', SIZE // 4) + b"}", "strings and keys"),
        (b'{"model":"m","prompt":' + listed(b'"\\\\"', SIZE // 5) + b"}", "strings and keys"),
        (b'{"model":"m","metadata":' + b"[" * MOST_CONTAINERS + b"]" * MOST_CONTAINERS + b"}", "lists and objects"),
        (
            b'{"model":"m","metadata":{' + b",".join(b'"k%d":1' % number for number in range(SIZE // 12)) + b"}}",
            "strings and keys",
        ),
    ],
    ids=["lists", "strings", "strings that end in a backslash", "nested", "keys"],
)
def test_large_bodies_of_many_small_things_are_refused_with_the_number(body: bytes, what: str) -> None:
    with pytest.raises(BadRequest, match=f"the body has .* {what}, at most .* are taken"):
        requests.decode_completion(body)
    with pytest.raises(BadRequest, match=what):
        requests.decode_chat(body)


def test_a_body_that_is_no_json_is_still_told_so_by_the_decoder() -> None:
    check_bulk(b'"' * SMALL_BYTES)
    with pytest.raises(BadRequest, match="not valid JSON"):
        requests.decode_chat(b"{" * SMALL_BYTES + b"1}")


def test_every_string_counts_at_least_half_whatever_it_ends_with() -> None:
    check_bulk(listed(b'"aaa"', MOST_STRINGS))
    with pytest.raises(BadRequest):
        check_bulk(listed(b'"\\\\"', 2 * MOST_STRINGS + 2))

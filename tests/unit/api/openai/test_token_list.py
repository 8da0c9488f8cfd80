"""token_list beside a JSON decoder, and completions whose long prompts go through it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdcluster.api import body_bound
from pdcluster.api.openai import requests
from pdcluster.api.openai.token_id_scan import MOST_DIGITS, scan_ids
from pdcluster.api.openai.token_list import LONG_BYTES, token_list, use_scan
from pdcluster.core.errors import BadRequest

NUM = LONG_BYTES


MOST = 10**MOST_DIGITS - 1
COMMAS = st.sampled_from([",", ", ", ",\n", " ,\n\t", "  ,"])


@given(
    ids=st.lists(st.integers(0, MOST), min_size=1, max_size=50),
    comma=COMMAS,
    odd=COMMAS,
    outer=st.sampled_from(["", " ", "\n"]),
)
def test_it_packs_what_a_json_decoder_reads(ids: list[int], comma: str, odd: str, outer: str) -> None:
    """odd: a comma unlike the others."""
    half = len(ids) // 2
    first, rest = comma.join(map(str, ids[:half])), comma.join(map(str, ids[half:]))
    text = f"[{outer}{first}{odd if half else ''}{rest}{outer}]"
    assert token_list(text.encode()) == array("i", json.loads(text))


@given(
    ids=st.lists(st.integers(0, MOST), max_size=20),
    at=st.integers(0, 200),
    other=st.sampled_from(list('[]{}-+.eE"nft:/;\x1f')),
)
def test_whatever_else_stands_in_it_is_left_to_the_decoder(ids: list[int], at: int, other: str) -> None:
    text = json.dumps(ids)
    text = text[: at % len(text)] + other + text[at % len(text) :]
    assert token_list(text.encode()) is None


OTHERS = [
    "[]",
    "[ ]",
    "[[1]]",
    "[-1]",
    "[1.0]",
    "[1e3]",
    '["1"]',
    "[null]",
    "7",
    '"7"',
    f"[7, {MOST + 1}]",
    f"[{2**63}]",
    f"[{10**40}]",
]


@pytest.mark.parametrize("comma", [",", ", "])
@pytest.mark.parametrize("odd", ["", "  ", "\n", "x"])
def test_blocks_fit_together_wherever_they_are_cut(comma: str, odd: str) -> None:
    """odd: what stands before one of the commas."""
    for shift in range(12):
        ids = [10**shift % MOST, *range(60_000)]
        at = 40_000
        text = comma.join(map(str, ids[:at])) + odd + comma + comma.join(map(str, ids[at:]))
        assert token_list(f"[{text}]".encode()) == (None if odd == "x" else array("i", ids))


@pytest.mark.parametrize("text", OTHERS)
def test_all_else_is_left_to_the_decoder(text: str) -> None:
    assert token_list(text.encode()) is None


def body(prompt: str, **fields: object) -> bytes:
    return b'{"prompt": ' + prompt.encode() + b", " + json.dumps({"model": "m", **fields}).encode()[1:]


def test_a_long_prompt_of_ids_comes_packed_and_the_other_fields_as_ever() -> None:
    request = requests.decode_completion(body(json.dumps([7] * NUM), max_tokens=3, stop=["x"], logit_bias={"5": 1.0}))
    assert requests.prompts_of(request) == [array("i", [7] * NUM)] and isinstance(request.prompt, array)
    assert (request.model, request.max_tokens, request.stop, request.temperature) == ("m", 3, ["x"], None)
    assert type(request) is requests.CompletionRequest


@pytest.mark.parametrize("prompt", [["a"] * NUM, [[1] * NUM, [2]], "a" * NUM, [-1] + [7] * NUM, [2**31] + [7] * NUM])
def test_other_long_prompts_are_decoded_in_full(prompt: object) -> None:
    given = requests.prompts_of(requests.decode_completion(body(json.dumps(prompt))))
    assert [entry if isinstance(entry, str) else list(entry) for entry in given] in ([prompt], prompt)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (body("[" + "1," * NUM + "1", max_tokens=3), "not valid JSON"),
        (body(json.dumps([7] * NUM), max_tokens="many"), "max_tokens"),
        (body(json.dumps([7] * NUM), maxtokens=3), "maxtokens"),
        (body(json.dumps([7] * NUM), logprobs="x", suffix="x"), "logprobs"),
        (body(json.dumps([7] * NUM), suffix="x"), "suffix"),
        (body(json.dumps([7] * NUM + [None])), "prompt"),
    ],
)
def test_what_is_wrong_is_told_as_ever(given: bytes, told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        requests.prompts_of(requests.decode_completion(given))


# ---------------------------------------------------------------- where the list stands in its body


@contextmanager
def scanning() -> Iterator[list[int]]:
    """With the scan in place, though not compiled; gives how many ids each call of it found."""
    found: list[int] = []

    def scan(text: NDArray[np.uint8], ids: NDArray[np.int32]) -> tuple[int, int]:
        told = scan_ids(text.tobytes(), ids)  # type: ignore[arg-type]
        found.append(told[0])
        return told

    use_scan(scan)
    try:
        yield found
    finally:
        use_scan(None)


def outcome(given: bytes) -> object:
    """What is made of a body, or what is said against it."""
    try:
        request = requests.decode_completion(given)
        return (
            [entry if isinstance(entry, str) else list(entry) for entry in requests.prompts_of(request)],
            request.max_tokens,
            request.user,
        )
    except BadRequest as error:
        return str(error), error.param


LONG = "[" + ",".join(str(7 + index % 40_000) for index in range(NUM // 4)) + "]"
QUOTED = json.dumps(f'"prompt":{LONG}')


def test_a_list_is_read_where_it_stands_and_the_other_fields_as_ever() -> None:
    with scanning() as found:
        request = requests.decode_completion(body(LONG, max_tokens=3, stop=["x"]))
    assert found == [NUM // 4] and request.prompt == array("i", json.loads(LONG))
    assert (request.model, request.max_tokens, request.stop) == ("m", 3, ["x"])


@given(
    ids=st.lists(st.integers(0, MOST), max_size=30),
    comma=COMMAS,
    at=st.integers(0, 400),
    cut=st.integers(0, 3),
    put=st.sampled_from(["", "0", "00", " ", "\n", ",", "]", "[", "-", ".5", "e1", '"', "x", ",]", "1 1", "\x1f"]),
)
def test_whatever_stands_there_nothing_else_is_made_of_it_than_a_decoder_makes(
    ids: list[int], comma: str, at: int, cut: int, put: str
) -> None:
    """put: in place of `cut` letters."""
    text = "[" + comma.join(map(str, ids)) + "]"
    at %= len(text)
    given = body(text[:at] + put + text[at + cut :], user="u" * LONG_BYTES)
    plain = outcome(given)
    with scanning():
        assert outcome(given) == plain


@pytest.mark.parametrize(
    "given",
    [
        f'{{"model": "m", "prompt": {LONG}, "prompt": "twice"}}',
        f'{{"model": "m", "prompt": "twice", "prompt": {LONG}}}',
        f'{{"model": "m", "prompt": {LONG}, "prompt": [1, 2]}}',
        f'{{"model": "m", "metadata": {{"prompt": {LONG}}}, "prompt": "nested"}}',
        f'{{"model": "m", "metadata": {{"prompt": {LONG}}}}}',
        f'{{"model": "m", "user": {QUOTED}, "prompt": "in a string"}}',
        f'{{"model": "m", "user": "x"prompt":{LONG}}}',
        f'{{"model": "m", "prompt"\n:\t{LONG}, "user": "blanks"}}',
        f'{{"model": "m", "\\u0070rompt": {LONG}, "user": "escaped"}}',
        f'{{"model": "m", "prompt": {LONG}',
        f'{{"model": "m", "prompt": {LONG}}} and more',
        f'{{"model": "m", "prompt": {LONG[:-1]}',
        f'[{{"model": "m", "prompt": {LONG}}}]',
    ],
)
def test_only_what_is_the_prompt_is_taken_for_it(given: str) -> None:
    plain = outcome(given.encode())
    with scanning():
        assert outcome(given.encode()) == plain


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize(("each", "most"), [("{}", body_bound.MOST_CONTAINERS), ('""', body_bound.MOST_STRINGS)])
def test_what_a_body_may_hold_is_counted_as_if_the_list_were_in_it(each: str, most: int, more: int) -> None:
    """The body, its user and its prompt are containers, three keys and a value are strings."""
    others = 3 if each == "{}" else 4
    given = f'{{"model": "m", "user": [{",".join([each] * (most - others + more))}], "prompt": {LONG}}}'.encode()
    plain = outcome(given)
    with scanning():
        assert outcome(given) == plain
    assert ("at most" in str(plain)) == (more > 0)

"""token_list beside a JSON decoder, and completions whose long prompts go through it."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.api import openai
from pdcluster.api.token_list import LONG_BYTES, MOST_DIGITS, token_list
from pdcluster.errors import BadRequest

NUM = LONG_BYTES


MOST = 10**MOST_DIGITS - 1
COMMAS = st.sampled_from([",", ", ", ",\n", " ,\n\t", "  ,"])


@given(ids=st.lists(st.integers(0, MOST), min_size=1, max_size=50), comma=COMMAS, odd=COMMAS, outer=st.sampled_from(["", " ", "\n"]))
def test_it_packs_what_a_json_decoder_reads(ids: list[int], comma: str, odd: str, outer: str) -> None:
    """odd: a comma unlike the others."""
    half = len(ids) // 2
    first, rest = comma.join(map(str, ids[:half])), comma.join(map(str, ids[half:]))
    text = f"[{outer}{first}{odd if half else ''}{rest}{outer}]"
    assert token_list(text.encode()) == array("i", json.loads(text))


@given(ids=st.lists(st.integers(0, MOST), max_size=20), at=st.integers(0, 200), other=st.sampled_from(list("[]{}-+.eE\"nft:/;\x1f")))
def test_whatever_else_stands_in_it_is_left_to_the_decoder(ids: list[int], at: int, other: str) -> None:
    text = json.dumps(ids)
    text = text[: at % len(text)] + other + text[at % len(text) :]
    assert token_list(text.encode()) is None


OTHERS = ["[]", "[ ]", "[[1]]", "[-1]", "[1.0]", "[1e3]", '["1"]', "[null]", "7", '"7"', f"[7, {MOST + 1}]", f"[{2**63}]", f"[{10**40}]"]


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
    request = openai.decode_completion(body(json.dumps([7] * NUM), max_tokens=3, stop=["x"], logit_bias={"5": 1.0}))
    assert openai.prompts_of(request) == [array("i", [7] * NUM)] and isinstance(request.prompt, array)
    assert (request.model, request.max_tokens, request.stop, request.temperature) == ("m", 3, ["x"], None)
    assert type(request) is openai.CompletionRequest


@pytest.mark.parametrize("prompt", [["a"] * NUM, [[1] * NUM, [2]], "a" * NUM, [-1] + [7] * NUM, [2**31] + [7] * NUM])
def test_other_long_prompts_are_decoded_in_full(prompt: object) -> None:
    given = openai.prompts_of(openai.decode_completion(body(json.dumps(prompt))))
    assert [entry if isinstance(entry, str) else list(entry) for entry in given] in ([prompt], prompt)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (body("[" + "1," * NUM + "1", max_tokens=3), "not valid JSON"),
        (body(json.dumps([7] * NUM), max_tokens="many"), "max_tokens"),
        (body(json.dumps([7] * NUM), maxtokens=3), "maxtokens"),
        (body(json.dumps([7] * NUM), logprobs=True, suffix="x"), "logprobs"),
        (body(json.dumps([7] * NUM), suffix="x"), "suffix"),
        (body(json.dumps([7] * NUM + [None])), "prompt"),
    ],
)
def test_what_is_wrong_is_told_as_ever(given: bytes, told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        openai.prompts_of(openai.decode_completion(given))

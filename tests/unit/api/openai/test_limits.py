"""What a request's sampling becomes beside the model's defaults and context, and what is refused."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest

from pdcluster.api.openai import limits, requests
from pdcluster.api.text.model_text import SamplingDefaults
from pdcluster.core.errors import BadRequest


@dataclass(frozen=True)
class Bounds:
    """Implements limits.ModelLimits."""

    max_len: int
    vocab_size: int


LIMITS = Bounds(max_len=100, vocab_size=50)
MODEL_SAYS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05)


def request(**fields: object) -> requests.CompletionRequest:
    return requests.CompletionRequest(model="m", prompt="x", **fields)  # type: ignore[arg-type]


def test_what_a_request_leaves_out_comes_from_the_model_s_defaults() -> None:
    sampling = limits.build_sampling(request(), MODEL_SAYS, LIMITS, max_tokens=5, seed=1, logprobs=None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.9, 20, 0.05)


@pytest.mark.parametrize("off", [-1, 0])
def test_neutral_values_switch_the_model_s_filters_off(off: int) -> None:
    asked = request(temperature=0.0, top_p=1.0, top_k=off, min_p=0.0)
    sampling = limits.build_sampling(asked, MODEL_SAYS, LIMITS, max_tokens=5, seed=1, logprobs=None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, None, None, None)


@pytest.mark.parametrize(
    ("asked", "default", "num_prompt", "given"),
    [(None, 16, 10, 16), (None, 16, 95, 5), (None, None, 10, 90), (90, 16, 10, 90)],
)
def test_max_tokens_is_what_was_asked_or_the_default_within_the_context(
    asked: int | None, default: int | None, num_prompt: int, given: int
) -> None:
    assert limits.output_tokens(asked, default, num_prompt, LIMITS, "max_tokens") == given


def test_max_tokens_beyond_the_context_says_how_many_fit() -> None:
    with pytest.raises(BadRequest, match="lower max_tokens to at most 90"):
        limits.output_tokens(91, None, 10, LIMITS, "max_tokens")


def test_a_prompt_must_leave_room_for_one_token() -> None:
    limits.check_prompt(99, LIMITS, "prompt")
    with pytest.raises(BadRequest, match=r"maximum context length is 100 tokens.* However, prompt has 100 tokens"):
        limits.check_prompt(100, LIMITS, "prompt")


def test_token_ids_at_the_edges_of_the_vocabulary_are_taken() -> None:
    assert limits.check_token_ids([0, 49], 50, "prompt") == array("i", [0, 49])
    for wrong in (-1, 50, 2**40):
        with pytest.raises(BadRequest, match=f"is {wrong}, which is no token id"):
            limits.check_token_ids([wrong], 50, "prompt")


@pytest.mark.parametrize("wrong", [-1, 50])
def test_of_a_long_prompt_the_wrong_token_id_is_named(wrong: int) -> None:
    given = array("i", [7] * 1000)
    assert limits.check_token_ids(given, 50, "prompt") is given
    given[700] = wrong
    with pytest.raises(BadRequest, match=rf"prompt\[700\] is {wrong}, which is no token id"):
        limits.check_token_ids(given, 50, "prompt")


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_every_seed_of_openai_fits_the_generator_s_key(seed: int) -> None:
    assert 0 <= limits.wire_seed(seed) < 2**63

"""What becomes of penalties, logit_bias and bad_words of a request."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_level_files

from pdcluster.api.openai.requests import chat_of
from pdcluster.api.openai.sampling_fields import shaping_of
from pdcluster.api.text.model_text import SamplingDefaults, TextModel
from pdcluster.core.errors import BadRequest
from pdcluster.core.sampling import MAX_BAD_WORD_TOKENS, Shaping

TEXT = TextModel(byte_level_files())


def shaping(defaults: SamplingDefaults | None = None, **fields: object) -> Shaping | None:
    request = chat_of({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    return shaping_of(request, defaults or SamplingDefaults(), TEXT, TEXT.vocab_size)


def test_a_request_that_asks_for_nothing_has_none() -> None:
    assert shaping() is None
    assert shaping(repetition_penalty=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, bad_words=[]) is None


def test_penalties_and_biases_are_taken_as_they_are() -> None:
    found = shaping(
        repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.5, logit_bias={"7": -100, "9": 2.5}
    )
    assert found == Shaping(1.2, -1.0, 0.5, ((7, -100.0), (9, 2.5)))


def test_the_model_s_own_repetition_penalty_counts_where_the_request_says_none() -> None:
    assert shaping(SamplingDefaults(repetition_penalty=1.1)) == Shaping(1.1)
    assert shaping(SamplingDefaults(repetition_penalty=1.1), repetition_penalty=1) is None


def test_a_bad_word_is_banned_at_the_start_and_behind_a_space() -> None:
    found = shaping(bad_words=["world"])
    assert found is not None
    bare, spaced = (tuple(TEXT.encode(text, add_special_tokens=False)) for text in ("world", " world"))
    assert found.bad_words[0] == bare
    assert (spaced in found.bad_words) == (len(spaced) == len(bare) and spaced[0] != bare[0])
    assert shaping(bad_words=["world", " world", "world"]) == found, "leading spaces change nothing, and once is enough"


def test_a_bad_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(BadRequest, match=rf"bad_words\[0\].*a word has 1 to {MAX_BAD_WORD_TOKENS}"):
        shaping(bad_words=["qx" * 100])

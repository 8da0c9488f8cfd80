"""Penalties, logit_bias and bad_words of a request as the Shaping that nodes apply. None where it asks for none, which
costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pdcluster.api.openai.requests import Common
from pdcluster.api.text.model_text import SamplingDefaults
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest
from pdcluster.core.sampling import MAX_BAD_WORD_TOKENS, MAX_BIASES, Shaping

MOST_BIAS = 100.0
BAD_WORD_CHARACTERS = 256
NEUTRAL = Shaping()


class TokenLookup(Protocol):
    """The part of api.text.model_text.TextModel that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...


def shaping_of(request: Common, defaults: SamplingDefaults, text: TokenLookup, vocab_size: int) -> Shaping | None:
    """Raises BadRequest with the field, the value and what it may be."""
    repetition = defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
    if repetition == NEUTRAL.repetition and not (
        request.presence_penalty or request.frequency_penalty or request.logit_bias or request.bad_words
    ):
        return None  # the usual case
    shaping = Shaping(
        repetition=repetition,
        presence=request.presence_penalty or 0.0,
        frequency=request.frequency_penalty or 0.0,
        biases=biases_of(request.logit_bias, vocab_size) if request.logit_bias else (),
        bad_words=bad_words_of(request.bad_words, text) if request.bad_words else (),
    )
    return None if shaping == NEUTRAL else shaping


def check_num_biases(number: int) -> None:
    """Raises BadRequest when a request has too many."""
    if number > MAX_BIASES:
        raise BadRequest(f"logit_bias has {number} entries; at most {MAX_BIASES} are allowed", "logit_bias")


def biases_of(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Biases by token id. OpenAI's ids are strings, as they are keys of an object."""
    check_num_biases(len(given))
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 11 else -1
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"logit_bias has the key {shown(key)}, no token id of this model; ids go from 0 to {vocab_size - 1}",
                "logit_bias",
            )
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise BadRequest(
                f"logit_bias of token {token} is {bias:g}; it must be between {-MOST_BIAS:g} and {MOST_BIAS:g}",
                "logit_bias",
            )
        if token in biases:
            raise BadRequest(f"logit_bias has token {token} twice; name it once", "logit_bias")
        biases[token] = bias
    return tuple(biases.items())


def bad_words_of(words: Sequence[str], text: TokenLookup) -> tuple[tuple[int, ...], ...]:
    """As vLLM reads them: each word at the beginning of a text, and behind a space where that is one other token."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        if not bare or len(word) > BAD_WORD_CHARACTERS:
            raise BadRequest(
                f"bad_words[{index}] is {shown(word)}; a word has 1 to {BAD_WORD_CHARACTERS} characters, not all of "
                "them spaces",
                "bad_words",
            )
        first = tuple(text.encode(bare, add_special_tokens=False))
        spaced = tuple(text.encode(" " + bare, add_special_tokens=False))
        if not 0 < len(first) <= MAX_BAD_WORD_TOKENS:
            raise BadRequest(
                f"bad_words[{index}] is {shown(word)}, {len(first)} tokens; a word has 1 to {MAX_BAD_WORD_TOKENS}",
                "bad_words",
            )
        found[first] = None
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found[spaced] = None
    return tuple(found)

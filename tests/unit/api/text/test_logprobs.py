"""Logprobs as JSON of completions and of chats."""

from __future__ import annotations

import math

from pdcluster.api.text.choice_text import Token
from pdcluster.api.text.detokenizer import Pieces
from pdcluster.api.text.logprobs import LEAST_LOGPROB, chat_logprobs, completion_logprobs
from pdcluster.core.messages import TokenLogprobs

PIECES = Pieces([b"a", b"b", b"\xe2", b"a"], ["a", "b", None, "a"], frozenset(), strips_lead=False)


def test_minus_infinity_becomes_a_number_json_can_write() -> None:
    token = Token(0, 0, TokenLogprobs(-math.inf, (1,), (-math.inf,)))
    assert chat_logprobs([token], PIECES).content[0].logprob == LEAST_LOGPROB
    assert completion_logprobs([token], PIECES).top_logprobs == [{"b": LEAST_LOGPROB, "a": LEAST_LOGPROB}]


def test_the_sampled_token_is_among_the_alternatives_of_completions_only() -> None:
    token = Token(1, 0, TokenLogprobs(-3.0, (0,), (-0.1,)))
    assert completion_logprobs([token], PIECES).top_logprobs == [{"a": -0.1, "b": -3.0}]
    assert [top.token for top in chat_logprobs([token], PIECES).content[0].top_logprobs] == ["a"]


def test_of_alternatives_with_the_same_text_the_best_is_kept() -> None:
    token = Token(1, 0, TokenLogprobs(-3.0, (0, 3), (-0.1, -0.2)))
    assert completion_logprobs([token], PIECES).top_logprobs == [{"a": -0.1, "b": -3.0}]


def test_parts_of_characters_are_named_by_bytes_in_completions_and_listed_in_chat() -> None:
    token = Token(2, 0, TokenLogprobs(-1.0))
    assert completion_logprobs([token], PIECES).tokens == ["bytes:\\xe2"]
    entry = chat_logprobs([token], PIECES).content[0]
    assert (entry.token, entry.bytes) == ("\ufffd", [0xE2])


def test_a_token_nothing_predicted_has_null_logprobs() -> None:
    reply = completion_logprobs([Token(0, 0, None)], PIECES)
    assert (reply.token_logprobs, reply.top_logprobs) == ([None], [None])

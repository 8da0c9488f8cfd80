"""Penalties, biases and bans: the history behind them grows exactly, and logits change as a plain implementation
changes them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.history import History
from pdcluster.core.messages import Sampling, Shaping
from pdcluster.engine.sampling.penalties import SamplingRow, shaped
from pdcluster.engine.sampling.sampler import sample

VOCAB = 24
EOS = (3,)

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=100)
bad_words = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=5).map(
    lambda found: tuple(found.items())
)
shapings = st.builds(
    Shaping,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 1.5, -0.5]),
    frequency=st.sampled_from([0.0, 0.4, -2.0]),
    biases=biases,
    bad_words=bad_words,
)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def plain(
    logits: list[float], shaping: Shaping, prompt: list[int], output: list[int], sampling: Sampling
) -> list[float]:
    """One row, one token after the other, by the formulas of OpenAI's and vLLM's documentation."""
    found = []
    for token, logit in enumerate(logits):
        value = np.float32(logit)
        if token in prompt or token in output:
            value = value / np.float32(shaping.repetition) if value > 0 else value * np.float32(shaping.repetition)
        value -= np.float32(shaping.frequency) * np.float32(output.count(token))
        value -= np.float32(shaping.presence) * np.float32(token in output)
        value += np.float32(dict(shaping.biases).get(token, 0.0))
        completes = [
            word
            for word in shaping.bad_words
            if word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
        ]
        if any(len(word) <= len(output) + 1 for word in completes):
            value = np.finfo(np.float32).min
        if len(output) < sampling.min_tokens and token in (*EOS, *sampling.stop_token_ids):
            value = np.finfo(np.float32).min
        found.append(float(value))
    return found


@given(
    st.lists(st.tuples(st.none() | shapings, tokens, tokens, st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_logits_change_as_a_plain_implementation_changes_them_whatever_shares_the_batch(
    rows: list[tuple], seed: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    before = logits.clone()
    choices, expected = [], []
    for row, (shaping, prompt, output, min_tokens) in enumerate(rows):
        sampling = Sampling(max_tokens=200, seed=0, min_tokens=min_tokens, stop_token_ids=(5,), shaping=shaping)
        history = None
        if shaping is not None:
            history = History(shaping, ids(prompt), ids(output[: len(output) // 2]))
            for token in output[len(output) // 2 :]:
                history.add(token)
        choices.append(SamplingRow(sampling, len(prompt) + len(output), len(output), history))
        expected.append(plain(logits[row].tolist(), shaping or Shaping(), prompt, output, sampling))
    torch.testing.assert_close(shaped(logits, choices, EOS), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)


@given(shapings, tokens, tokens, st.integers(0, 100))
def test_a_history_that_grew_equals_one_that_was_made_of_all_tokens(
    shaping: Shaping, prompt: list[int], output: list[int], cut: int
) -> None:
    """So a row that moves to another node, which gets all its tokens at once, goes on as if it had stayed."""
    grown = History(shaping, ids(prompt), ids(output[:cut]))
    for token in output[cut:]:
        grown.add(token)
    made = History(shaping, ids(prompt), ids(output))
    assert dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True)) == dict(
        zip(made.ids.tolist(), made.counts.tolist(), strict=True)
    )
    assert sorted(grown.banned().tolist()) == sorted(made.banned().tolist())


def test_rows_without_shaping_are_not_touched() -> None:
    logits = torch.randn(3, VOCAB)
    assert shaped(logits, [SamplingRow(Sampling(max_tokens=4, seed=0), 5)] * 3, EOS) is logits


def test_penalties_look_at_no_more_than_the_distinct_tokens_of_a_long_prompt() -> None:
    history = History(Shaping(repetition=1.1), ids([7, 8] * 50_000), ids([]))
    assert sorted(history.ids.tolist()) == [7, 8]
    only_output = History(Shaping(frequency=1.0), ids([7, 8] * 50_000), ids([9, 9]))
    assert (only_output.ids.tolist(), only_output.counts.tolist()) == ([9], [2.0])


def test_a_row_whose_every_token_is_ruled_out_still_gets_a_token_of_the_vocabulary() -> None:
    words = Shaping(bad_words=tuple((token,) for token in range(VOCAB)))
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=4, seed=0, temperature=temperature, shaping=words)
        choice = SamplingRow(sampling, 3, 0, History(words, ids([1]), ids([])))
        assert 0 <= sample(torch.randn(1, VOCAB), [choice], EOS)[0] < VOCAB


def test_a_large_bias_decides() -> None:
    shaping = Shaping(biases=((11, 100.0),))
    choice = SamplingRow(Sampling(max_tokens=4, seed=0, shaping=shaping), 3, 0, History(shaping, ids([1]), ids([])))
    assert sample(torch.randn(1, VOCAB), [choice], EOS) == [11]

"""Which token is chosen: filters, statistics, independence of the batch; and logprobs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.core.history import history_of
from pdcluster.core.messages import Sampling
from pdcluster.core.sampling import LEAST_REPETITION, MOST_REPETITION, Shaping
from pdcluster.engine.sampling.penalties import SamplingRow
from pdcluster.engine.sampling.sampler import FIRST_CANDIDATES, logprobs_alone, sample, sample_alone, token_logprobs

DRAWS = 20_000
Draw = Callable[..., list[int | None]]


def sampling(**fields: object) -> Sampling:
    return Sampling(**{"max_tokens": 16, "seed": 0, **fields})  # type: ignore[arg-type]


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()[None]


def frequencies(probabilities: list[float], **fields: object) -> np.ndarray:
    """How often each token comes, over DRAWS positions."""
    logits = logits_of(probabilities).expand(DRAWS, -1)
    tokens = sample(logits, [SamplingRow(sampling(seed=5, **fields), position) for position in range(DRAWS)], ())
    return np.bincount(tokens, minlength=len(probabilities)) / DRAWS


def support(probabilities: list[float], **fields: object) -> set[int]:
    return set(np.flatnonzero(frequencies(probabilities, **fields)).tolist())


def test_temperature_zero_takes_the_best_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 0.0]])
    assert sample(logits, [SamplingRow(sampling(temperature=0.0), 4)] * 2, ()) == [1, 0]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    expected = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    found = frequencies(expected.tolist())
    chi_square = (DRAWS * (found - expected) ** 2 / expected).sum()
    assert chi_square < 18.5, "4 degrees of freedom, 0.1 %"


def test_temperature_sharpens_and_flattens() -> None:
    raw = np.array([0.5, 0.3, 0.2])
    for temperature in (0.5, 2.0):
        expected = raw ** (1 / temperature) / (raw ** (1 / temperature)).sum()
        assert frequencies(raw.tolist(), temperature=temperature) == pytest.approx(expected, abs=0.015)


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    assert support([0.3, 0.4, 0.3], temperature=1e-6) == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-308, 5e-324])
def test_no_temperature_is_so_low_that_scores_are_infinite(temperature: float) -> None:
    choice = SamplingRow(sampling(temperature=temperature), 1)
    assert sample(torch.tensor([[-3.0, 20.0, 19.0], [-900.0, -901.0, -902.0]]), [choice, choice], ()) == [1, 0]


@pytest.mark.parametrize(
    "broken", [[math.nan] * 3, [0.0, math.nan, 9.0], [0.0, math.inf, 1.0], [-math.inf, math.nan, -math.inf]], ids=str
)
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2, "temperature": 0.1}, {"min_tokens": 5}], ids=str
)
@pytest.mark.parametrize("draw", [sample, sample_alone])
def test_a_row_that_is_not_of_numbers_has_no_token_and_the_others_have_theirs(
    draw: Draw, broken: list[float], fields: dict[str, object]
) -> None:
    choices = [SamplingRow(sampling(**fields), position) for position in range(3)]
    fine = torch.tensor([[1.0, -math.inf, 0.9], [0.1, 0.2, 0.3], [3.0, 2.0, 3.0]])
    first, _, last = draw(fine, choices, (2,))
    fine[1] = torch.tensor(broken)
    assert None not in (first, last) and draw(fine, choices, (2,)) == [first, None, last]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("repetition", "token"), [(LEAST_REPETITION, 1), (MOST_REPETITION, 2)])
def test_no_penalty_that_a_request_may_have_makes_logits_infinite(
    repetition: float, token: int, temperature: float
) -> None:
    shaping = Shaping(repetition=repetition)
    history = history_of(shaping, np.array([1], np.int32), np.array([], np.int32))
    choice = SamplingRow(sampling(temperature=temperature, shaping=shaping), 1, history=history)
    assert sample(torch.tensor([[-1e34, 2e34, 1e34]]), [choice], ()) == [token]


def test_a_row_that_may_say_nothing_is_of_numbers_all_the_same() -> None:
    """Its grammar says why it can not go on."""
    choice = SamplingRow(sampling(temperature=0.0), 1)
    assert sample(torch.tensor([[1.0, 2.0, 3.0]]), [choice], (), {0: np.zeros(1, np.int32)}) == [0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.5}, {1, 3, 0}),
        ({"min_p": 0.7}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3, 0}),
        ({"top_k": 2, "top_p": 0.55}, {1}),
        ({"top_k": 4, "min_p": 0.6}, {1, 3}),
    ],
)
def test_filters_keep_exactly_what_their_definition_says(fields: dict[str, object], kept: set[int]) -> None:
    """top_p counts within what top_k left: of {0.4, 0.3} the first alone has 57 %."""
    assert support([0.21, 0.4, 0.06, 0.3, 0.03], **fields) == kept


def test_kept_tokens_keep_their_ratios() -> None:
    found = frequencies([0.2, 0.4, 0.1, 0.3], top_k=2)
    assert found == pytest.approx([0.0, 4 / 7, 0.0, 3 / 7], abs=0.012)


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    assert support([0.25, 0.25, 0.25, 0.25], top_k=2) == {0, 1, 2, 3}


def test_top_p_over_a_flat_large_vocabulary_needs_more_than_the_first_candidates() -> None:
    vocabulary = 6 * FIRST_CANDIDATES
    logits = torch.linspace(0.0, 0.01, vocabulary)[None].expand(300, -1)
    tokens = sample(logits, [SamplingRow(sampling(top_p=0.5), position) for position in range(300)], ())
    assert min(tokens) >= vocabulary * 0.49
    assert min(tokens) < vocabulary * 0.55


rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        st.sampled_from([None, 1, 5, 40, 5000]),
        st.sampled_from([None, 0.1, 0.9, 1.0]),
        st.sampled_from([None, 0.05, 0.5]),
        st.integers(0, 2**63 - 1),
        st.integers(0, 10_000),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(rows, st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_the_other_rows_or_their_order(
    fields: list[tuple], seed: int, shuffler: object
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(fields), 2000, generator=generator) * 3).bfloat16().float()
    choices = [
        SamplingRow(sampling(temperature=t, top_k=k, top_p=p, min_p=m, seed=s, choice=index % 3), position)
        for index, (t, k, p, m, s, position) in enumerate(fields)
    ]
    together = sample(logits, choices, ())
    assert [sample(logits[index : index + 1], [choice], ())[0] for index, choice in enumerate(choices)] == together
    order = list(range(len(choices)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    assert sample(logits[order], [choices[index] for index in order], ()) == [together[index] for index in order]


def test_the_token_depends_on_seed_choice_and_position() -> None:
    logits = torch.zeros(1, 1000)
    base = SamplingRow(sampling(seed=1), 7)
    others = [
        SamplingRow(sampling(seed=2), 7),
        SamplingRow(sampling(seed=1, choice=1), 7),
        SamplingRow(sampling(seed=1), 8),
    ]
    first = sample(logits, [base], ())
    assert first == sample(logits, [base], ())
    assert all(sample(logits, [other], ()) != first for other in others)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ending_tokens_are_banned_until_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 0.0]]).repeat(3, 1)
    short = sampling(temperature=temperature, top_k=1, min_tokens=2, stop_token_ids=(1,))
    tokens = sample(logits, [SamplingRow(short, 10 + index, index) for index in range(3)], eos_token_ids=(0,))
    assert tokens == [2, 2, 0]


def test_bans_leave_the_logits_alone_and_skip_ids_outside_the_vocabulary() -> None:
    logits = torch.tensor([[9.0, 8.0]])
    before = logits.clone()
    assert sample(logits, [SamplingRow(sampling(temperature=0.0, min_tokens=1, stop_token_ids=(0, 99)), 0)], ()) == [1]
    assert torch.equal(logits, before)


def test_ignored_end_tokens_are_not_banned() -> None:
    logits = torch.tensor([[9.0, 8.0]])
    assert sample(
        logits, [SamplingRow(sampling(temperature=0.0, min_tokens=1, ignore_eos=True), 0)], eos_token_ids=(0,)
    ) == [0]


def test_logprobs_are_natural_and_of_the_raw_logits() -> None:
    found = token_logprobs(logits_of([0.5, 0.3, 0.2]).repeat(3, 1) * 1.0 + 4.0, [2, 0, 1], [0, 2, 99])
    assert found[0].logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert (found[0].top_ids, found[0].top_logprobs) == ((), ())
    assert found[1].top_ids == (0, 1)
    assert found[1].top_logprobs == pytest.approx((math.log(0.5), math.log(0.3)), abs=1e-6)
    assert found[2].top_ids == (0, 1, 2), "more alternatives than tokens: all of them"
    assert [entry.rank for entry in found] == [None] * 3, "nobody asked for it"


@pytest.mark.parametrize("of_rows", [token_logprobs, logprobs_alone])
def test_ranks_count_from_the_most_likely_and_ties_count_as_in_vllm(of_rows) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    for row, token, rank in ((0, 1, 1), (0, 3, 2), (0, 2, 4), (0, 4, 4), (0, 0, 5), (1, 2, 5)):
        (found,) = of_rows(logits[row : row + 1], [token], [1], ranked=True)
        assert found.rank == rank

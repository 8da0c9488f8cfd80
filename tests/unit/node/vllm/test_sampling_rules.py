"""Rules of rows follow from the emitted tokens alone: where a prompt ends and an answer begins, and who drew it, is the
same to them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from pdcluster.api.structured.library import HEAD
from pdcluster.core.grammar import Grammar
from pdcluster.core.sampling import Sampling, Shaping
from pdcluster.engine.sampling.grammar import Vocabulary
from pdcluster.node.vllm.sampling.rules import BatchRules, RowRules, RuledRow, dead_token_of, decode_rules, encode_rules

SIZE, EOS, DEAD = 130, 128, 129
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(128)] + [b"", b""], SIZE, (EOS,))
PROMPT = [5, 6, 7, 5]
SHAPED = Sampling(
    max_tokens=99,
    seed=0,
    shaping=Shaping(
        presence=1.0, frequency=0.5, repetition=1.7, biases=((3, 2.0), (5, -1.0)), bad_words=((1,), (2, 3), (2, 3, 4))
    ),
)
FORMED = Sampling(max_tokens=99, seed=0, min_tokens=4, grammar=Grammar(HEAD + 'start: "ab" /[0-9]+/ "z"?'))


@pytest.fixture
def batch() -> Iterator[BatchRules]:
    made = BatchRules(lambda: VOCABULARY, (EOS,))
    yield made
    made.close()


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, SIZE), generator=torch.Generator().manual_seed(seed))


def row(batch: BatchRules, sampling: Sampling, output: list[int], cut: int) -> RuledRow:
    """With the first `cut` output tokens from an attempt before."""
    rules = RowRules(sampling, cut, DEAD if sampling.grammar else None)
    made = batch.row(decode_rules(encode_rules(rules)), PROMPT + output[:cut])
    made.take(output[cut:])
    return made


def test_a_replay_changes_logits_as_the_undisturbed_row_does(batch: BatchRules) -> None:
    rng = random.Random(1)
    for sampling, text in ((SHAPED, [rng.choice([2, 3, 4, 5, 60]) for _ in range(90)]), (FORMED, list(b"ab1234567"))):
        grown = row(batch, sampling, [], 0)
        for length in range(len(text)):
            grown.take(text[:length])
            cuts = sorted({0, length, length // 2, max(length - 1, 0)})
            rows = [grown, *(row(batch, sampling, text[:length], cut) for cut in cuts)]
            same = logits(1, length).expand(len(rows), -1).clone()
            changed = batch.apply(same, dict(enumerate(rows)))
            assert not torch.equal(changed[0], logits(1, length)[0])
            assert all(torch.equal(changed[0], each) for each in changed[1:])


def test_tokens_that_are_taken_back_count_no_more(batch: BatchRules) -> None:
    taken = row(batch, SHAPED, [2, 9], 1)
    taken.take([9, 3, 3])
    taken.take([9])
    fresh = row(batch, SHAPED, [2, 9], 1)
    changed = batch.apply(logits(1).expand(2, -1).clone(), {0: taken, 1: fresh})
    assert torch.equal(changed[0], changed[1]) and taken.output.tolist() == [2, 9]


def test_rows_without_rules_stay_as_they_are(batch: BatchRules) -> None:
    before = logits(4)
    changed = batch.apply(before.clone(), {1: row(batch, SHAPED, [2], 0), 3: row(batch, FORMED, list(b"a"), 0)})
    assert torch.equal(changed[[0, 2]], before[[0, 2]])
    assert changed[1, 3] < -1e30 and changed[3].argmax() == ord("b")
    assert torch.equal(batch.apply(before, {}), before)


def test_a_grammar_allows_an_end_where_it_is_complete_and_not_before_min_tokens(batch: BatchRules) -> None:
    def ends(text: bytes) -> bool:
        return bool(batch.apply(logits(1), {0: row(batch, FORMED, list(text), 0)})[0, EOS] > -1e30)

    assert [ends(text) for text in (b"ab", b"ab1", b"ab12", b"ab12z", b"ab1z")] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=9, seed=0, grammar=Grammar(HEAD + 'start: "q"')),
        Sampling(max_tokens=9, seed=0, grammar=Grammar("start: nothing")),
    ],
)
def test_a_row_that_cannot_go_on_says_so_with_its_dead_token(batch: BatchRules, sampling: Sampling) -> None:
    before = logits(2)
    changed = batch.apply(before.clone(), {0: row(batch, sampling, list(b"xy"), 1), 1: row(batch, SHAPED, [], 0)})
    assert changed[0].argmax() == DEAD and (changed[0] > -1e30).sum() == 1
    assert changed[1].argmax() != DEAD


def test_the_dead_token_is_neither_text_nor_an_end() -> None:
    assert dead_token_of(VOCABULARY) == DEAD
    assert dead_token_of(VOCABULARY, (DEAD,)) is None


@pytest.mark.parametrize("data", [b"", b"\x93", "text", encode_rules(RowRules(SHAPED))[:-1], None])
def test_rules_that_cannot_be_read_are_a_value_error(data: object) -> None:
    with pytest.raises(ValueError, match="pdcluster_rules"):
        decode_rules(data)


def test_more_emitted_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="5 emitted tokens, but a prompt of 4"):
        RuledRow("r", RowRules(SHAPED, 5), PROMPT)

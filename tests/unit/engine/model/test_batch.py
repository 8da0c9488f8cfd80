"""From a plan to flat arrays, and the plans that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from pdcluster.core.errors import IntegrityError
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.model.batch import PlanLimits, build_batch

LIMITS = PlanLimits(vocab_size=50, num_pages=10, page_tokens=4, max_len=30)


def row(tokens: list[int], start: int, pages: list[int]) -> Row:
    return Row("r", np.array(tokens, np.int32), start, np.array(pages, np.int32))


def test_tokens_of_all_rows_lie_after_each_other_with_their_slots() -> None:
    plan = StepPlan((row([7], 5, [3, 1, 9]), row([8], 0, [2]), row([1, 2, 3, 4, 5], 2, [4, 0])))
    batch = build_batch(plan, LIMITS, "cpu")
    assert batch.token_ids.tolist() == [7, 8, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [5, 0, 2, 3, 4, 5, 6]
    assert batch.slot_pages.tolist() == [1, 2, 4, 4, 0, 0, 0]
    assert batch.slot_offsets.tolist() == [1, 0, 2, 3, 0, 1, 2]
    assert [(span.begin, span.end, span.start, span.length) for span in batch.spans] == [
        (0, 1, 5, 6),
        (1, 2, 0, 1),
        (2, 7, 2, 7),
    ]
    assert batch.num_decodes == 2
    assert batch.decode_pages.tolist() == [3, 1, 2]
    assert batch.decode_first.tolist() == [0, 2]
    assert batch.decode_lengths.tolist() == [6, 1]


def test_slots_of_rows_that_all_decode() -> None:
    batch = build_batch(StepPlan((row([7], 5, [3, 1, 9]), row([8], 4, [2, 6]), row([9], 0, [5]))), LIMITS, "cpu")
    assert batch.positions.tolist() == [5, 4, 0]
    assert batch.slot_pages.tolist() == [1, 6, 5]
    assert batch.slot_offsets.tolist() == [1, 0, 0]


def test_one_token_rows_behind_a_chunk_are_attended_like_chunks() -> None:
    batch = build_batch(StepPlan((row([1, 2], 0, [0]), row([3], 1, [1]))), LIMITS, "cpu")
    assert batch.num_decodes == 0
    assert batch.decode_pages.tolist() == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row([50], 0, [0]), "token id 50 is not in 0…49"),
        (row([-1], 0, [0]), "token id -1"),
        (row([1], 0, [10]), "page 10 is not in 0…9"),
        (row([1], 4, [0]), "need 2 pages, the plan gives 1"),
        (row([1], 30, list(range(8))), "do not fit 1…30"),
        (row([], 0, [0]), "do not fit"),
        (row([1], -1, [0]), "do not fit"),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_refused(bad: Row, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        build_batch(StepPlan((bad,)), LIMITS, "cpu")


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(IntegrityError, match="without rows"):
        build_batch(StepPlan(()), LIMITS, "cpu")

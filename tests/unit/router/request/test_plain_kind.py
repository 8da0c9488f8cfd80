"""`pdcluster_router.request.plain.plain_kind`: which prompts are taken as they are."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.api.openai.requests import CompletionRequest
from pdcluster_router.request.plain.plain_kind import FEW_TOKENS, Kind, packed

VOCAB = 151_936
NEAR = [
    0,
    1,
    VOCAB - 1,
    VOCAB,
    VOCAB + 1,
    -1,
    -VOCAB,
    1 << 16,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 31,
    1 << 32,
    -(1 << 31) - 1,
]
KIND = cast(Kind, SimpleNamespace(vocab_size=VOCAB, max_len=4 * FEW_TOKENS))
SIZES = [1, 2, FEW_TOKENS - 1, FEW_TOKENS, FEW_TOKENS + 1, 3 * FEW_TOKENS, 4 * FEW_TOKENS - 1]


@given(
    size=st.sampled_from(SIZES),
    ids=st.lists(st.integers(0, VOCAB - 1) | st.sampled_from(NEAR), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_prompt_is_taken_when_the_vocabulary_has_all_of_its_ids(
    size: int, ids: list[int], data: st.DataObject
) -> None:
    prompt = [7] * size
    for token_id in ids:
        prompt[data.draw(st.integers(0, size - 1))] = token_id
    found = packed(CompletionRequest(model="m", prompt=prompt), KIND)
    if all(0 <= token_id < VOCAB for token_id in prompt):
        assert found == (prompt, struct.pack(f"{size}i", *prompt))
    else:
        assert found is None


@pytest.mark.parametrize("token_id", NEAR)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", [0, -1])
def test_one_wrong_id_is_found_wherever_it_stands(token_id: int, size: int, place: int) -> None:
    prompt = [7] * size
    prompt[place] = token_id
    assert (packed(CompletionRequest(model="m", prompt=prompt), KIND) is not None) == (0 <= token_id < VOCAB)


@pytest.mark.parametrize("size", [0, 4 * FEW_TOKENS, 4 * FEW_TOKENS + 1])
def test_a_prompt_that_is_empty_or_leaves_no_room_is_not_taken(size: int) -> None:
    assert packed(CompletionRequest(model="m", prompt=[7] * size), KIND) is None

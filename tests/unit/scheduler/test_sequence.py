"""Sequence: what it refuses, how it grows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fake_engine import make_sequence, make_work

from pdcluster.core.errors import BadRequest, IntegrityError
from pdcluster.core.lifecycle import IllegalTransition, Residence
from pdcluster.core.messages import pack_tokens
from pdcluster.kv.hashing import block_hashes
from pdcluster.scheduler.sequence import Sequence


def test_a_sequence_knows_its_prompt_from_its_output():
    sequence = make_sequence([1, 2, 3], emitted=(4, 5), max_tokens=9)
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5]
    assert (sequence.num_prompt, sequence.num_output, sequence.num_pending) == (3, 2, 5)


def test_tokens_and_pages_grow_without_bound_and_views_stay_valid():
    sequence = make_sequence([1])
    view = sequence.tokens
    for token in range(500):
        sequence.append(token)
        sequence.add_pages([token, token + 1])
    assert sequence.tokens.tolist() == [1, *range(500)]
    assert sequence.num_pages == 1000 and sequence.pages.tolist()[-2:] == [499, 500]
    assert view.tolist() == [1]
    assert sequence.tokens.dtype == sequence.pages.dtype == np.int32


def test_given_up_pages_leave_nothing_computed():
    sequence = make_sequence([1, 2])
    sequence.add_pages([5, 6])
    sequence.num_computed = 2
    view = sequence.pages
    assert sequence.take_pages() == [5, 6]
    assert (sequence.num_pages, sequence.num_computed, sequence.num_published) == (0, 0, 0)
    sequence.add_pages([9])
    assert view.tolist() == [5, 6]


def test_a_replaced_page_is_seen_in_the_table():
    sequence = make_sequence([1, 2])
    sequence.add_pages([5, 6])
    sequence.replace_page(1, 3)
    assert sequence.pages.tolist() == [5, 3]


def test_hashes_follow_the_tokens_that_are_named():
    sequence = make_sequence([1, 2, 3, 4], block_tokens=2, max_tokens=9)
    for token in (5, 6, 7, 8, 9):
        sequence.append(token)
    sequence.extend_hashes(6)
    assert bytes(sequence.hashes) == block_hashes([1, 2, 3, 4, 5, 6], block_tokens=2)
    sequence.extend_hashes(3)
    assert len(sequence.hashes) == 3 * 16
    sequence.extend_hashes(9)
    assert bytes(sequence.hashes) == block_hashes(range(1, 10), block_tokens=2)


def test_tokens_that_are_not_there_have_no_hashes():
    """The array has room behind the last token, with whatever lay in that memory."""
    sequence = make_sequence([1, 2, 3, 4], block_tokens=2, max_tokens=9)
    before = bytes(sequence.hashes)
    with pytest.raises(IntegrityError, match="hashes of 6 tokens of r, which has 4"):
        sequence.extend_hashes(6)
    assert bytes(sequence.hashes) == before


def test_a_short_prompt_whose_chain_root_is_unknown_gets_no_hashes():
    """Another salt's root would put one tenant's output into another's cache."""
    work = msgspec.structs.replace(make_work([1], block_tokens=2), hash_root=b"")
    sequence = Sequence(work, key="r", block_tokens=2)
    sequence.append(2)
    sequence.append(3)
    sequence.extend_hashes(3)
    assert sequence.hashes == b""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"token_ids": b"", "hashes": b"", "num_prompt": 0}, "prompt is empty"),
        ({"token_ids": b"\0\0\0"}, "no multiple of 4"),
        ({"num_prompt": 0}, "num_prompt is 0"),
        ({"num_prompt": 5}, "num_prompt is 5"),
        ({"hashes": bytes(15)}, "hashes has 15 bytes"),
        ({"hashes": bytes(32)}, "hashes has 32 bytes"),
        ({"hash_root": bytes(5)}, "hash_root has 5 bytes"),
    ],
)
def test_work_that_contradicts_itself_is_refused(change, complaint):
    work = msgspec.structs.replace(make_work([1, 2, 3, 4]), **change)
    with pytest.raises(BadRequest, match=complaint):
        Sequence(work, key="r", block_tokens=4)


def test_a_replay_does_not_ask_for_prompt_logprobs_again():
    assert make_sequence([1, 2], prompt_logprobs=0).wants_prompt_logprobs
    assert not make_sequence([1, 2], emitted=(3,), prompt_logprobs=0).wants_prompt_logprobs
    assert not make_sequence([1, 2]).wants_prompt_logprobs


def test_a_move_that_the_table_does_not_hold_changes_nothing():
    sequence = make_sequence([1])
    sequence.advance("reserve")
    with pytest.raises(IllegalTransition, match="RESERVED does not allow 'preempt'"):
        sequence.advance("preempt")
    assert sequence.state is Residence.RESERVED


def test_the_token_array_does_not_alias_the_message():
    packed = bytearray(pack_tokens([1, 2]))
    work = msgspec.structs.replace(make_work([1, 2]), token_ids=bytes(packed))
    sequence = Sequence(work, key="r", block_tokens=4)
    sequence.append(3)
    assert work.token_ids == bytes(packed)

"""The share that is lost: nothing while nodes keep what prompts ask for again, and it follows what comes within some hundred prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.lost_prefixes import NEWEST, LostPrefixes

TOKENS = st.integers(0, 200_000)


def test_nothing_is_lost_before_the_first_prompt_and_while_all_is_kept() -> None:
    lost = LostPrefixes()
    assert lost.share() == 0.0
    for _ in range(100):
        lost.note(0, 0)
        lost.note(500, 500)
        lost.note(0, 700)  # an answer that became a prompt: no prompt had it
    assert lost.share() == 0.0


def test_the_share_is_of_all_that_could_have_been_kept() -> None:
    lost = LostPrefixes()
    for _ in range(2000):
        lost.note(1000, 750)
    assert lost.share() == pytest.approx(0.25)
    for _ in range(round(3 / NEWEST)):
        lost.note(1000, 1000)
    assert lost.share() < 0.25 / 10


def test_long_prompts_weigh_more() -> None:
    lost = LostPrefixes()
    for _ in range(500):
        lost.note(100, 0)
        lost.note(9900, 9900)
    assert lost.share() < 0.02


@given(st.lists(st.tuples(TOKENS, TOKENS)))
def test_it_is_a_share(prompts: list[tuple[int, int]]) -> None:
    lost = LostPrefixes()
    for seen, kept in prompts:
        lost.note(seen, kept)
        assert 0.0 <= lost.share() <= 1.0

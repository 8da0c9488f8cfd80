"""The share that is lost: nothing while nodes keep what prompts ask for again, little after one prefix, and it follows
what comes within some hundred prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.policy.predicted.cost_model import MUCH_LOST
from pdcluster_router.policy.selector import NEWEST_PREFIX, USUAL_PROMPTS, CachePressure

TOKENS = st.integers(0, 200_000)


def test_nothing_is_lost_before_the_first_answer_and_while_all_is_kept() -> None:
    lost = CachePressure()
    assert lost.share(0.0) == lost.share(500.0) == 0.0
    for _ in range(100):
        lost.note(0, 0)
        lost.note(500, 500)
        lost.note(0, 700)  # an answer that became a prompt: no prompt had it
    assert lost.share(500.0) == 0.0
    lost.note(500, 0)
    assert lost.share(0.0) == 0.0


def test_the_share_is_of_all_that_could_have_been_kept() -> None:
    lost = CachePressure()
    for _ in range(2000):
        lost.note(1000, 750)
    assert lost.share(1000.0) == pytest.approx(0.25 / (1 + USUAL_PROMPTS))
    for _ in range(round(3 / NEWEST_PREFIX)):
        lost.note(1000, 1000)
    assert lost.share(1000.0) < 0.25 / 10


@pytest.mark.parametrize("before", [0, 1, 50, 1000])
def test_one_prefix_that_is_lost_says_little_though_none_was_kept(before: int) -> None:
    """It made room look as scarce as can be until other prompts hit."""
    lost = CachePressure()
    for _ in range(before):
        lost.note(0, 0)
    lost.note(1000, 0)
    assert 0.0 < lost.share(1000.0) < MUCH_LOST
    for _ in range(15):
        lost.note(1000, 0)
    assert lost.share(1000.0) > MUCH_LOST, "many are no chance"


def test_long_prompts_weigh_more() -> None:
    lost = CachePressure()
    for _ in range(500):
        lost.note(100, 0)
        lost.note(9900, 9900)
    assert lost.share(5000.0) < 0.02


@given(st.lists(st.tuples(TOKENS, TOKENS)), st.floats(0.0, 1e6))
def test_it_is_a_share(prompts: list[tuple[int, int]], usual_tokens: float) -> None:
    lost = CachePressure()
    for seen, kept in prompts:
        lost.note(seen, kept)
        assert 0.0 <= lost.share(usual_tokens) <= 1.0

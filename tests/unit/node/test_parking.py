"""How much finished KV waits on a prefill node, when that is too much, and when to ask again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.node.parking import LONGEST_S, SHORTEST_S, ParkedKV


class Lot:
    def __init__(self, limit: int = 4) -> None:
        self.now = 100.0
        self.parking = ParkedKV(limit, lambda: self.now, 30.0)


def test_pages_that_two_requests_share_count_once() -> None:
    parking = Lot().parking
    parking.enter("a", [1, 2])
    parking.enter("b", [1, 3])
    assert (parking.num_pages, parking.num_requests, parking.is_full) == (3, 2, False)
    parking.leave("a")
    assert parking.num_pages == 2
    parking.leave("b")
    parking.leave("b")
    assert (parking.num_pages, parking.num_requests) == (0, 0)


def test_it_is_full_at_its_limit_and_a_prompt_beyond_it_still_parks_alone() -> None:
    parking = Lot(limit=2).parking
    assert not parking.is_full
    parking.enter("large", [1, 2, 3, 4, 5])
    assert parking.is_full
    parking.leave("large")
    assert not parking.is_full


def test_who_is_refused_comes_back_at_the_pace_at_which_kv_is_taken() -> None:
    lot = Lot()
    for key in "abcdefgh":
        lot.parking.enter(key, [ord(key)])
    for key in "abcdefg":
        lot.now += 0.2
        lot.parking.leave(key)
    assert lot.parking.retry_after_s() == pytest.approx(0.2, rel=0.15)


def test_the_longer_nothing_was_taken_the_later_is_the_next_try_within_bounds() -> None:
    lot = Lot()
    lot.parking.enter("a", [1])
    assert lot.parking.retry_after_s() == SHORTEST_S
    lot.now += 0.5
    assert lot.parking.retry_after_s() == 0.5
    lot.now += 3600
    assert lot.parking.retry_after_s() == LONGEST_S


def test_an_empty_hour_is_no_slow_pace() -> None:
    lot = Lot()
    lot.now += 3600
    lot.parking.enter("a", [1])
    lot.now += 0.1
    lot.parking.leave("a")
    assert lot.parking.retry_after_s() < 0.1


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), unique=True), st.booleans())))
def test_the_count_is_that_of_the_distinct_pages_of_who_is_there(steps: list[tuple[int, list[int], bool]]) -> None:
    parking, model = Lot().parking, {}
    for number, pages, enters in steps:
        key = str(number)
        if enters and key not in model:
            parking.enter(key, pages)
            model[key] = pages
        elif not enters:
            parking.leave(key)
            model.pop(key, None)
        assert parking.num_pages == len(Counter(page for each in model.values() for page in each))
        assert parking.num_requests == len(model)

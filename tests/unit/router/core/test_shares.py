"""A bounded amount that tenants share: one of them cannot take it all, and the books add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import IntegrityError
from pdcluster_router.core.shares import Shares


def fill(shares: Shares, tenant: str) -> int:
    number = 0
    while shares.has_room(tenant):
        shares.take(tenant)
        number += 1
    return number


def test_a_single_tenant_takes_all_when_nobody_else_can_come() -> None:
    assert fill(Shares(100), "all") == 100


def test_however_greedy_the_others_are_the_next_tenant_finds_room() -> None:
    shares = Shares(1000, greed=4.0)
    taken = [fill(shares, tenant) for tenant in "abcd"]
    assert taken[0] == 800
    assert all(number >= 1 for number in taken) and shares.used < 1000


def test_tenants_that_come_together_get_the_same() -> None:
    shares = Shares(900, greed=4.0)
    while any(shares.has_room(tenant) for tenant in "ab"):
        for tenant in "ab":
            if shares.has_room(tenant):
                shares.take(tenant)
    assert abs(shares.taken_by("a") - shares.taken_by("b")) <= 1 and shares.taken_by("a") == 400


def test_nobody_gives_back_what_it_has_not() -> None:
    shares = Shares(10)
    shares.take("a", 3)
    with pytest.raises(IntegrityError, match="gives back 4 of 3"):
        shares.give_back("a", 4)
    with pytest.raises(IntegrityError, match="gives back 1 of 0"):
        shares.give_back("b")
    with pytest.raises(IntegrityError, match="takes 8"):
        shares.take("b", 8)
    shares.check_integrity()
    assert (shares.used, shares.taken_by("a"), shares.taken_by("b")) == (3, 3, 0)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 20))), st.sampled_from([None, 0.5, 4.0])
)
def test_the_books_add_up_whatever_is_taken_and_given_back(
    steps: list[tuple[bool, str, int]], greed: float | None
) -> None:
    shares, taken = Shares(50, greed), dict.fromkeys("abc", 0)
    for takes, tenant, amount in steps:
        if takes and shares.has_room(tenant, amount):
            shares.take(tenant, amount)
            taken[tenant] += amount
        elif not takes and taken[tenant] >= amount:
            shares.give_back(tenant, amount)
            taken[tenant] -= amount
        shares.check_integrity()
        assert shares.used == sum(taken.values()) <= 50


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=40), st.sampled_from([None, 0.5, 4.0]))
def test_to_take_one_if_there_is_room_is_to_ask_and_to_take(steps: list[tuple[bool, str]], greed: float | None) -> None:
    asked, at_once = Shares(12, greed), Shares(12, greed)
    for takes, tenant in steps:
        if takes:
            has_room = asked.has_room(tenant)
            if has_room:
                asked.take(tenant)
            assert at_once.take_if_room(tenant) is has_room
        elif asked.taken_by(tenant):
            asked.give_back(tenant)
            at_once.give_back(tenant)
        at_once.check_integrity()
        assert (asked.used, asked.taken_by(tenant)) == (at_once.used, at_once.taken_by(tenant))

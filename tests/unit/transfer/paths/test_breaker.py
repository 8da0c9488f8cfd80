"""Breakers of transfer paths: what opens and closes them, and what never happens whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import Breaker, Breakers, BreakerSettings, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SETTINGS = BreakerSettings(failures=3, window_s=10.0, pause_s=1.0, longest_s=8.0, probe_s=5.0)
PEER, OTHER = Peer("d0", "b1"), Peer("d1", "b1")


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failed(at, at)
    assert breaker.state(at) is OPEN
    return breaker


def test_failures_within_the_window_open_it() -> None:
    breaker = Breaker(SETTINGS)
    assert not breaker.failed(0, 0) and not breaker.failed(4, 4)
    assert breaker.state(4) is CLOSED and breaker.has_room(4)
    assert breaker.failed(9, 9)
    assert breaker.state(9) is OPEN and not breaker.has_room(9)


def test_failures_far_apart_do_not() -> None:
    breaker = Breaker(SETTINGS)
    for now in range(0, 100, 6):
        assert not breaker.failed(now, now)
    assert breaker.state(100) is CLOSED


def test_after_the_pause_one_write_may_try_and_no_other_beside_it() -> None:
    breaker = opened()
    assert breaker.state(0.99) is OPEN and not breaker.has_room(0.99)
    assert breaker.state(1.0) is HALF_OPEN and breaker.has_room(1.0)
    breaker.begin(1.0)
    assert not breaker.has_room(1.1)


def test_a_probe_that_ends_well_closes_it() -> None:
    breaker = opened()
    breaker.begin(1.0)
    assert breaker.succeeded(1.0, 1.2)
    assert breaker.state(1.2) is CLOSED and breaker.has_room(1.2)


def test_each_failed_probe_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(6):
        pauses.append(breaker.opens_until - now)
        now = breaker.opens_until
        breaker.begin(now)
        assert breaker.failed(now, now)
    assert pauses == [1, 2, 4, 8, 8, 8]


def test_a_path_that_opens_again_soon_after_it_closed_waits_longer_and_a_healthy_time_makes_up_for_it() -> None:
    breaker = opened()
    breaker.begin(1.0)
    breaker.succeeded(1.0, 1.0)
    for _ in range(3):
        breaker.failed(2.0, 2.0)
    assert breaker.opens_until == 4.0
    breaker.begin(4.0)
    breaker.succeeded(4.0, 4.0)
    for _ in range(3):
        breaker.failed(100.0, 100.0)
    assert breaker.opens_until == 101.0


def test_a_silent_probe_is_forgotten() -> None:
    breaker = opened()
    breaker.begin(1.0)
    assert not breaker.has_room(5.9)
    assert breaker.has_room(6.0)


def test_writes_that_began_before_it_opened_decide_nothing() -> None:
    breaker = opened(at=5.0)
    assert not breaker.succeeded(4.0, 5.5) and not breaker.failed(4.0, 5.5)
    assert breaker.opens_until == 6.0
    breaker.begin(6.0)
    assert not breaker.succeeded(4.0, 6.5)
    assert breaker.state(6.5) is HALF_OPEN and not breaker.has_room(6.5), "the probe's answer is still to come"


def test_a_peer_is_never_without_a_path_and_the_one_that_comes_back_first_is_taken() -> None:
    breakers = Breakers(SETTINGS)
    for name, now in (("shm", 0.0), ("tcp", 0.5)):
        for _ in range(3):
            breakers.failed(PEER, name, now, now)
    assert breakers.usable(PEER, ["tcp", "shm"], 0.6) == ["shm"]
    assert breakers.usable(PEER, ["tcp"], 0.6) == ["tcp"]
    assert breakers.usable(OTHER, ["tcp", "shm"], 0.6) == ["tcp", "shm"], "another peer is not concerned"
    breakers.begin(PEER, "shm", 0.6)
    assert breakers.counters["used_while_open"] == 1
    breakers.succeeded(PEER, "shm", 0.6, 0.7)
    assert breakers.state(PEER, "shm", 0.7) is CLOSED, "it works after all"
    assert breakers.usable(PEER, ["tcp", "shm"], 0.7) == ["shm"]
    assert breakers.counters == {"opened": 2, "used_while_open": 1, "closed": 1}


def test_a_boot_that_is_gone_is_forgotten() -> None:
    breakers = Breakers(SETTINGS)
    for _ in range(3):
        breakers.failed(PEER, "tcp", 0.0, 0.0)
    breakers.forget(PEER)
    assert breakers.state(PEER, "tcp", 0.0) is CLOSED


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ok", "bad", "late ok", "late bad", "silent", "pass"]), st.floats(0.01, 4.0)),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_whatever_happens_a_path_comes_back_and_probes_go_one_at_a_time(events: list[tuple[str, float]]) -> None:
    breaker, now, probe = Breaker(SETTINGS), 0.0, -100.0
    for kind, later in events:
        now += later
        room, was = breaker.has_room(now), breaker.state(now)
        if room and was is HALF_OPEN and kind != "pass":
            assert now >= probe + SETTINGS.probe_s, "no second probe beside one that may still answer"
            probe = now
        began = now if kind in ("ok", "bad") else 0.0
        if kind != "pass" and room:
            breaker.begin(now)
        if kind.endswith("ok") and room:
            breaker.succeeded(began, now)
        if kind.endswith("bad") and room:
            breaker.failed(began, now)
        if breaker.state(now) is not was:
            probe = -100.0  # it was answered
        assert breaker.opens_until <= now + SETTINGS.longest_s, "never for ever"
        assert breaker.state(max(now, breaker.opens_until)) is not OPEN
    later = max(now, breaker.opens_until) + SETTINGS.probe_s
    assert breaker.has_room(later)
    breaker.begin(later)
    breaker.succeeded(later, later)
    assert breaker.state(later) is CLOSED, "one good write after the pause is enough"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["shm", "tcp", "nixl"]), st.booleans(), st.floats(0.0, 3.0)), max_size=60))
def test_there_is_always_a_path_and_closed_ones_are_all_offered(events: list[tuple[str, bool, float]]) -> None:
    breakers, now, names = Breakers(SETTINGS), 0.0, ["shm", "tcp", "nixl"]
    for name, good, later in events:
        now += later
        usable = breakers.usable(PEER, names, now)
        assert usable and set(usable) <= set(names)
        closed = [each for each in names if breakers.state(PEER, each, now) is CLOSED]
        assert set(closed) <= set(usable)
        assert not closed or OPEN not in {breakers.state(PEER, each, now) for each in usable}, (
            "a shut path is only offered when there is no other"
        )
        breakers.begin(PEER, name, now)
        (breakers.succeeded if good else breakers.failed)(PEER, name, now, now)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_failures_than_allowed_change_nothing(count: int) -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(count):
        breaker.failed(0.0, 0.0)
    assert breaker.has_room(0.0)

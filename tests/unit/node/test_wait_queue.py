"""Nobody is overtaken for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster.node.wait_queue import WaitQueue
from pdcluster.scheduler.forecast import LONGEST_S
from pdcluster.transfer.backends.base import Peer

ROUTER, OTHER = Peer("router", "boot"), Peer("other", "boot")


def test_a_refused_request_is_overtaken_only_so_often() -> None:
    line = WaitQueue(max_overtakes=2)
    line.refused("large", ROUTER, 0.0, 0.5)
    for small in ("a", "b"):
        assert line.may_try(small, 0.1)
        line.served(small)
    assert not line.may_try("c", 0.2)
    assert line.may_try("large", 0.3)
    line.served("large")
    assert line.may_try("c", 0.4) and len(line) == 0


def test_a_place_is_given_up_by_not_asking_again() -> None:
    line = WaitQueue(max_overtakes=0, late_s=1.0)
    line.refused("large", ROUTER, 0.0, 0.5)
    assert not line.may_try("small", 1.4)
    assert line.may_try("small", 1.6) and len(line) == 0


def test_a_place_outlasts_the_longest_time_that_its_request_is_told_to_stay_away() -> None:
    line = WaitQueue(max_overtakes=0)
    for turn in range(5):
        now = turn * (LONGEST_S + 1.0)  # it comes a second later than it was told
        assert line.may_try("large", now)
        line.refused("large", ROUTER, now, LONGEST_S)
        assert not line.may_try("small", now + LONGEST_S + 0.9)


def test_a_place_goes_with_its_request_and_with_its_router() -> None:
    line = WaitQueue(max_overtakes=0)
    for request, router in (("a", ROUTER), ("b", ROUTER), ("c", OTHER)):
        line.refused(request, router, 0.0, 0.5)
    line.leave("a")
    line.leave("a")
    assert len(line) == 2
    line.leave_router(ROUTER, {"b"})
    assert len(line) == 2, "it is awaited here"
    line.leave_router(ROUTER)
    assert len(line) == 1 and not line.may_try("d", 0.1)
    line.leave_router(OTHER)
    assert line.may_try("d", 0.1)


def test_the_line_is_bounded() -> None:
    line = WaitQueue(capacity=3)
    for index in range(10):
        line.refused(f"r{index}", ROUTER, 0.0, 0.5)
    assert len(line) == 3


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_no_request_that_keeps_asking_is_passed_more_than_allowed(history: list[tuple[int, bool]]) -> None:
    """Each entry: who asks, and whether there would be room for it."""
    line, passed, waiting = WaitQueue(max_overtakes=3), dict.fromkeys(range(10), 0), []
    for who, room in history:
        if line.may_try(str(who), 0.0) and room:
            for other in waiting[: waiting.index(who)] if who in waiting else waiting:
                passed[other] += 1
            waiting = [each for each in waiting if each != who]
            passed[who] = 0
            line.served(str(who))
        else:
            waiting = waiting if who in waiting else [*waiting, who]
            line.refused(str(who), ROUTER, 0.0, 0.5)
        assert max(passed.values()) <= 3

"""Alarms that many requests share."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import VirtualLoop, run_virtually

from pdcluster_router.request.timers import OPEN_S, TICK_S, TimerBuckets, Timers


class Asked:
    """Implements timers.Member, and counts its rings."""

    def __init__(self) -> None:
        self.rings: list[object] = []
        self.num_rung = 0

    def set(self, seconds: float, ring: object) -> int:
        self.rings.append((seconds, ring))
        return len(self.rings)

    def ring(self) -> None:
        self.num_rung += 1


def test_those_of_one_round_share_an_alarm_and_who_joins_when_it_rings_has_another() -> None:
    timers, first, left, last = Asked(), Asked(), Asked(), Asked()
    rounds = TimerBuckets(timers, 10.0)  # type: ignore[arg-type]
    joined = rounds.join(first, 100.0)
    assert rounds.join(left, 100.1) is joined
    joined.pop(left)
    assert rounds.join(last, 101.0) is not joined and len(timers.rings) == 2
    seconds, ring = timers.rings[1]  # type: ignore[misc]
    assert seconds < 10.0
    ring()
    assert (first.num_rung, left.num_rung, last.num_rung) == (0, 0, 1)
    rounds.join(last, 101.05)
    assert len(timers.rings) == 3


def test_what_one_of_a_round_raises_does_not_cost_the_others_their_alarm() -> None:
    class Broken(Asked):
        def ring(self) -> None:
            raise RuntimeError("broken")

    timers, broken, second, third = Asked(), Broken(), Asked(), Asked()
    rounds = TimerBuckets(timers, 10.0)  # type: ignore[arg-type]
    for member in (broken, second, third):
        rounds.join(member, 100.0)
    with pytest.raises(RuntimeError, match="broken"):
        timers.rings[0][1]()  # type: ignore[index]
    for _, ring in timers.rings[1:]:  # type: ignore[misc]
        ring()
    assert (second.num_rung, third.num_rung) == (1, 1)


@pytest.mark.parametrize("seconds", [10.0, 4 * OPEN_S, OPEN_S, 0.02])
def test_a_round_is_open_for_a_part_of_its_time_and_its_alarm_is_set_by_the_first(seconds: float) -> None:
    timers, members = Asked(), [Asked() for _ in range(4)]
    rounds = TimerBuckets(timers, seconds)  # type: ignore[arg-type]
    open_s = min(OPEN_S, seconds / 4)
    first = rounds.join(members[0], 100.0)
    assert rounds.join(members[1], 100.0 + 0.99 * open_s) is first
    second = rounds.join(members[2], 100.0 + 1.01 * open_s)
    assert second is not first and [told for told, _ in timers.rings] == [pytest.approx(seconds - open_s)] * 2  # type: ignore[misc]
    timers.rings[0][1]()  # type: ignore[index]
    assert rounds.join(members[3], 100.0 + 1.5 * open_s) is second, (
        "that one rang says nothing of those that came later"
    )


@given(
    seconds=st.sampled_from([0.05, 0.3, 0.5, 3.0]),
    plan=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([None, None, 0, 20])), min_size=1, max_size=30),
)
def test_whoever_does_not_leave_is_rung_once_in_good_time(seconds: float, plan: list[tuple[int, int | None]]) -> None:
    """plan: hundredths of a second before the next one joins, and after which it leaves; None: it stays."""

    async def main(loop: VirtualLoop) -> None:
        timers = Timers()
        rounds, joined, rung, left = TimerBuckets(timers, seconds), list[float](), dict[int, float](), set[int]()

        class Member:
            def __init__(self, number: int) -> None:
                self.number = number

            def ring(self) -> None:
                assert self.number not in rung and self.number not in left
                rung[self.number] = loop.time()

        def leave(member: Member, its: dict[object, None]) -> None:
            if its.pop(member, 1) is None:
                left.add(member.number)

        for number, (pause, stays) in enumerate(plan):
            await asyncio.sleep(pause / 100)
            member = Member(number)
            joined.append(loop.time())
            its = rounds.join(member, loop.time())
            if stays is not None:
                loop.call_later(stays / 100, leave, member, its)
        await asyncio.sleep(seconds + 1.0)
        assert rung.keys() | left == set(range(len(plan))) and not len(timers)
        for number, moment in rung.items():
            since = moment - joined[number]
            assert seconds / 2 - TICK_S <= since <= seconds + max(OPEN_S if seconds >= 1.0 else 0.0, 2 * TICK_S) + 1e-6

    run_virtually(main)

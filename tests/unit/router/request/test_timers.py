"""Many deadlines on one timer."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from virtual_time import VirtualLoop, run_virtually

from pdcluster_router.request.timers import COARSE_TICKS, FAR_S, TICK_S, Timers


def test_a_dropped_alarm_does_not_ring_and_leaves_nothing() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        timers, rung = Timers(), list[str]()
        first, second = (lambda name=name: rung.append(name) for name in ("a", "b"))
        tick = timers.set(0.1, first)
        timers.set(0.1, second)
        timers.drop(tick, first)
        timers.drop(tick, first)
        await asyncio.sleep(0.2)
        timers.check_integrity()
        assert len(timers) == 0
        return rung

    assert run_virtually(main) == ["b"]


def test_one_that_fails_does_not_cost_the_others_theirs() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        rung, failures = list[str](), list[object]()
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        timers = Timers()
        timers.set(0.1, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        timers.set(0.1, lambda: rung.append("b"))
        await asyncio.sleep(0.2)
        assert len(failures) == 1
        return rung

    assert run_virtually(main) == ["b"]


def test_closed_ones_never_ring() -> None:
    async def main(loop: VirtualLoop) -> int:
        timers, rung = Timers(), list[int]()
        timers.set(0.1, lambda: rung.append(1))
        timers.close()
        timers.check_integrity()
        await asyncio.sleep(0.2)
        timers.check_integrity()
        return len(rung)

    assert run_virtually(main) == 0


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.integers(0, 50)), max_size=30))
def test_every_alarm_that_is_not_dropped_rings_once_and_late_by_a_tick_at_most(
    plan: list[tuple[int, bool, int]],
) -> None:
    """plan: hundredths of a second to the alarm, whether it is dropped at once, and hundredths before the next one is
    set."""

    async def main(loop: VirtualLoop) -> None:
        timers, rung = Timers(), dict[int, float]()
        wanted: dict[int, float] = {}
        for number, (hundredths, is_dropped, pause) in enumerate(plan):
            seconds = hundredths / 100

            def ring(number: int = number) -> None:
                assert number not in rung
                rung[number] = loop.time()

            tick = timers.set(seconds, ring)
            if is_dropped:
                timers.drop(tick, ring)
            else:
                wanted[number] = loop.time() + seconds
            timers.check_integrity()
            await asyncio.sleep(pause / 100)
        await asyncio.sleep(5.0)
        assert rung.keys() == wanted.keys()
        for number, moment in wanted.items():
            ticks = COARSE_TICKS if plan[number][0] / 100 >= FAR_S else 1
            assert -1e-6 <= rung[number] - moment <= (ticks + 1) * TICK_S + 1e-6
        timers.check_integrity()

    run_virtually(main)

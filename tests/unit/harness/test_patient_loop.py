"""The clock of tests: stalls are no time, waits are."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patient_loop import MOST_S, PatientClock, PatientLoop


async def test_a_stall_is_no_time_that_passes() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PatientLoop), "every test runs in one"
    until = loop.time() + 0.2
    time.sleep(0.3)
    assert loop.time() < until
    await asyncio.sleep(0)
    assert loop.time() < until, "neither at once nor later"


async def test_a_deadline_does_not_run_out_while_everybody_stands_still() -> None:
    async with asyncio.timeout(0.2) as deadline:
        for _ in range(3):
            time.sleep(0.15)
            await asyncio.sleep(0)
    assert not deadline.expired()


async def test_waiting_takes_the_time_that_it_should() -> None:
    began, loop_began = time.monotonic(), asyncio.get_running_loop().time()
    await asyncio.sleep(0.1)
    assert time.monotonic() - began >= 0.099 and asyncio.get_running_loop().time() - loop_began >= 0.1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()


@given(phases=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans())))
def test_it_never_goes_back_and_never_runs_ahead(phases: list[tuple[float, float, bool]]) -> None:
    real = [0.0]
    clock = PatientClock(lambda: real[0])
    shown = clock.time()
    for passed, meant, looks in phases:
        before = shown
        real[0] += passed
        if looks:
            assert shown <= clock.time() <= shown + MOST_S + 1e-9
            shown = clock.time()
        clock.pass_phase(meant)
        assert shown <= clock.time() <= real[0] + 1e-9
        shown = clock.time()
        assert shown - before <= meant + MOST_S + 1e-9

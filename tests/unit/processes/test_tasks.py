"""Background tasks: a failure is logged, told, or followed by another try."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdcluster.processes.tasks import beside, restarted, running, watched


async def fail() -> None:
    raise RuntimeError("a bug")


async def test_a_failure_is_logged_with_its_task_and_told_to_the_owner(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    task = watched(fail(), "sweep", told.append)
    await asyncio.wait({task})
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert "sweep" in record.getMessage() and record.exc_info is not None and str(told[0]) == "a bug"


async def test_an_end_and_a_cancellation_are_no_failures(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    async with beside(asyncio.sleep(60), "waits", told.append):
        await asyncio.wait({watched(asyncio.sleep(0), "ends", told.append)})
    assert not told and not caplog.records


async def test_what_fails_begins_anew_until_its_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[int] = []
    third = asyncio.Event()

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) < 3:
            raise RuntimeError("a bug")
        third.set()
        await asyncio.sleep(60)

    async with running(work, "leases", pause_s=0.001):
        await asyncio.wait_for(third.wait(), 10.0)
    assert begun == [0, 1, 2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2 and "leases" in caplog.text


async def test_what_ends_well_does_not_begin_anew() -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    await restarted(work, "once")
    assert begun == [1]


async def test_a_block_may_fail_and_its_task_is_over() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="of the block"):
        async with beside(work(), "beside"):
            await asyncio.sleep(0)
            raise ValueError("of the block")
    assert ended.is_set()

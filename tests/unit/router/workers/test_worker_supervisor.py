"""What the supervisor of router workers waits for."""

from __future__ import annotations

import asyncio

import pytest

from pdcluster_router.workers.supervisor import _until


async def test_a_signal_while_the_workers_start_is_no_start() -> None:
    """Else the router would say that it is ready, and then drain."""
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(stop.set)
    assert await _until(stop, started) is None and started.cancelled()


async def test_workers_that_started_are_one_and_those_that_did_not_say_why() -> None:
    started = asyncio.get_running_loop().create_future()
    started.set_result(0)
    assert await _until(asyncio.Event(), started) == 0
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(RuntimeError("no port"))
    with pytest.raises(RuntimeError, match="no port"):
        await _until(asyncio.Event(), failed)

"""Long requests are prepared in threads, and no tenant takes all of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pdcluster_router.frontend.prepare_threads import PrepareThreads, prepare_threads


async def test_a_tenant_leaves_a_thread_for_others() -> None:
    threads, go_on = PrepareThreads(3), threading.Event()
    held = [asyncio.create_task(threads.run("greedy", lambda: go_on.wait(30))) for _ in range(8)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await threads.run("other", lambda: "done") == "done"
    assert not any(task.done() for task in held)
    go_on.set()
    assert await asyncio.gather(*held) == [True] * 8


async def test_what_was_cancelled_before_its_turn_does_not_begin() -> None:
    threads, go_on, begun = PrepareThreads(2), threading.Event(), list[int]()
    first = asyncio.create_task(threads.run("a", lambda: go_on.wait(30)))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run("a", lambda: begun.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    third = asyncio.create_task(threads.run("a", lambda: begun.append(3)))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, third)
    assert begun == [3]


async def test_what_was_cancelled_is_not_kept() -> None:
    """A request may be large, and its place is given back."""
    threads, go_on = PrepareThreads(2), threading.Event()
    first, *others = (asyncio.create_task(threads.run("a", lambda: go_on.wait(30))) for _ in range(50))
    await asyncio.sleep(0)
    assert threads.num_waiting == 49
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert threads.num_waiting == 0
    go_on.set()
    assert await first


async def test_a_cancelled_wait_frees_its_thread_when_the_work_ends() -> None:
    threads, go_on = PrepareThreads(2), threading.Event()
    first = asyncio.create_task(threads.run("a", lambda: go_on.wait(30)))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(threads.run("a", lambda: "done"))
    await asyncio.sleep(0)
    assert not second.done()
    go_on.set()
    assert await second == "done"


async def test_what_fails_fails_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("bad")

    assert prepare_threads() is prepare_threads()
    with pytest.raises(ValueError, match="bad"):
        await prepare_threads().run("a", fail)
    assert await prepare_threads().run("a", lambda: 1) == 1

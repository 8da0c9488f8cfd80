"""One reader's queue with deadlines."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from virtual_time import VirtualLoop

from pdcluster_router.inbox import Inbox


def run(main):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()


def test_items_come_in_order_and_at_once() -> None:
    async def main(loop):
        inbox: Inbox[int] = Inbox()
        for number in range(3):
            inbox.put(number)
        return [await inbox.get(0.0) for _ in range(3)], await inbox.get(0.5), loop.time()

    items, late, _ = run(main)
    assert items == [0, 1, 2] and late is None


def test_a_closed_inbox_leaves_no_timer_behind() -> None:
    async def main(loop):
        inbox: Inbox[int] = Inbox()
        waiting = asyncio.ensure_future(inbox.get(100.0))
        await asyncio.sleep(0)
        inbox.put(1)
        assert await waiting == 1
        assert inbox._timer is not None
        timer = inbox._timer
        inbox.close()
        return timer.cancelled()

    assert run(main)


def test_a_cancelled_wait_does_not_lose_the_next_item() -> None:
    async def main(_loop):
        inbox: Inbox[int] = Inbox()
        waiting = asyncio.ensure_future(inbox.get(100.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        inbox.put(7)
        return await inbox.get(1.0)

    assert run(main) == 7


TENTHS = st.integers(0, 50).map(lambda number: number / 10)


@given(st.lists(st.tuples(TENTHS, st.one_of(st.none(), TENTHS.map(lambda seconds: seconds + 0.05))), max_size=12))
def test_every_wait_ends_with_its_item_or_exactly_at_its_deadline(waits: list[tuple[float, float | None]]) -> None:
    """waits: (deadline of a wait, when an item comes after it began)."""

    async def main(loop):
        inbox: Inbox[int] = Inbox()
        for number, (seconds, comes) in enumerate(waits):
            began = loop.time()
            if comes is not None:
                loop.call_later(comes, inbox.put, number)
            found = await inbox.get(seconds)
            took = loop.time() - began
            if comes is not None and comes < seconds:
                assert found == number and abs(took - comes) < 1e-6
            elif comes is None or comes > seconds:
                assert found is None and abs(took - seconds) < 1e-6
            if comes is not None and found is None:
                assert await inbox.get(20.0) == number

    run(main)

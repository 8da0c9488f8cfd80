"""What operators see of requests, and that a cancelled one still gives its client one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from pdcluster.errors import Cancelled
from pdcluster_router.events import EventLog
from pdcluster_router.open_requests import OpenRequests


async def run(requests: OpenRequests, name: str, waits: asyncio.Event) -> AsyncGenerator[int, None]:
    with requests.entered(name, "tiny", 5, 0.0) as entry:
        for number in range(3):
            await waits.wait()
            with entry.outside():
                yield number


async def test_requests_are_listed_while_they_run_and_found_by_the_clients_id() -> None:
    requests, gate = OpenRequests(), asyncio.Event()
    tasks = [asyncio.create_task(anext(run(requests, name, gate))) for name in ("abc-0", "abc-1", "abd-0")]
    await asyncio.sleep(0)
    assert [entry.request for entry in requests.all()] == ["abc-0", "abc-1", "abd-0"]
    assert len(requests.matching("abc")) == 2 and len(requests.matching("abc-1")) == 1 and not requests.matching("ab")
    assert {entry.state for entry in requests.all()} == {"held"}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not len(requests)


async def test_a_waiting_request_ends_at_once_when_it_is_cancelled() -> None:
    requests, never = OpenRequests(), asyncio.Event()
    task = asyncio.create_task(anext(run(requests, "r-0", never)))
    await asyncio.sleep(0)
    assert requests.cancel("r", "too long") == 1 and requests.cancel("r", "again") == 0
    with pytest.raises(Cancelled, match="too long"):
        await task
    assert not len(requests) and not task.cancelled()


async def test_a_request_whose_client_is_being_served_ends_when_that_is_done() -> None:
    requests, gate = OpenRequests(), asyncio.Event()
    gate.set()
    events = run(requests, "r-0", gate)
    assert await anext(events) == 0
    assert requests.cancel("r-0", "enough") == 1
    await asyncio.sleep(0)  # writing to the client is not disturbed
    with pytest.raises(Cancelled, match="enough"):
        await anext(events)


async def test_a_client_that_leaves_is_not_taken_for_an_operator() -> None:
    requests, never = OpenRequests(), asyncio.Event()
    task = asyncio.create_task(anext(run(requests, "r-0", never)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_events_are_numbered_bounded_and_followed() -> None:
    log = EventLog(max_events=3)
    for number in range(5):
        log.add("node-up", f"n{number}", "joined")
    assert [event.sequence for event in log.since(0)] == [3, 4, 5]
    assert [event.subject for event in log.since(4)] == ["n4"] and log.since(5) == []
    followed = log.follow(4)
    assert (await anext(followed)).sequence == 5
    waiting = asyncio.ensure_future(anext(followed))
    await asyncio.sleep(0)
    log.add("role", "n1", "prefill becomes decode")
    assert (await waiting).kind == "role"

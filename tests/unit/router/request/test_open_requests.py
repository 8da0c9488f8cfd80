"""What operators see of requests, and that a cancelled one still gives its client one answer."""

from __future__ import annotations

import asyncio

from pdcluster.core.errors import Cancelled
from pdcluster_router.cluster.events import EventLog
from pdcluster_router.request.open_requests import OpenRequest, OpenRequests


def open_one(requests: OpenRequests, name: str, ended: list[Cancelled]) -> None:
    requests[name] = lambda: OpenRequest(name, "tiny", 5, 0.0, ended.append)


def test_requests_are_listed_while_they_run_and_found_by_the_clients_id() -> None:
    requests = OpenRequests()
    for name in ("abc-0", "abc-1", "abd-0"):
        open_one(requests, name, [])
    assert [entry.request for entry in requests.all()] == ["abc-0", "abc-1", "abd-0"]
    assert len(requests.matching("abc")) == 2 and len(requests.matching("abc-1")) == 1 and not requests.matching("ab")
    assert {entry.state for entry in requests.all()} == {"held"}
    del requests["abc-1"]
    assert [entry.request for entry in requests.matching("abc")] == ["abc-0"]


def test_all_choices_of_a_cancelled_request_end_with_the_operators_reason() -> None:
    requests, ended = OpenRequests(), list[Cancelled]()
    for name in ("abc-0", "abc-1", "abd-0"):
        open_one(requests, name, ended)
    assert requests.cancel("abc", "too long") == 2 and requests.cancel("abe", "too long") == 0
    assert [str(error) for error in ended] == [
        f"request abc-{n} was cancelled by an operator: too long" for n in (0, 1)
    ]


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

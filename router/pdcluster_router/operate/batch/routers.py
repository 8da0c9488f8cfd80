"""Routers that share a batch: which one gets a line, and what becomes of a line that one does not answer.

A line goes to the router with the fewest open ones. A router that cannot be reached or has no room is left
alone for a while that grows. After a lost connection and after an answer that may pass, a line is sent again until its
deadline, to another router where one has room. So it may be computed twice, but it is answered once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_router.operate.batch.answers import PASSING, LineAnswer, LineError, LineFailure
from pdcluster_router.operate.batch.http_client import ConnectionBroken, Reply, RouterClient
from pdcluster_router.operate.batch.lines import BatchLine
from pdcluster_router.operate.clients import TokenRefused, Unreachable

# Pauses double from the first to the longest, with chance in them.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
# The router has no room now. A line waits for it until its deadline.
WAITING = frozenset((429, 503, 529))
# Of other errors that may pass, which mostly come again.
MOST_FAULTS = 3
# The longest that a router is asked to take for one try, and what is waited beyond that.
TRY_S, SLACK_S = 600.0, 30.0
# The run ends when no router could be reached for so long.
UNREACHABLE_S = 600.0
# What a window grows by for each good answer, over its size, and the part that it keeps after a refusal.
GROWTH, KEPT = 1.0, 0.7


class Window:
    """How many lines a router may have open: at most `most`, fewer after refusals."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.size = float(most)
        self._clock = clock
        self._shrunk_at = clock()

    def has_room(self, num_open: int) -> bool:
        return num_open < max(int(self.size), 1)

    def grow(self) -> None:
        self.size = min(self.size + GROWTH / self.size, float(self.most))

    def shrink(self) -> None:
        """Once for the refusals of a second: they come together."""
        if self._clock() - self._shrunk_at >= 1.0:
            self._shrunk_at = self._clock()
            self.size = max(self.size * KEPT, 1.0)


@dataclass(slots=True)
class _Standing:
    """What is known of a router. The clock's time until which it is left alone, and failures in a row."""

    client: RouterClient
    window: Window
    alone_until: float = 0.0
    num_failed: int = 0


class RouterPool:
    """Sends lines. Owned by an event loop."""

    def __init__(
        self,
        clients: Sequence[RouterClient],
        most_open: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        unreachable_s: float = UNREACHABLE_S,
    ) -> None:
        """most_open: lines that one router may have open."""
        self._routers = [_Standing(client, Window(most_open, clock)) for client in clients]
        self._deadline_s, self._clock = deadline_s, clock
        self._freed = asyncio.Event()
        self._unreachable_s = unreachable_s
        self._heard_at: float | None = None
        self._began_at = clock()
        self.num_sent_again = 0

    async def answer(self, line: BatchLine) -> LineAnswer | LineFailure:
        """Raises Unreachable and TokenRefused, which end the run."""
        ends_at, num_tries, num_faults = self._clock() + self._deadline_s, 0, 0
        router: _Standing | None = None
        while True:
            router = await self._with_room(router)
            found = await self._try(router, line, max(ends_at - self._clock(), 0.001))
            self._freed.set()
            wait_s, num_tries = _pause_s(num_tries), num_tries + 1
            if isinstance(found, Reply):
                answer = LineAnswer(line.custom_id, found.status, found.header(b"x-request-id"), bytes(found.body))
                num_faults += found.status not in WAITING
                is_final = found.status not in PASSING or found.header(b"x-should-retry") == "false"
                if is_final or num_faults == MOST_FAULTS:
                    return answer
                wait_s = max(wait_s, _retry_after_s(found)) if found.status in WAITING else wait_s
            if self._clock() + wait_s >= ends_at:
                return self._too_late(line, found)
            self.num_sent_again += 1
            await asyncio.sleep(wait_s)

    def _too_late(self, line: BatchLine, found: Reply | ConnectionBroken) -> LineAnswer | LineFailure:
        if isinstance(found, Reply):
            return LineAnswer(line.custom_id, found.status, found.header(b"x-request-id"), bytes(found.body))
        message = f"no router answered it within {self._deadline_s:g} s; the last try: {found}"
        return LineFailure(line.custom_id, LineError("batch_expired", message))

    async def _try(self, router: _Standing, line: BatchLine, left_s: float) -> Reply | ConnectionBroken:
        try_s = min(left_s, TRY_S)
        headers = b"x-request-deadline-s: %.3f\r\n" % try_s
        if line.url == "/v1/messages":
            headers += b"anthropic-version: 2023-06-01\r\n"
        try:
            reply = await router.client.post(line.url, headers, line.body, try_s + SLACK_S)
        except ConnectionBroken as error:
            if error.was_open:
                self._heard_at = self._clock()
            self._leave_alone(router)
            return error
        self._heard_at = self._clock()
        if reply.status in (401, 403):
            raise TokenRefused(
                f"{router.client.address} does not take the API key; pass the right one with --key-file FILE or "
                "PDCTL_KEY_FILE"
            )
        if reply.status in WAITING:
            router.window.shrink()
            self._leave_alone(router, _retry_after_s(reply))
        else:
            router.num_failed = 0
            router.window.grow()
        return reply

    def _leave_alone(self, router: _Standing, least_s: float = 0.0) -> None:
        """For a pause that grows. Its open lines fail together, and count once."""
        now = self._clock()
        if now >= router.alone_until:
            router.num_failed += 1
            router.alone_until = now + max(_pause_s(router.num_failed - 1), least_s)

    async def _with_room(self, last: _Standing | None) -> _Standing:
        """The router for the next try, after that of the last one. Raises Unreachable when none answers for long, or
        none did at the start.
        """
        while True:
            now = self._clock()
            reachable = [router for router in self._routers if router.alone_until <= now]
            free = [router for router in reachable if router.window.has_room(router.client.num_open)]
            if free:
                return min(free, key=lambda router: (router is last, router.client.num_open))
            if not reachable:
                self._check_heard(now)
            self._freed.clear()
            waits = [router.alone_until - now for router in self._routers if router.alone_until > now]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=LONGEST_PAUSE_S)):
                    await self._freed.wait()

    def _check_heard(self, now: float) -> None:
        names = ", ".join(router.client.address for router in self._routers)
        way_out = "pass the routers' HTTP addresses with --api or PDCTL_API, and --ca FILE where they speak TLS"
        if self._heard_at is None and all(router.num_failed >= 3 for router in self._routers):
            raise Unreachable(f"no router answers at {names}; {way_out}")
        if now - (self._heard_at or self._began_at) > self._unreachable_s:
            raise Unreachable(
                f"no router answered at {names} for {self._unreachable_s:.0f} s; run the same command again to go on"
            )


def _pause_s(num_before: int) -> float:
    return min(FIRST_PAUSE_S * 2.0 ** min(num_before, 16), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


def _retry_after_s(reply: Reply) -> float:
    """Of the header; 0 where there is none that can be read."""
    try:
        found = float(reply.header(b"retry-after"))
    except ValueError:
        return 0.0
    return min(max(found, 0.0), LONGEST_PAUSE_S)

"""What the page shows, read from the routers once a second for all who watch, and not at all while nobody does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from pdcluster.core.errors import PdclusterError
from pdcluster.processes.tasks import running
from pdcluster_router.operate import reading, top
from pdcluster_router.operate.clients import AdminClients

EVERY_S = 1.0
# Looks that rates are over.
RATE_LOOKS = 5
# Events in one message.
MAX_EVENTS = 200
# Past every event.
BEYOND = 2**62


class ClusterFeed:
    """Owned by the console's event loop. Routers are asked in a thread.

    open_clients: opens connections; its argument is told of routers that do not answer.
    """

    def __init__(self, open_clients: Callable[[Callable[[str], None]], AdminClients]) -> None:
        self._open_clients = open_clients
        self._watchers: set[Callable[[bytes], None]] = set()
        self._is_watched = asyncio.Event()
        self._last = b""

    @asynccontextmanager
    async def running(self) -> Any:
        """Reads while the block runs."""
        async with running(self._run, "console feed"):
            yield

    def watch(self, watcher: Callable[[bytes], None]) -> None:
        """Tell it of each look, as JSON, and of the last one now."""
        self._watchers.add(watcher)
        self._is_watched.set()
        if self._last:
            watcher(self._last)

    def leave(self, watcher: Callable[[bytes], None]) -> None:
        """Idempotent."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._is_watched.clear()
            self._last = b""

    async def _run(self) -> None:
        looks = _Looks(self._open_clients)
        try:
            while True:
                await self._is_watched.wait()
                began = time.monotonic()
                self._last = msgspec.json.encode(await asyncio.to_thread(looks.next))
                for watcher in list(self._watchers):
                    watcher(self._last)
                await asyncio.sleep(max(EVERY_S - (time.monotonic() - began), 0.1))
        finally:
            await asyncio.to_thread(looks.close)


class _Looks:
    """Looks at the cluster, one after another. Used by one thread at a time."""

    def __init__(self, open_clients: Callable[[Callable[[str], None]], AdminClients]) -> None:
        self._open_clients = open_clients
        self._clients: AdminClients | None = None
        # Looks of the last seconds: one is too short for rates.
        self._before: deque[top.ClusterLook] = deque(maxlen=RATE_LOOKS)
        # The last event of each router.
        self._last: dict[str, reading.Row] = {}
        self._kept: list[reading.Row] = []

    def next(self) -> dict[str, Any]:
        """Never raises for what routers do: the page shows the error."""
        try:
            if self._clients is None:
                self._clients = self._open_clients(lambda line: None)
            return self._look(self._clients)
        except PdclusterError as error:
            self.close()  # the name may stand for other addresses by now
            return {"error": str(error)}

    def close(self) -> None:
        clients, self._clients = self._clients, None
        self._before.clear()
        if clients is not None:
            clients.close()

    def _look(self, clients: AdminClients) -> dict[str, Any]:
        now = top.look(clients)
        figures = top.figures(now, self._before[0] if self._before else None)
        self._before.append(now)
        self._kept = [*self._kept, *self._new_events(clients)][-MAX_EVENTS:]
        return {
            "figures": figures,
            "requests": reading.requests(clients),
            "policies": reading.policies(clients),
            "caches": reading.caches(clients),
            "events": self._kept,
            "warnings": list(map(str, clients.silent.values())),
        }

    def _new_events(self, clients: AdminClients) -> list[reading.Row]:
        """Events since the last look.

        A router that was started again counts from 1. So its last known event is asked for, too: where that is another
        one now, all of its events are new.
        """
        since = {router: int(str(last["sequence"])) for router, last in self._last.items()}
        found = reading.events(clients, {router: number - 1 for router, number in since.items()})
        is_same = {router: any(event == last for event in found) for router, last in self._last.items()}
        began = {router for router, last in self._last.items() if not is_same[router] and router not in clients.silent}
        fresh = [event for event in found if event["router"] not in began and event not in self._last.values()]
        if began:
            again = reading.events(clients, {router: BEYOND for router in since if router not in began})
            fresh += [event for event in again if event["router"] in began]
        for event in fresh:
            self._last[str(event["router"])] = event
        return sorted(fresh, key=lambda event: float(str(event["at"])))

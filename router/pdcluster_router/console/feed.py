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
from pdcluster_router.operate import reading, top
from pdcluster_router.operate.clients import AdminClients

EVERY_S = 1.0
# Looks that rates are over.
RATE_LOOKS = 5
# Events in one message.
MAX_EVENTS = 200


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
        task = asyncio.create_task(self._run(), name="console feed")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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
        self._warnings: list[str] = []
        # Number of the last event of each router.
        self._events: dict[str, int] = {}
        self._kept: list[reading.Row] = []

    def next(self) -> dict[str, Any]:
        """Never raises for what routers do: the page shows the error."""
        self._warnings = []
        try:
            if self._clients is None:
                self._clients = self._open_clients(lambda line: self._warnings.append(line))
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
        for event in reading.events(clients, self._events):
            self._events[str(event["router"])] = int(str(event["sequence"]))
            self._kept.append(event)
        self._kept = self._kept[-MAX_EVENTS:]
        return {
            "figures": figures,
            "requests": reading.requests(clients),
            "policies": reading.policies(clients),
            "caches": reading.caches(clients),
            "events": self._kept,
            "warnings": list(self._warnings),
        }

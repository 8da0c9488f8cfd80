"""Keeps what a process has read from files as they are, such as tenants. A broken change leaves what was before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from pdcluster.core.errors import ConfigError
from pdcluster.settings.changed_files import ChangedFiles
from pdcluster.telemetry.metrics import FileMetrics
from pdcluster_router.cluster.events import EventLog

log = logging.getLogger(__name__)

T = TypeVar("T")

# Between two looks. A change is in force after two at most.
LOOK_S = 1.0


class FileChanges:
    """What became of changes of files.

    metrics, events: None where a process has none.
    """

    def __init__(self, metrics: FileMetrics | None = None, events: EventLog | None = None) -> None:
        self._metrics, self._events = metrics, events
        # By name of what was read: why its latest change is not in force.
        self.problems: dict[str, str] = {}

    def warnings(self) -> list[str]:
        """For an operator, without the error: whoever reaches the API may read them."""
        return [
            f"the files of {name} changed and cannot be used, so what was read before stays in force; the log and "
            "pdctl events say why"
            for name in self.problems
        ]

    async def follow(self, name: str, files: ChangedFiles[T], use: Callable[[T], object]) -> None:
        """Look until cancelled.

        name: a word that metrics have.
        use: gets what a change holds, in this loop.
        """
        if self._metrics is not None:
            self._metrics.watch(name)
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = await asyncio.to_thread(files.look)
                if found is not None:
                    use(found)
                    self._used(name)
            except ConfigError as error:
                self._kept(name, f"{', '.join(map(str, files.files))}: {error}")

    def _used(self, name: str) -> None:
        self.problems.pop(name, None)
        log.info("%s were read again, as their files changed", name)
        if self._metrics is not None:
            self._metrics.read_again(name)
        if self._events is not None:
            self._events.add("files-read", name, "read again, as the files changed")

    def _kept(self, name: str, error: str) -> None:
        if self.problems.get(name) == error:
            return  # it was tried again
        self.problems[name] = error
        log.error("%s stay as they were before their files changed: %s", name, error)
        if self._metrics is not None:
            self._metrics.kept(name)
        if self._events is not None:
            self._events.add("files-refused", name, f"what was read before stays in force: {error}")

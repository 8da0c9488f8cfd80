"""Events of the cluster as one router saw them, in a bounded log.

A reader starts at any point and may wait for more. It is neither a log file nor a metric.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

MAX_EVENTS = 10_000

Kind = Literal[
    "node-up",
    "node-lost",
    "node-left",
    "node-refused",
    "node-stuck",
    "node-answers",
    "role",
    "cordon",
    "uncordon",
    "drain",
    "moved",
    "drained",
    "policy",
    "cancel",
    "auto-role",
    "adapter",
    "weights",
    "pause",
    "resume",
    "sleep",
    "wake",
    "files-read",
    "files-refused",
]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the cluster."""

    # Counts this router's events from 1.
    sequence: int
    # Unix seconds.
    at: float
    kind: Kind
    # The node or request it is about; "" for the router.
    subject: str
    message: str


class EventLog:
    """A bounded log of events. Owned by the router's event loop.

    It keeps the newest `max_events`.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)
        self._last = 0
        self._added = asyncio.Event()

    def add(self, kind: Kind, subject: str, message: str) -> None:
        self._last += 1
        self._events.append(Event(self._last, time.time(), kind, subject, message))
        self._added.set()
        self._added = asyncio.Event()

    def since(self, sequence: int) -> list[Event]:
        """The events after `sequence` that the log still has; 0 for all."""
        num_new = min(max(self._last - sequence, 0), len(self._events))
        return list(islice(self._events, len(self._events) - num_new, None))

    async def kept(self, sequence: int) -> AsyncIterator[Event]:
        """As `since`, but as a stream that ends."""
        for event in self.since(sequence):
            yield event

    async def follow(self, sequence: int) -> AsyncIterator[Event]:
        """Events after `sequence`, then each new one.

        A reader that falls behind by more than the log holds misses events. Their numbers show the gap.
        """
        while True:
            added = self._added
            for event in self.since(sequence):
                sequence = event.sequence
                yield event
            await added.wait()

"""What happened in the cluster, as one router saw it: a bounded log that can be read from any point and waited on. Not
a log file, not metrics."""

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
    "role",
    "cordon",
    "uncordon",
    "drain",
    "drained",
    "policy",
    "cancel",
    "auto-role",
]


@dataclass(frozen=True, slots=True)
class Event:
    """sequence counts the events of this router from 1; at: Unix seconds; subject: the node or request it is about, ""
    for the router."""

    sequence: int
    at: float
    kind: Kind
    subject: str
    message: str


class EventLog:
    """Owned by the router's event loop. Of more than max_events the oldest are dropped."""

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
        """Those after `sequence` that are still kept; 0 for all."""
        num_new = min(max(self._last - sequence, 0), len(self._events))
        return list(islice(self._events, len(self._events) - num_new, None))

    async def kept(self, sequence: int) -> AsyncIterator[Event]:
        """Those after `sequence` that are still kept, as a stream that ends."""
        for event in self.since(sequence):
            yield event

    async def follow(self, sequence: int) -> AsyncIterator[Event]:
        """Those after `sequence`, and then each new one. A reader who falls behind by more than the log holds misses
        events: their numbers tell."""
        while True:
            added = self._added
            for event in self.since(sequence):
                sequence = event.sequence
                yield event
            await added.wait()

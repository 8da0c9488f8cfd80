"""What waits for a thread that carries out writes to one peer, until it is told to end or has failed. No sockets, no policy."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from pdcluster.transfer.backends.ledger import Doorbell

W = TypeVar("W")


class Inbox(Generic[W]):
    """`add` and `end` are for any thread, the rest for the one whose inbox it is. It polls `fd`, and works on the first write before it takes it
    out, so that whatever ends the thread, `fail` hands back each write that it had not done with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doorbell = Doorbell()
        self.fd = self._doorbell.fd
        self._waiting: deque[W] = deque()
        self.is_ending = False
        self.failed_at: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, write: W) -> bool:
        """False when nobody would carry it out."""
        with self._lock:
            if self.is_ending or self.failed_at is not None:
                return False
            self._waiting.append(write)
        self._doorbell.ring()
        return True

    def end(self) -> None:
        self.is_ending = True
        self._doorbell.ring()

    def first(self) -> W:
        return self._waiting[0]

    def take(self) -> W:
        with self._lock:
            return self._waiting.popleft()

    def drop(self, write: W) -> None:
        with self._lock:
            self._waiting.remove(write)

    def was_heard(self) -> None:
        self._doorbell.clear()

    def fail(self) -> list[W]:
        """It takes no more; those that were left."""
        with self._lock:
            self.failed_at = time.monotonic()
            left, self._waiting = list(self._waiting), deque()
        self._doorbell.close()
        return left

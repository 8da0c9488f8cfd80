"""What a library may still read of our source pages after its pump released it. For a staged backend that sends
straight from the pool.

A write whose outcome is late is over for its pump, but its pages are not free: read later, they would hold another
request's KV. So every answer about a write goes through here. A final one waits until the library says that each of
its batches ended. Until then the write is PENDING, and after a while UNKNOWN, which keeps the pages with their
ticket. Neither a timer nor an error of the library frees them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdcluster.transfer.backends.base import Handle, WriteStatus
from pdcluster.transfer.backends.ledger import Writes
from pdcluster.transfer.backends.staged.staging import TransferLibrary

LOG = logging.getLogger(__name__)

# The library's final answers on a batch: it no longer reads its source.
ENDED = frozenset({WriteStatus.DONE, WriteStatus.LOST})


@dataclass(slots=True)
class _Held:
    """A write that the library may still read.
    answer: its result once nothing reads its source; None while its pump still has some of it.
    has_failed: the library raised an error when asked.
    """

    since: float
    batches: list[int] = field(default_factory=list)
    answer: WriteStatus | None = None
    is_told: bool = False
    has_failed: bool = False


class SourceReads:
    """For any thread. Only this class polls a batch given to `keep`, because the library forgets it with its final
    answer.
    """

    def __init__(
        self, engine: TransferLibrary, writes: Writes, unknown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._writes, self._unknown_s, self._clock = engine, writes, unknown_s, clock
        self._lock = threading.Lock()
        self._held: dict[Handle, _Held] = {}

    def __len__(self) -> int:
        """Writes whose source may still be read."""
        return len(self._held)

    def keep(self, handle: Handle, batches: Iterable[int], since: float) -> None:
        """Keep these unfinished batches of a write, submitted at `since`."""
        with self._lock:
            held = self._held.setdefault(handle, _Held(since))
            held.since = min(held.since, since)
            held.batches += batches

    def settle(self, handle: Handle, status: WriteStatus, digest: int | None = None) -> None:
        """Record that a write is over for its pump. The first such answer counts."""
        with self._lock:
            held = self._held.get(handle)
            if held is not None:
                held.answer = held.answer or status
        if held is None:
            self._writes.settle(handle, status, digest)
        else:
            self.look(handle)

    def look(self, handle: Handle) -> None:
        """Poll the kept batches of a write and act on what changed."""
        if handle not in self._held:
            return
        with self._lock:
            held = self._held.get(handle)
            if held is None:
                return
            held.batches = [batch for batch in held.batches if not self._has_ended(held, batch)]
            self._tell(handle, held)

    def _has_ended(self, held: _Held, batch: int) -> bool:
        """Whether a batch has ended. An error of the library, of any kind, is not a final answer."""
        try:
            return self._engine.check(batch) in ENDED
        except Exception as error:
            if not held.has_failed:
                LOG.warning(
                    "the transfer library does not say what became of a write, whose source pages stay as they are "
                    "until it does: %s",
                    error,
                )
            held.has_failed = True
            return False

    def _tell(self, handle: Handle, held: _Held) -> None:
        if held.answer is None:
            return
        if not held.batches:
            del self._held[handle]
            self._writes.settle(handle, held.answer)
        elif not held.is_told and self._clock() - held.since >= self._unknown_s:
            held.is_told = True
            self._writes.settle(handle, WriteStatus.UNKNOWN)

    def end(self) -> None:
        """The library is closed: its threads have ended and nothing reads any source. Nobody gives it work now."""
        with self._lock:
            for handle, held in list(self._held.items()):
                held.batches.clear()
                held.answer = held.answer or WriteStatus.FAILED
                self._tell(handle, held)

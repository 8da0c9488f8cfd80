"""What a backend's mover threads share with the backend's own thread: doorbell, write handles, arrivals, permits,
counters.

Any thread may use every class here. No sockets, no policy.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import Arrival, Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.layout.runs import cover, span_table
from pdcluster.transfer.layout.spans import Spans

FINAL = frozenset({WriteStatus.DONE, WriteStatus.FAILED, WriteStatus.REFUSED, WriteStatus.LOST})


def level_of_end(error: Exception, *work: object) -> int:
    """The log level for the end of a connection. work: what it still had to do; without work, nobody loses anything
    when the peer ends it, as when a whole cluster stops. A connection that never came about had no work yet, and writes
    that come too late for it report no reason.
    """
    return logging.INFO if isinstance(error, ConnectionResetError) and not any(work) else logging.WARNING


def start_or_release(thread: threading.Thread, peer: Peer, release: Callable[[], object]) -> None:
    """Start a thread that writes to this peer. When the process gets no thread, call `release` and raise
    PeerUnreachable.
    """
    try:
        thread.start()
    except RuntimeError as error:
        release()
        raise PeerUnreachable(
            f"no thread for writes to {peer.node}: {error}; is this process at its limit of threads?"
        ) from error


class Doorbell:
    """An eventfd: any thread calls `ring`, the owner polls `fd`, and only `clear` reads it.

    A bell that rings is not written again, and a silent one is not read, because every system call at the end of a
    transfer delays its Commit. `ring` writes outside the lock: a write wakes the owner, which would then wait for the
    lock.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        # Under the lock: whether there is something to read, or will be at once.
        self._rings = False
        # Under the lock: how many threads are about to write.
        self._ringers = 0
        # Under the lock: the descriptor, when it closes after the last of them.
        self._closing = -1

    def ring(self) -> None:
        with self._lock:
            if self.fd < 0 or self._rings:
                return
            self._rings = True
            self._ringers += 1
            fd = self.fd
        os.eventfd_write(fd, 1)
        with self._lock:
            self._ringers -= 1
            self._let_go()

    def clear(self) -> None:
        with self._lock:
            if not self._rings or self.fd < 0:
                return
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                return  # it is about to ring, so the next wait ends at once
            self._rings = False

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                self._closing, self.fd = self.fd, -1
            self._let_go()

    def _let_go(self) -> None:
        """A descriptor that threads write to must not become another file's."""
        if self._closing >= 0 and not self._ringers:
            os.close(self._closing)
            self._closing = -1


class Writes:
    """States of writes by handle."""

    def __init__(self, doorbell: Doorbell, clock: Callable[[], float] = time.monotonic) -> None:
        self._doorbell = doorbell
        self._clock = clock
        # When a write began; once it is done, how long it took.
        self._times: dict[Handle, float] = {}
        self._lock = threading.Lock()
        self._states: dict[Handle, WriteStatus] = {}
        self._digests: dict[Handle, int] = {}
        self._next = 1

    def new(self) -> Handle:
        with self._lock:
            handle = Handle(self._next)
            self._next += 1
            self._states[handle] = WriteStatus.PENDING
            self._times[handle] = self._clock()
        return handle

    def settle(
        self,
        handle: Handle,
        status: WriteStatus,
        digest: int | None = None,
        *,
        quietly: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Record an answer; the first final one stays.
        digest: of the payload of a write that is DONE.
        quietly: without ringing, because more answers follow soon.
        seconds: how long it took, where that is known better than from `new` until now.
        """
        with self._lock:
            if self._states.get(handle) in FINAL or handle not in self._states:
                return
            self._states[handle] = status
            if status in FINAL:
                self._times[handle] = seconds if seconds is not None else self._clock() - self._times[handle]
            if digest is not None:
                self._digests[handle] = digest
        if not quietly:
            self._doorbell.ring()

    def poll(self, handle: Handle) -> WriteStatus:
        with self._lock:
            status = self._states[handle]
            if status in FINAL:
                del self._states[handle]
            if status in FINAL and status is not WriteStatus.DONE:
                del self._times[handle]
        return status

    def take_digest(self, handle: Handle) -> int | None:
        with self._lock:
            return self._digests.pop(handle, None)

    def take_duration(self, handle: Handle) -> float | None:
        with self._lock:
            return self._times.pop(handle, None)


class Arrivals:
    """What landed, until the owner takes it."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._arrivals: deque[Arrival] = deque()

    def add(self, stamp: Stamp, digest: int | None = None, spans: Spans = (), region: int = 0) -> None:
        self._arrivals.append(Arrival(stamp, digest, spans, region))
        self._doorbell.ring()

    def take(self) -> list[Arrival]:
        """All arrivals so far. Clears the doorbell first, so that a later arrival rings again."""
        self._doorbell.clear()
        taken = []
        while self._arrivals:
            taken.append(self._arrivals.popleft())
        return taken


class Counts:
    """Counters by reason."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, reason: str, amount: int = 1) -> None:
        with self._lock:
            self.by_reason[reason] += amount


class Permits:
    """The writes that are allowed now: at most one permit for each nonce and region."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._lock = threading.Lock()
        # By nonce, then by region. Inner dicts are replaced, never changed, so that readers need no lock.
        self._permits: dict[int, dict[int, Permit]] = {}

    def grant(self, permit: Permit) -> None:
        with self._lock:
            self._permits[permit.nonce] = {**self._permits.get(permit.nonce, {}), permit.region: permit}

    def revoke(self, nonce: int) -> bool:
        """Forget all permits of a nonce. False when there was none."""
        with self._lock:
            return self._permits.pop(nonce, None) is not None

    def revoke_writer(self, writer: Peer) -> None:
        with self._lock:
            for nonce, regions in list(self._permits.items()):
                kept = {region: permit for region, permit in regions.items() if permit.writer != writer}
                if kept:
                    self._permits[nonce] = kept
                else:
                    del self._permits[nonce]

    def is_current(self, permit: Permit) -> bool:
        return self._permits.get(permit.nonce, {}).get(permit.region) is permit

    def find(self, writer: Peer, nonce: int, region: int, spans: Spans) -> Permit | None:
        """The permit that allows `writer` to write all the spans of `region`. None, and counted by reason, when there
        is none.
        """
        regions = self._permits.get(nonce, {})
        permit = regions.get(region)
        if not regions:
            self._counts.add("unknown_nonce")
        elif all(each.writer != writer for each in regions.values()):
            self._counts.add("wrong_writer")
        elif permit is None or permit.writer != writer or not cover(permit.ranges, span_table(spans)):
            self._counts.add("outside_permit")
        else:
            return permit
        return None


def is_inside(region: Region, offset: int, nbytes: int) -> bool:
    return offset >= 0 and nbytes > 0 and offset + nbytes <= region.nbytes


def memory_of(region: Region) -> memoryview:
    """The region's bytes, writable. The caller keeps the region mapped while the view lives."""
    return memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")


# The queue of a thread that carries out writes to one peer, until it must end or has failed. No sockets, no policy.

W = TypeVar("W")


class Inbox(Generic[W]):
    """Any thread calls `add` and `end`; the owning thread calls the rest and polls `fd`. The owner works on the first
    write before it takes it out. So `fail` returns every unfinished write, whatever ended the thread.
    """

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
        """Queue a write. False when no thread would carry it out."""
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
        """Close the inbox and return the remaining writes."""
        with self._lock:
            self.failed_at = time.monotonic()
            left, self._waiting = list(self._waiting), deque()
        self._doorbell.close()
        return left

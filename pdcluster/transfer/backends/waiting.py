"""Waiting for fractions of a millisecond. For backends' threads.

`select` knows such times but no descriptor above 1023, `poll` takes any descriptor but whole milliseconds; ppoll of the C library takes both. `Pace`
says how long to leave a library alone that must be asked whether it is done: looking takes time of the core that does the work.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select

LEAST_S, MOST_S = 0.0002, 0.001
"""Between two looks."""
FIRST_BYTE_S = 0.3e-9
"""A second for 3 GB, before anything is known."""
NEW_SHARE = 0.2
EARLY_SHARE = 0.8
"""Of the time that is left by what is known, the part that is waited: late looks can so not add up to what is known."""
LATE_SHARE = 0.25
"""Of the time that it is late by."""


class _Entry(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Waiter:
    """Waits until one of its descriptors can be read, or is at its end. Used by one thread."""

    def __init__(self, *fds: int) -> None:
        self._ppoll = ctypes.CDLL(None, use_errno=True).ppoll
        self._fds = fds
        self._entries = (_Entry * len(fds))(*(_Entry(fd, select.POLLIN, 0) for fd in fds))
        self._time = _Time()

    def wait(self, timeout_s: float | None, wanted: tuple[bool, ...] | None = None) -> tuple[bool, ...]:
        """Which of them are ready; None: without a deadline. wanted: those whose news is not to end the wait are False."""
        until = None
        if timeout_s is not None:
            self._time.seconds, self._time.nanoseconds = divmod(int(timeout_s * 1e9), 1_000_000_000)
            until = ctypes.byref(self._time)
        if wanted is not None:
            for entry, fd, is_wanted in zip(self._entries, self._fds, wanted, strict=True):
                entry.fd = fd if is_wanted else -1
        count = self._ppoll(self._entries, len(self._entries), until, None)
        if count < 0 and (reason := ctypes.get_errno()) != errno.EINTR:
            raise OSError(reason, os.strerror(reason))
        return tuple(count > 0 and bool(entry.revents) for entry in self._entries)


class Pace:
    """How fast the work is done that one looks after, by what was seen of it."""

    def __init__(self) -> None:
        self._byte_s = FIRST_BYTE_S

    def done(self, age_s: float, nbytes: int) -> None:
        """So many bytes, all that was there when the last of them came, were done in so long."""
        self._byte_s += NEW_SHARE * (age_s / nbytes - self._byte_s)

    def next_look_s(self, age_s: float, nbytes: int) -> float:
        """When work of so many bytes, begun so long ago, is worth a look: the later it is, the more seldom."""
        left = nbytes * self._byte_s - age_s
        return min(MOST_S, max(LEAST_S, left * EARLY_SHARE, -left * LATE_SHARE))

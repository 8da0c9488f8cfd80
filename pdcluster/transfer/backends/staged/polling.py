"""Waits of fractions of a millisecond, and when to poll a library next.

`select` knows such times but no descriptor above 1023. `poll` takes any descriptor but whole milliseconds. ppoll of
the C library takes both. Polling takes time of the core that does the work, so `WorkPace` predicts when it is worth it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select

# Between two polls.
LEAST_S, MOST_S = 0.0002, 0.001
# Seconds per byte (3 GB/s) before anything is measured.
FIRST_BYTE_S = 0.3e-9
NEW_SHARE = 0.2
# The part of the predicted remaining time to wait, so that late polls cannot inflate the prediction.
EARLY_SHARE = 0.8
# Of the time by which it is late.
LATE_SHARE = 0.25


class _Entry(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class DescriptorWaiter:
    """Waits until one of its descriptors is readable or at its end. For one thread."""

    def __init__(self, *fds: int) -> None:
        self._ppoll = ctypes.CDLL(None, use_errno=True).ppoll
        self._fds = fds
        self._entries = (_Entry * len(fds))(*(_Entry(fd, select.POLLIN, 0) for fd in fds))
        self._time = _Time()

    def wait(self, timeout_s: float | None, wanted: tuple[bool, ...] | None = None) -> tuple[bool, ...]:
        """The ready descriptors; None: no deadline. wanted: descriptors marked False do not end the wait."""
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


class WorkPace:
    """How fast the polled work is done, as measured."""

    def __init__(self) -> None:
        self._byte_s = FIRST_BYTE_S

    def done(self, age_s: float, nbytes: int) -> None:
        """Record that `nbytes`, all that was there when the last came, took `age_s`."""
        self._byte_s += NEW_SHARE * (age_s / nbytes - self._byte_s)

    def next_look_s(self, age_s: float, nbytes: int) -> float:
        """When to poll work of so many bytes and such an age again. The later it is, the longer the pause."""
        left = nbytes * self._byte_s - age_s
        return min(MOST_S, max(LEAST_S, left * EARLY_SHARE, -left * LATE_SHARE))

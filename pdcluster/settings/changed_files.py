"""Files that a process reads again when they change, such as those that Kubernetes, certbot or an editor replaces.

1. A change is read once two looks found the same, so that a file which is being written is not read.
2. What cannot be read changes nothing. It is reported, tried again every LOOKS_AGAIN looks, and when the files change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

# Of each file: device, inode, size, and times of change of its bytes and of its mode. None: it is missing.
Stamp = tuple[tuple[int, ...] | None, ...]
# Looks until files that could not be read are read again, though they did not change: the reason may have been another.
LOOKS_AGAIN = 30


class ChangedFiles(Generic[T]):
    """Used by one thread at a time."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        """read: raises ConfigError.

        Raises ConfigError.
        """
        self.files, self._read = tuple(files), read
        self._known = self._stamp()
        self._seen = self._known
        # Looks since the last one that could not be read; None: it could.
        self._looks: int | None = None
        # As they are now, read before the first look.
        self.first = read()

    def look(self) -> T | None:
        """What the files hold, where that changed. Raises ConfigError where a change cannot be read."""
        before, self._seen = self._seen, self._stamp()
        if self._looks is not None:
            self._looks += 1
        is_due = self._seen != self._known or (self._looks or 0) >= LOOKS_AGAIN
        if not is_due or self._seen != before:
            return None
        self._known, self._looks = self._seen, 0
        found = self._read()
        self._looks = None
        return found

    def _stamp(self) -> Stamp:
        """A link counts as what it points to: Kubernetes swaps a link for all files of a Secret."""
        return tuple(map(_stamp_of, self.files))


def _stamp_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)
    except OSError:  # reading says why
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

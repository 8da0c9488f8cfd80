"""Files that a process reads again when they change, such as those that Kubernetes, certbot or an editor replaces.

1. A change is read once two looks found the same, so that a file which is being written is not read.
2. What cannot be read changes nothing. It is reported once, and again when the files change again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

# Of each file: device, inode, size and time of change. None: it is missing.
Stamp = tuple[tuple[int, int, int, int] | None, ...]


class ChangedFiles(Generic[T]):
    """Used by one thread at a time."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        """read: raises ConfigError.

        Raises ConfigError.
        """
        self.files, self._read = tuple(files), read
        self._known = self._stamp()
        self._seen = self._known
        # As they are now, read before the first look.
        self.first = read()

    def look(self) -> T | None:
        """What the files hold, where that changed. Raises ConfigError where a change cannot be read."""
        before, self._seen = self._seen, self._stamp()
        if self._seen == self._known or self._seen != before:
            return None
        self._known = self._seen
        return self._read()

    def _stamp(self) -> Stamp:
        """A link counts as what it points to: Kubernetes swaps a link for all files of a Secret."""
        return tuple(map(_stamp_of, self.files))


def _stamp_of(file: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:  # reading says why
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

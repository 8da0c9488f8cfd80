"""Memory for large tables: all zeros, and the system gives and takes it a page at a time, never all at once.

numpy asks for huge pages for what is large. Rows that are spread over a new table then touch every one of them within a few thousand rows, and the
system zeroes hundreds of megabytes in one slice of work: 700 ms for a table of 23 M slots, where small pages take a few. Letting go of a large table
in one piece takes long as well, 130 ms, so `clear` gives back the part that is no longer of use.

Where the system knows no advice about memory, all works the same, only more comes and goes at once.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray


class ZeroedMemory:
    def __init__(self, num_bytes: int) -> None:
        self._pages = _anonymous(num_bytes)
        self.octets: NDArray[np.uint8] = np.frombuffer(self._pages, np.uint8)

    def clear(self, start: int, stop: int) -> None:
        """Bytes from start up to stop are zero again; the system gets back the pages that lie between."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform != "linux" or first >= last:  # elsewhere pages that are not needed may keep what they held
            self.octets[start:stop] = 0
            return
        self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.octets[start:first] = 0
        self.octets[last:stop] = 0


def _anonymous(num_bytes: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that was built without huge pages knows nothing of them, and gives none
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages

"""Another process's shared memory, mapped here to be written. Which bytes may be written is the caller's business."""

from __future__ import annotations

import ctypes
import mmap

POPULATE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23
"""From Linux 5.14 on; the mmap module has no name for it."""


class MappedMemory:
    """A reader's region, mapped here. Its memory exists already; `populate` enters it into our page table many pages at a time, which the copy
    would otherwise do one fault per page."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # a forked child must not outlive the fence
        self.nbytes = nbytes
        anchor = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(anchor)
        self._entered = bytearray(-(-nbytes // POPULATE_BYTES))
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # holds no GIL, unlike mmap's own
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._next = 0
        self.is_populated = False

    def populate(self, offset: int, nbytes: int) -> None:
        """What of these bytes was not entered yet. A kernel that can not is left to fault pages in."""
        for block in range(offset // POPULATE_BYTES, -(-(offset + nbytes) // POPULATE_BYTES)):
            if not self._entered[block]:
                self._entered[block] = 1
                start = block * POPULATE_BYTES
                self._madvise(self.address + start, min(POPULATE_BYTES, self.nbytes - start), MADV_POPULATE_WRITE)

    def populate_more(self) -> bool:
        """The next block that was not entered; False when all were."""
        block = self._entered.find(0, self._next)
        if block < 0:
            self.is_populated = True
            return False
        self.populate(block * POPULATE_BYTES, 1)
        self._next = block + 1
        return True

    def close(self) -> None:
        self._memory.close()

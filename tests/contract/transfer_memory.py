"""Regions in shared memory for transfer tests."""

from __future__ import annotations

import mmap
import os

import numpy as np

from pdcluster.transfer.backends.base import Region


class Memory:
    """A memfd mapping as a Region and as numpy bytes; `drop` forgets it (the mapping goes when nobody uses it any
    more)."""

    def __init__(self, nbytes: int, region: int = 0) -> None:
        self.fd = os.memfd_create("pdcluster-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)
        self.region = Region(region, self.bytes.ctypes.data, nbytes, self.fd)

    def drop(self) -> None:
        os.close(self.fd)

"""Memory that large bodies took stays with the process: glibc gives the end of its heap back with each request of a
megabyte and takes it again with the next, page fault by page fault. Other allocators are left alone."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# Free memory at a heap's end that is not given back. Threads, as those that prepare long prompts, have heaps of their
# own: as much of each.
KEPT_BYTES = 64 * 2**20
# What is so large has a mapping of its own, which ends with it; the most that glibc takes. Said here, as the other one
# stops it from learning.
OWN_MAPPING_BYTES = 32 * 2**20


def keep_heap() -> bool:
    """False where the allocator knows no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) == 1
        for name, value in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, OWN_MAPPING_BYTES))
    )

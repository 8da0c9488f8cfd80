"""Keep the memory of large bodies in the process.

glibc returns the end of its heap after each request of a megabyte, and faults it in again for the next. Other
allocators are left alone.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# Free bytes at a heap's end that are kept. Threads that prepare long prompts have heaps of their own, with as much
# each.
KEPT_BYTES = 64 * 2**20
# Larger blocks get a mapping of their own, up to glibc's maximum. It must be set, because setting KEPT_BYTES stops
# glibc from learning it.
OWN_MAPPING_BYTES = 32 * 2**20


def keep_heap() -> bool:
    """Set the limits. False where the allocator knows none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) == 1
        for name, value in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, OWN_MAPPING_BYTES))
    )

"""Keep the memory of large bodies in the process.

By default glibc returns the end of its heap after each request of a megabyte. The next request takes it again, page
fault by page fault. Other allocators are left alone.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# Free bytes at a heap's end that glibc keeps. It keeps as much in each heap of a thread, such as those that prepare
# long prompts.
KEPT_BYTES = 64 * 2**20
# Larger blocks get a mapping of their own, which ends with them. This is glibc's maximum. It must be set, because
# setting KEPT_BYTES stops glibc from adapting it.
OWN_MAPPING_BYTES = 32 * 2**20


def keep_heap() -> bool:
    """Set both limits. False where the allocator has no such options."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) == 1
        for name, value in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, OWN_MAPPING_BYTES))
    )

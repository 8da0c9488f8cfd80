"""Loops over the pages of a ticket, compiled by numba. Only `copy` imports it; `page_pairs` says what each loop is for.

A dozen numpy calls would do the same. Each would have left the caches since the last transfer, and all would run before
the first byte.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

# As the pages lie in a ticket's bytes.
TICKET_PAGES = types.Array(types.int32, 1, "C", readonly=True)
# Larger page ids take the general path. A peer chooses the ids, and so would choose the size of the table.
MOST_PAGES = 1 << 22


@numba.njit(types.int64(TICKET_PAGES, types.int64, types.int64), cache=True)
def are_distinct(pages: NDArray[np.int32], first: int, end: int) -> Any:
    """See `page_pairs.are_distinct`. Returns -1 when it does not decide."""
    largest = -1
    for at in range(first, end):
        if pages[at] < 0:
            return 0
        largest = max(largest, pages[at])
    if largest >= MOST_PAGES:
        return -1
    met = np.zeros((largest >> 6) + 1, dtype=np.uint64)
    for at in range(first, end):
        bit = np.uint64(1) << np.uint64(pages[at] & 63)
        if met[pages[at] >> 6] & bit:
            return 0
        met[pages[at] >> 6] |= bit
    return 1


@numba.njit(types.boolean(types.int64[::1], types.int64, types.int64), cache=True)
def are_below(pages: NDArray[np.int64], count: int, limit: int) -> Any:
    """See `page_pairs.are_below`."""
    smallest, largest = 0, -1
    for at in range(count):
        smallest, largest = min(smallest, pages[at]), max(largest, pages[at])
    return smallest >= 0 and largest < limit


@numba.njit(
    types.int64(types.int64[::1], TICKET_PAGES, *[types.int64] * 5, types.int64[:, ::1], types.int64[::1]), cache=True
)
def pair(
    ours: NDArray[np.int64],
    theirs: NDArray[np.int32],
    our_first: int,
    their_first: int,
    page_bytes: int,
    start: int,
    nbytes: int,
    rows: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> Any:
    """See `page_pairs.paired`.
    rows: filled with (source, target, nbytes).
    ends: ends of the parts, in pages; on return, in rows.
    Returns the number of rows. All pages must exist.
    """
    count, row, part = ends[-1], -1, 0
    begins = True
    for at in range(count):
        source = ours[our_first + at] * page_bytes + start
        target = np.int64(theirs[their_first + at]) * page_bytes + start
        if begins or source != rows[row, 0] + rows[row, 2] or target != rows[row, 1] + rows[row, 2]:
            row += 1
            rows[row, 0], rows[row, 1], rows[row, 2] = source, target, nbytes
        else:
            rows[row, 2] += nbytes
        begins = at + 1 == ends[part]
        if begins:
            ends[part] = row + 1
            part += 1
    return row + 1

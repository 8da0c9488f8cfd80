"""Checks of a ticket's pages, and runs between whole pages of equal shape. Pure.

Most transfers need only these, before their first byte, so they are compiled loops. Without numba, `geometry` and numpy
compute the same. Other layouts always use `geometry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import IntegrityError
from pdcluster.transfer.copying.copy import native
from pdcluster.transfer.layout.geometry import join_runs_in_parts
from pdcluster.transfer.layout.runs import RunTable

TicketPages = NDArray[np.int32]
Pages = NDArray[np.int64]


def unpack_pages(packed: bytes) -> TicketPages:
    """The page ids of a ticket, packed by `messages.pack_tokens`."""
    return np.frombuffer(packed, dtype=np.int32)


def are_distinct(pages: TicketPages, first: int, end: int) -> bool:
    """Whether pages[first:end] holds no negative page and none twice."""
    compiled = native()
    answer = compiled.are_distinct(pages, first, end) if compiled is not None else -1
    if answer >= 0:
        return bool(answer)
    asked = pages[first:end].tolist()
    return min(asked, default=0) >= 0 and len(set(asked)) == len(asked)


def are_below(pages: Pages, count: int, limit: int) -> bool:
    """Whether there are `count` pages and the first `count` lie in [0, limit)."""
    if len(pages) < count:
        return False
    compiled = native()
    if compiled is not None:
        return bool(compiled.are_below(pages, count, limit))
    return not count or bool(pages[:count].view(np.uint64).max() < limit)  # a negative id is a very large one


class PageRun(NamedTuple):
    """Consecutive pages: from index `first` in ours, and from `their_first` in those of a ticket."""

    ours: Pages
    first: int
    theirs: TicketPages
    their_first: int


def paired(row: PageRun, page_bytes: int, start: int, nbytes: int, ends: Sequence[int]) -> list[RunTable]:
    """Copies of bytes [start, start + nbytes) of each of our pages to the same bytes of its page in the ticket. As in
    `join_runs_in_parts`, neighbours are joined, and parts end before the pages numbered in `ends`.
    """
    compiled, count = native(), ends[-1]
    missing = (
        min(row.first, row.their_first, len(row.ours) - row.first - count, len(row.theirs) - row.their_first - count)
        < 0
    )
    if missing:
        raise IntegrityError(
            f"{count} pages are to be paired, there are {len(row.ours)} here and {len(row.theirs)} in the ticket"
        )
    if compiled is None:
        pages = (
            row.ours[row.first : row.first + count],
            row.theirs[row.their_first : row.their_first + count].astype(np.int64),
        )
        starts, targets = (each * page_bytes + start for each in pages)
        return join_runs_in_parts(starts, targets, nbytes, ends)
    rows, borders = np.empty((count, 3), dtype=np.int64), np.empty(len(ends), dtype=np.int64)
    for part, end in enumerate(ends):
        borders[part] = end
    num_rows = compiled.pair(row.ours, row.theirs, row.first, row.their_first, page_bytes, start, nbytes, rows, borders)
    if len(ends) == 1:
        return [RunTable(rows[:num_rows])]
    return [RunTable(rows[first:end]) for first, end in pairwise((0, *borders.tolist()))]

"""Checks of a ticket's pages and runs between whole pages that look the same at both ends, as most transfers need them:
in compiled loops, since this stands before the first byte. Where these can not be had the same comes from `geometry`
and numpy; other layouts always do. Pure.
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
    """Of a ticket, as `messages.pack_tokens` packs them."""
    return np.frombuffer(packed, dtype=np.int32)


def are_distinct(pages: TicketPages, first: int, end: int) -> bool:
    """Is no page of pages[first:end] negative, and none there twice?"""
    compiled = native()
    answer = compiled.are_distinct(pages, first, end) if compiled is not None else -1
    if answer >= 0:
        return bool(answer)
    asked = pages[first:end].tolist()
    return min(asked, default=0) >= 0 and len(set(asked)) == len(asked)


def are_below(pages: Pages, count: int, limit: int) -> bool:
    """Are there so many pages, and the first so many of them within [0, limit)?"""
    if len(pages) < count:
        return False
    compiled = native()
    if compiled is not None:
        return bool(compiled.are_below(pages, count, limit))
    return not count or bool(pages[:count].view(np.uint64).max() < limit)  # a negative one is a very large one


class PageRun(NamedTuple):
    """So many pages in a row, from the one with index `first` on in ours and `their_first` in those of a ticket."""

    ours: Pages
    first: int
    theirs: TicketPages
    their_first: int


def paired(row: PageRun, page_bytes: int, start: int, nbytes: int, ends: Sequence[int]) -> list[RunTable]:
    """Copies of `nbytes` of each of our pages, from byte `start` of it on, to the same place of the page that stands
    for it in the ticket. As `join_runs_in_parts`: neighbours joined, in parts that end before the pages of these
    numbers."""
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

"""What stands before the first byte says the same, compiled or not, as the general way does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import pack_tokens
from pdcluster.transfer.copying import page_pairs
from pdcluster.transfer.copying.page_kernel import MOST_PAGES
from pdcluster.transfer.copying.page_pairs import PageRun, are_below, are_distinct, paired, unpack_pages
from pdcluster.transfer.layout.geometry import join_runs_in_parts

PAGES = st.lists(
    st.integers(-2, 9) | st.sampled_from([63, 64, 65, MOST_PAGES - 1, MOST_PAGES, 2**31 - 1, -(2**31)]), max_size=12
)
PAGE_BYTES = 48


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(page_pairs, "native", lambda: None)
        yield


@given(PAGES, st.integers(0, 3), st.integers(0, 3))
def test_pages_are_distinct_when_none_is_negative_or_there_twice(pages: list[int], first: int, cut: int) -> None:
    end = max(first, len(pages) - cut)
    asked = pages[first:end]
    expected = all(page >= 0 for page in asked) and len(set(asked)) == len(asked)
    assert are_distinct(unpack_pages(pack_tokens(pages)), min(first, len(pages)), min(end, len(pages))) is expected


def test_thousands_of_pages_are_distinct_until_one_is_there_twice() -> None:
    pages = np.random.default_rng(1).permutation(20_000).tolist()
    assert are_distinct(unpack_pages(pack_tokens(pages)), 0, len(pages))
    assert not are_distinct(unpack_pages(pack_tokens([*pages, pages[7]])), 0, len(pages) + 1)
    assert are_distinct(unpack_pages(pack_tokens([*pages, pages[7]])), 0, len(pages)), (
        "what is not asked about may be anything"
    )


@given(
    st.lists(st.integers(-2, 12) | st.sampled_from([2**62, -(2**62)]), max_size=8),
    st.integers(0, 9),
    st.integers(0, 10),
)
def test_pages_are_below_a_limit_when_enough_are_there_and_none_is_outside(
    pages: list[int], count: int, limit: int
) -> None:
    expected = len(pages) >= count and all(0 <= page < limit for page in pages[:count])
    assert are_below(np.array(pages, dtype=np.int64), count, limit) is expected


@st.composite
def rows(draw: st.DrawFn) -> tuple[PageRun, list[int]]:
    """Pages that often follow each other, and where parts end."""
    ends = sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, 3)) for _ in range(2)]
    steps = [
        draw(st.lists(st.sampled_from([1, 1, 1, 2, -1, 5]), min_size=ends[-1] + start, max_size=25)) for start in starts
    ]
    ours, theirs = (np.cumsum(each) + 40 for each in steps)
    return PageRun(ours.astype(np.int64), starts[0], theirs.astype(np.int32), starts[1]), ends


@given(rows(), st.sampled_from([(0, PAGE_BYTES), (0, 16), (16, 16), (16, 32)]))
def test_paired_pages_are_the_runs_of_the_general_way(case: tuple[PageRun, list[int]], layers: tuple[int, int]) -> None:
    (row, ends), (start, nbytes) = case, layers
    count = ends[-1]
    sources = row.ours[row.first : row.first + count] * PAGE_BYTES + start
    targets = row.theirs[row.their_first : row.their_first + count].astype(np.int64) * PAGE_BYTES + start
    assert paired(row, PAGE_BYTES, start, nbytes, ends) == join_runs_in_parts(sources, targets, nbytes, ends)


def test_runs_of_the_last_page_ids_do_not_overflow() -> None:
    row, page_bytes = PageRun(np.array([5], dtype=np.int64), 0, np.array([2**31 - 1], dtype=np.int32), 0), 3_670_016
    assert paired(row, page_bytes, 0, page_bytes, [1])[0].rows.tolist() == [
        [5 * page_bytes, (2**31 - 1) * page_bytes, page_bytes]
    ]


@pytest.mark.parametrize(("first", "their_first"), [(0, 2), (2, 0), (-1, 0), (0, -1)])
def test_pages_that_are_not_there_are_not_read(first: int, their_first: int) -> None:
    row = PageRun(np.arange(3), first, np.arange(3, dtype=np.int32), their_first)
    with pytest.raises(IntegrityError, match="3 here and 3 in the ticket"):
        paired(row, PAGE_BYTES, 0, PAGE_BYTES, [2])

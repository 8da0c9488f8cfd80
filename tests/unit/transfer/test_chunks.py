"""Arithmetic of chunks."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.transfer.base import Run
from pdcluster.transfer.chunks import coalesce, digest, join, page_slice


def test_runs_are_joined_only_where_both_sides_are_contiguous() -> None:
    assert coalesce([3, 4, 5, 9], [7, 8, 20, 21], 10) == (Run(30, 70, 20), Run(50, 200, 10), Run(90, 210, 10))


def test_a_partial_last_page_is_in_the_slice() -> None:
    assert page_slice(8, 5, 4) == slice(2, 4)
    assert page_slice(8, 4, 4) == slice(2, 3)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), unique_by=(lambda pair: pair[0], lambda pair: pair[1]), max_size=30))
def test_coalesced_runs_copy_what_page_by_page_copies_would(pairs: list[tuple[int, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 255, 41 * 8, dtype=np.uint8)
    one, other = np.zeros_like(source), np.zeros_like(source)
    for page, target in pairs:
        one[target * 8 : target * 8 + 8] = source[page * 8 : page * 8 + 8]
    runs = coalesce([page for page, _ in pairs], [target for _, target in pairs], 8)
    for run in runs:
        other[run.target : run.target + run.nbytes] = source[run.source : run.source + run.nbytes]
    assert (one == other).all()
    assert sum(run.nbytes for run in runs) == 8 * len(pairs)


@given(st.lists(st.integers(0, 40), unique=True, max_size=30))
def test_a_digest_depends_on_the_bytes_in_order_and_not_on_page_ids(pages: list[int]) -> None:
    memory = np.random.default_rng(0).integers(0, 255, 41 * 8, dtype=np.uint8)
    wire = b"".join(memory[page * 8 : page * 8 + 8].tobytes() for page in pages)
    assert digest(memoryview(memory), join(pages, 8)) == xxhash.xxh3_64_intdigest(wire)

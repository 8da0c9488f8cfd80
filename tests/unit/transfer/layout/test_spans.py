"""Arithmetic of chunks."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.transfer.layout.spans import digest, page_slice


def test_a_partial_last_page_is_in_the_slice() -> None:
    assert page_slice(8, 5, 4) == slice(2, 4)
    assert page_slice(8, 4, 4) == slice(2, 3)


@given(st.lists(st.integers(0, 40), unique=True, max_size=30))
def test_a_digest_depends_on_the_bytes_in_order_and_not_on_page_ids(pages: list[int]) -> None:
    memory = np.random.default_rng(0).integers(0, 255, 41 * 8, dtype=np.uint8)
    wire = b"".join(memory[page * 8 : page * 8 + 8].tobytes() for page in pages)
    assert digest(memoryview(memory), [(page * 8, 8) for page in pages]) == xxhash.xxh3_64_intdigest(wire)

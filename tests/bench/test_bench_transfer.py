"""What `bench.transfer` times moves the right bytes, with the protocol and at the backend's seam alone."""

from __future__ import annotations

from contextlib import closing

import pytest

from bench.parts.transfer_ends import PAGE_TOKENS, Near, plain


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(("backend", "is_sealed"), [("shm", False), ("tcp", False), ("tcp", True)])
def test_both_ways_that_are_timed_move_the_right_bytes(backend: str, is_sealed: bool, digests: bool) -> None:
    with closing(Near(plain(backend, 64 << 10, 512, digests=digests, is_sealed=is_sealed))) as near:  # two chunks
        assert near.wrong_bytes() == 0
        assert near.move_alone(PAGE_TOKENS) > 0
        assert near.wrong_bytes(alone=True) == 0


def test_a_byte_that_never_came_is_counted() -> None:
    with closing(Near(plain("shm", 64 << 10, 4, digests=False))) as near:
        assert near.wrong_bytes() == 0
        near.pools[0].bytes[:] = 0
        assert near.move_alone(4 * PAGE_TOKENS) > 0
        assert near.count_wrong() > 0

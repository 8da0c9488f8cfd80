"""Random bytes that are drawn many at a time: each given once, also to several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from pdcluster_router.core.random_pool import NUM_BYTES, draw, draw_bits


def test_nobody_gets_what_another_thread_got() -> None:
    with ThreadPoolExecutor(4) as pool:
        drawn = [value for values in pool.map(lambda _: [draw() for _ in range(1000)], range(8)) for value in values]
    assert len(set(drawn)) == 8000 and {len(value) for value in drawn} == {NUM_BYTES}


def test_bits_fill_their_range_and_not_more() -> None:
    numbers = [draw_bits(10) for _ in range(2000)]
    assert 0 <= min(numbers) < 20 and 1000 < max(numbers) < 1024
    assert draw_bits(96).bit_length() > 64

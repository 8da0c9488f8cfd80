"""ZeroedMemory, with the system's advice about pages and without, and tables of blocks that give their memory back
while rows move away."""

from __future__ import annotations

import mmap
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from pdcluster.core.messages import HASH_BYTES
from pdcluster_router.prefix_index import block_table
from pdcluster_router.prefix_index.block_table import GONE, BlockTable, Keys, ZeroedMemory

NUM_PAGES = 4


@pytest.mark.parametrize("platform", [sys.platform, "another"])
@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (0, 1), (5, 100), (0, mmap.PAGESIZE), (7, 3 * mmap.PAGESIZE + 9), (0, NUM_PAGES * mmap.PAGESIZE)],
)
def test_what_is_cleared_is_zero_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch, platform: str, start: int, stop: int
) -> None:
    monkeypatch.setattr(block_table.sys, "platform", platform)
    memory = ZeroedMemory(NUM_PAGES * mmap.PAGESIZE)
    assert not memory.octets.any()
    memory.octets[:] = 1
    memory.clear(start, stop)
    assert not memory.octets[start:stop].any() and memory.octets[:start].all() and memory.octets[stop:].all()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep pages that were let go")
def test_the_system_gets_cleared_pages_back() -> None:
    memory = ZeroedMemory(64 << 20)
    memory.octets[:] = 1
    before = resident_bytes()
    memory.clear(0, 63 << 20)
    assert before - resident_bytes() > 50 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("seed", range(4))
def test_rows_behind_a_cleared_part_are_found_and_those_in_it_are_not(seed: int) -> None:
    chance = random.Random(seed)
    keys = Keys.of(chance.randbytes(700 * HASH_BYTES))
    table = BlockTable(1000)
    table.insert(keys, np.full(len(keys), 5, np.uint32))
    while (stop := chance.randrange(1, 1001)) < 900:
        slots, _ = table.rows(0, stop)
        table.sets[slots] = GONE
        table.clear(stop)
        left, here = table.rows(0, table.num_slots)
        assert np.array_equal(table.find(here), left)
        assert len(left) == int(np.count_nonzero(table.find(keys) >= 0))
        assert table.num_rows == int(np.count_nonzero(table.sets))

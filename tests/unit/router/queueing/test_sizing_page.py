"""The worked example of docs/sizing.md is what the signal of pools says."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest

from pdcluster_router.queueing.demand import PAGES, staffed

PAGE = (Path(__file__).parents[4] / "docs" / "sizing.md").read_text()
GIB = 2**30


def test_the_worked_example_adds_up() -> None:
    prompts, rows_a_node, rows = 10 * 1200 * 40e-6, (0.050 - 0.010) / 0.001, 10 * 200 / (40 / 0.050) * 40
    assert f"{prompts:.2f} node-seconds" in PAGE and f"is {staffed(prompts):.2f}" in PAGE
    assert f"**{ceil(staffed(prompts))} prefill nodes**" in PAGE
    assert rows_a_node == pytest.approx(40) and rows == 100
    assert f"is {staffed(rows)} rows" in PAGE and f"{staffed(rows) / 40:.2f}" in PAGE
    assert f"**{ceil(staffed(rows) / 40)} decode nodes**" in PAGE
    token = 36 * 8 * 128 * 2 * 2
    assert f"{token // 1024} KiB" in PAGE
    kv = rows * 3200 * token / GIB
    assert (
        f"{kv:.1f} GiB" in PAGE and f"{kv / 4:.0f} GiB on each" in PAGE and f"{kv / 4 / PAGES:.1f} GiB of pool" in PAGE
    )
    sent = [float(each) for each in re.findall(r"([\d.]+) GiB(?: each second| where)", PAGE)]
    assert sent == [round(10 * tokens * token / GIB, 1) for tokens in (1200, 3000)]

"""Cores are those of the tightest quota, whichever version of control groups the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdcluster.processes.control_groups import usable_cores
from pdcluster.processes.free_memory import GIB, MIB, FreeMemory, default_kv_bytes


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/pod/app\n", {"pod/app/cpu.max": "600000 100000\n", "pod/cpu.max": "300000 100000\n"}, 3),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 4),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
    ],
)
def test_usable_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], expected: int
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(proc, groups) == expected


def test_a_kv_pool_without_a_size_fits_its_container() -> None:
    assert default_kv_bytes(FreeMemory(20 * GIB, "")) == GIB
    assert default_kv_bytes(FreeMemory(700 * MIB, "")) == 350 * MIB
    assert default_kv_bytes(FreeMemory(0, "")) == MIB, "which is refused, with the numbers"

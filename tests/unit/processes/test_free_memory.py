"""Free memory is what the tightest limit leaves, whichever version of control groups the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.processes.free_memory import FreeMemory, check_memory, free_memory

GIB = 2**30


def machine(folder: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {20 * 2**20} kB\nSwapFree: 0 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 20 * GIB),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 20 * GIB),
        (
            "0::/\n",
            {"memory.max": f"{8 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": f"inactive_file {GIB}\n"},
            6 * GIB,
        ),
        (
            "0::/pod/app\n",
            {
                "pod/app/memory.max": "max\n",
                "pod/app/memory.current": f"{GIB}\n",
                "pod/app/memory.stat": "",
                "pod/memory.max": f"{4 * GIB}\n",
                "pod/memory.current": f"{GIB}\n",
                "pod/memory.stat": "inactive_file 0\n",
            },
            3 * GIB,
        ),
        (
            "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/x\n",
            {
                "memory/docker/1/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/docker/1/memory.usage_in_bytes": f"{GIB}\n",
                "memory/docker/1/memory.stat": f"total_inactive_file {GIB // 2}\n",
                "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "memory/memory.usage_in_bytes": f"{GIB}\n",
                "memory/memory.stat": "",
            },
            3 * GIB // 2,
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert free_memory(*machine(tmp_path, cgroup, files)).num_bytes == expected


def test_it_reads_this_machine() -> None:
    assert 0 < free_memory().num_bytes < 2**60


def test_a_pool_beyond_memory_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pdcluster.processes.free_memory.free_memory", lambda: FreeMemory(3 * GIB, "the machine's memory")
    )
    check_memory(3 * GIB)
    with pytest.raises(ConfigError, match=r"takes 3\.50 GiB, but the machine's memory leaves 3\.00 GiB; .* 2304MiB"):
        check_memory(7 * GIB // 2)

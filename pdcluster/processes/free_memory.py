"""How much memory this process may still take: what the machine has, and what its control groups allow.

Of a group, files that the kernel may drop do not count as used. Versions 1 and 2 of control groups are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdcluster.core.errors import ConfigError
from pdcluster.processes.control_groups import GROUPS, PROC, groups_of

# Larger limits are no limits: version 1 says "none" by one.
NO_LIMIT = 1 << 60
MIB, GIB = 2**20, 2**30
USUAL_KV_BYTES = GIB


class FreeMemory(NamedTuple):
    """num_bytes: that are free. limit: whose limit that is, for people."""

    num_bytes: int
    limit: str


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> FreeMemory:
    """The least that any limit leaves."""
    return min([_of_machine(proc), *_of_groups(proc, groups)])


def default_kv_bytes(free: FreeMemory) -> int:
    """The KV pool's size where none is set: half of what is free, at most USUAL_KV_BYTES."""
    return min(USUAL_KV_BYTES, max(free.num_bytes // 2 // MIB * MIB, MIB))


def check_memory(kv_bytes: int) -> None:
    """Refuse a KV pool that cannot be had. Without that the kernel would end the process while it fills the pool.

    Raises ConfigError with the numbers.
    """
    free = free_memory()
    if kv_bytes > free.num_bytes:
        raise ConfigError(
            f"the KV pool takes {kv_bytes / GIB:.2f} GiB, but {free.limit} leaves {free.num_bytes / GIB:.2f} GiB; "
            f"set node.kv.memory_bytes to {free.num_bytes * 3 // 4 // MIB}MiB or less, or give it more memory"
        )


def _of_machine(proc: Path) -> FreeMemory:
    facts = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return FreeMemory(int(facts["MemAvailable"].split()[0]) * 1024, "the machine's memory")


def _of_groups(proc: Path, groups: Path) -> Iterator[FreeMemory]:
    for folder, version in groups_of("memory", proc, groups):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if (free := _of_group(folder, *names)) is not None:
            yield FreeMemory(free, f"the control group's limit ({folder / names[0]})")


def _of_group(folder: Path, limit_name: str, used_name: str, droppable_name: str) -> int | None:
    """None without a limit."""
    try:
        limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max" or int(limit) >= NO_LIMIT:
        return None
    return max(0, int(limit) - used + int(stat.get(droppable_name, 0)))

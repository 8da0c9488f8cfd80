"""Control groups of this process, versions 1 and 2, and the processors that they leave it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import NamedTuple

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """A folder of a group's files."""

    folder: Path
    version: int


def groups_of(controller: str, proc: Path = PROC, groups: Path = GROUPS) -> Iterator[ControlGroup]:
    """This process's group of a controller and those around it. In a container its own may be the mounted root."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = groups, 2
        elif controller in controllers.split(","):
            root, version = groups / controller, 1
        else:
            continue
        own = root / path.lstrip("/")
        yield from (ControlGroup(folder, version) for folder in (own, *own.parents) if folder.is_relative_to(root))


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Cores that this process may keep busy: those it may run on, and no more than its groups' CPU quotas, rounded up.

    More threads than the quota allows are stopped in the middle of each period, with the locks that they hold.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for group in groups_of("cpu", proc, groups) if (quota := _quota(group)) is not None]
    return max(1, min([cores, *(ceil(quota) for quota in quotas)]))


def _quota(group: ControlGroup) -> float | None:
    """Cores; None without a limit."""
    try:
        if group.version == 2:
            quota, period = (group.folder / "cpu.max").read_text().split()
        else:
            quota, period = ((group.folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except FileNotFoundError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)

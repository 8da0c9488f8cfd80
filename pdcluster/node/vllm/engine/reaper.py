"""Kills the processes of a vLLM engine when their node has ended, however it ended.

vLLM's processes outlive a killed parent, hold its memory and serve its KV. Each of them carries a mark in its
environment. A node starts this file as a script before its engine. It needs the standard library alone, so it is there
at once and small.

    python reaper.py NODE_PID MARK
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final

MARK_VARIABLE: Final = "_PDCLUSTER_ENGINE_MARK"
# It looks until none was there for so long: one that is being started has its mark a moment later.
QUIET_S: Final = 1.0
LONGEST_S: Final = 10.0
PAUSE_S: Final = 0.05


def marked_processes(mark: str) -> list[int]:
    """Processes but this one that carry the mark."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended, or is another user's
        if wanted in variables:
            found.append(int(entry.name))
    return found


def kill_marked(mark: str) -> list[int]:
    """SIGKILL to all of them; the ids of those that were there."""
    killed = []
    for pid in marked_processes(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
        killed.append(pid)
    return killed


def wait_for_end(pid: int) -> None:
    """Until the parent of that id has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() != pid:
        return  # it ended before, and the id may be another one's
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    ready.poll()


def main(parent: int, mark: str) -> None:
    wait_for_end(parent)
    began = last = time.monotonic()
    while (now := time.monotonic()) - last < QUIET_S and now - began < LONGEST_S:
        if kill_marked(mark):
            last = now
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

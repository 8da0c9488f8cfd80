"""Engine processes die with the process that started them, however that one dies.

vLLM's processes outlive a killed parent, hold its memory and serve its KV. Those that the node starts run
`following_python.sh`, which ties them to the node before Python starts. Those that they start load `follow_parent`
(entry point of `vllm.general_plugins`). It does nothing where no node of ours started the engine. Processes carry a
mark in their environment, so that stragglers are found and killed.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

from pdcluster.core.errors import ConfigError
from pdcluster.processes.child_process import die_with
from pdcluster.settings.config import change_environment, own_environment

logger = logging.getLogger(__name__)

# Not of the prefix PDCLUSTER_: those are settings, and unknown ones are refused.
PARENT_VARIABLE: Final = "_PDCLUSTER_ENGINE_PARENT"
MARK_VARIABLE: Final = "_PDCLUSTER_ENGINE_MARK"
PYTHON_VARIABLE: Final = "_PDCLUSTER_ENGINE_PYTHON"
FOLLOWING_PYTHON: Final = Path(__file__).with_name("following_python.sh")
PLUGIN: Final = "pdcluster"


def follow_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, and make it the parent of those it starts."""
    parent = own_environment().get(PARENT_VARIABLE)
    own = str(os.getpid())
    if parent is None or parent == own:
        return
    die_with(int(parent))()
    change_environment({PARENT_VARIABLE: own})


def mark_children(mark: str) -> None:
    """Every process that this one spawns from now on carries the mark and follows it. Raises ConfigError where vLLM
    does not know the plugin, or where the script is not installed as a program."""
    if PLUGIN not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise ConfigError(
            "vLLM does not know pdcluster's plugin, so its processes would outlive a killed node; "
            "install pdcluster again in this environment"
        )
    if not os.access(FOLLOWING_PYTHON, os.X_OK):
        raise ConfigError(f"{FOLLOWING_PYTHON} must be executable: chmod +x it, or install pdcluster again")
    # It outlives whoever is killed, to remove shared memory. So it starts before, follows nobody and has no mark.
    resource_tracker.ensure_running()
    change_environment(
        {
            PARENT_VARIABLE: str(os.getpid()),
            MARK_VARIABLE: mark,
            PYTHON_VARIABLE: sys.executable,
            # A long process title would overwrite the mark.
            "SPT_NOENV": "1",
        }
    )
    multiprocessing.set_executable(str(FOLLOWING_PYTHON))


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
    """SIGKILL to all of them; their ids."""
    found = marked_processes(mark)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("engine process %d ended by itself", pid)
    return found


@contextmanager
def watched_processes(pids: Iterable[int], on_end: Callable[[], object]) -> Iterator[None]:
    """Call it in the running loop when one of them ends, also if that was before."""
    loop = asyncio.get_running_loop()
    fds: list[int] = []
    try:
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                on_end()
                continue
            loop.add_reader(fds[-1], on_end)
        yield
    finally:
        for fd in fds:
            loop.remove_reader(fd)
            os.close(fd)

"""The processes of an engine: they carry a mark, die with their node, and are watched by it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pdcluster.node.vllm.engine import reaper
from pdcluster.settings.config import change_environment


class MarkedProcesses:
    """All that this process starts from now on belongs to the engine, and is killed when this process ends."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), mark]
        # A session of its own: whoever kills the node's group leaves it. It starts before the mark is set.
        self._reaper = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        change_environment({reaper.MARK_VARIABLE: mark})

    def ids(self) -> list[int]:
        return reaper.marked_processes(self.mark)

    def kill(self) -> list[int]:
        """SIGKILL to all of them; their ids."""
        return reaper.kill_marked(self.mark)

    def close(self) -> None:
        """The engine is gone, so nothing is left to watch."""
        self._reaper.kill()
        self._reaper.wait()


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

"""A process that is started ahead. It imports what a child imports, then waits on its standard input for the child's
arguments.

So a dead child is replaced without the second of importing. A spare binds nothing, connects to nothing and has no
thread. `Spare` is the parent's end, `awaited_argv` the process's. A spare that died while idle is noticed when it is
wanted. The parent then starts a fresh process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from pdcluster.core.errors import ProtocolError
from pdcluster.processes.child_process import Spawned, kill_group, spawn

# Half of what a pipe holds, so that the parent never waits while it writes. Longer argument lists are started afresh.
MAX_LINE_BYTES = 32 * 1024

END_S = 5.0


class Spare:
    """At most one process, owned by the parent's event loop. argv: the program that calls `awaited_argv`."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = tuple(argv)
        self._idle: Spawned | None = None
        self._stdin = -1

    @property
    def pid(self) -> int | None:
        """Of the idle process; None when there is none."""
        return self._idle.process.pid if self._idle is not None and self._idle.is_running else None

    async def prepare(self) -> None:
        """Start one if none is alive. Raises OSError when that is impossible."""
        if self.pid is not None:
            return
        self._discard()
        reader, writer = os.pipe()
        try:
            self._idle = await spawn(self._argv, stdin=reader)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._stdin = writer

    def take(self, argv: Sequence[str]) -> Spawned | None:
        """The process, which now runs `argv` and is the caller's. None when there is none that could."""
        line = json.dumps(argv).encode() + b"\n"
        if self._idle is None or self.pid is None or len(line) > MAX_LINE_BYTES:
            return None
        try:
            os.write(self._stdin, line)
        except (
            BrokenPipeError
        ):  # it is dead, even if its end was not reported yet: `prepare` is to start another all the same
            self._drop(self._idle)
            return None
        taken, self._idle = self._idle, None
        os.close(self._stdin)
        return taken

    async def close(self) -> None:
        idle = self._idle
        self._discard()
        if idle is not None:
            await asyncio.wait_for(idle.process.wait(), END_S)

    def _discard(self) -> None:
        if self._idle is None:
            return
        if self._idle.is_running:  # else its pid may be another's by now; it started nothing that could be left
            kill_group(self._idle.process.pid)
        self._drop(self._idle)

    def _drop(self, idle: Spawned) -> None:
        idle.close_pipes()
        os.close(self._stdin)
        self._idle = None


def awaited_argv() -> list[str] | None:
    """In the spare: the argument list it is to run, with its own --ready-fd. None when the parent needs it no more."""
    with open(sys.stdin.fileno(), "rb", closefd=False) as stdin:
        line = stdin.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        return None
    argv = json.loads(line)
    if not (isinstance(argv, list) and argv and all(isinstance(part, str) for part in argv)):
        raise ProtocolError(f"a spare process was told {line[:80]!r} instead of an argument list")
    return [*argv, *sys.argv[sys.argv.index("--ready-fd") :]]

"""One child process and its two pipes: the one that says it is ready, and its output. It restarts nothing.

Requirements:

1. A child dies with its parent, however the parent dies. PR_SET_PDEATHSIG ties it to the thread that forked, so spawn
   on the main one.
2. Terminal signals reach the parent alone. Every child leads a session of its own, so the parent decides who stops
   when.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from pdcluster.core.errors import ConfigError

PR_SET_PDEATHSIG = 1
LINE_LIMIT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Spawned:
    """ready, output: reading ends of the pipes. The holder reads both to their end with `lines`, or calls
    `close_pipes`.
    """

    process: Process
    ready: int
    output: int

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    def close_pipes(self) -> None:
        os.close(self.ready)
        os.close(self.output)


async def spawn(argv: Sequence[str], stdin: int = DEVNULL, environment: Mapping[str, str] | None = None) -> Spawned:
    """Start `argv --ready-fd N`. Raises OSError when there is no such program. environment: None: this process's."""
    ready_reader, ready_writer = os.pipe()
    # Not asyncio's PIPE: asyncio reports the end only after every heir of the pipe is gone.
    output_reader, output_writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            "--ready-fd",
            str(ready_writer),
            stdin=stdin,
            stdout=output_writer,
            stderr=STDOUT,
            pass_fds=(ready_writer,),
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
            env=environment,
        )
    except BaseException:
        os.close(ready_reader)
        os.close(output_reader)
        raise
    finally:
        os.close(ready_writer)
        os.close(output_writer)
    return Spawned(process, ready_reader, output_reader)


@contextlib.asynccontextmanager
async def lines(descriptor: int) -> AsyncIterator[asyncio.StreamReader]:
    """The reading end of a pipe as a stream; closes it at the end."""
    stream = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        yield stream
    finally:
        transport.close()


def describe(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "still running"
    return f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"


def _signal_name(number: int) -> str:
    """Real-time signals but the first and the last have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_group(pid: int) -> None:
    """Whatever is left of the child and of what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What the child does between fork and exec so that it cannot outlive its parent: it gets this signal when the
    parent ends."""
    if sys.platform != "linux":
        raise ConfigError("pdcluster up needs Linux; run it in a Linux container or virtual machine")
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        if libc.prctl(PR_SET_PDEATHSIG, number) != 0 or os.getppid() != parent:
            os._exit(127)  # the parent died before prctl could tie us to it

    return before_exec

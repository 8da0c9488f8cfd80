"""Stands a node's engine thread still, by ptrace. Run as a script it is the tracer."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
WAIT_ALL = 0x40000000
# The number of the system call, on x86-64.
POLL = "7"
# The same, epoll_wait and epoll_pwait.
WAITS = (POLL, "232", "281")
# How often a moment is looked for in which the thread does not hold the interpreter's lock.
TRIES = 100
# Longer than the node's loop waits for anything else.
SETTLED_S = 0.2
# The node goes on between two tries, at least until its next heartbeat, or its lease would end.
BETWEEN_S = 0.2


@contextmanager
def frozen(pid: int, *, while_computing: bool) -> Iterator[None]:
    """The thread stands still. It goes on when its tracer ends.

    while_computing: it does not hold the interpreter's lock, so that the node's other threads go on.
    """
    with _traced(pid, "computing" if while_computing else "anyhow"):
        yield


@contextmanager
def frozen_loop(pid: int) -> Iterator[None]:
    """The main thread stands still where it waits for news, so that the process's other threads go on."""
    with _traced(pid, "loop"):
        yield


@contextmanager
def _traced(pid: int, moment: str) -> Iterator[None]:
    command = (sys.executable, __file__, str(pid), moment)
    tracer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tracer.stdin is not None and tracer.stdout is not None
    try:
        if tracer.stdout.readline() != "frozen\n":
            raise AssertionError(f"process {pid} cannot be traced; see that ptrace is allowed")
        yield
    finally:
        tracer.stdin.close()
        tracer.stdout.close()
        tracer.wait(10.0)


def engine_thread(pid: int) -> int:
    """The oldest thread of that name: those that it began inherit the name."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return min(int(task.name) for task in tasks if (task / "comm").read_text() == "engine\n")


def trace(request: int, tid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, tid, None, None) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace of thread {tid}")


def turns(pid: int) -> bool:
    """Whether the main thread, the loop's, goes on to wait for news, and not for a lock."""
    time.sleep(SETTLED_S)
    calls = []
    for _ in range(100):
        time.sleep(0.002)
        calls.append(Path(f"/proc/{pid}/task/{pid}/syscall").read_text().partition(" ")[0])
    return calls.count(POLL) >= 10


def hold(tid: int) -> None:
    """Stand a thread still where it waits for news, without the interpreter's lock; say so, and let it go on when stdin
    ends.
    """
    for _ in range(TRIES):
        trace(PTRACE_SEIZE, tid)
        trace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WAIT_ALL)
        if Path(f"/proc/{tid}/syscall").read_text().partition(" ")[0] in WAITS:
            print("frozen", flush=True)
            sys.stdin.read()
            return
        trace(PTRACE_DETACH, tid)
        time.sleep(BETWEEN_S * random.random())


def main(pid: int, moment: str) -> None:
    if moment == "loop":
        hold(pid)
        return
    tid = engine_thread(pid)
    for _ in range(TRIES):
        trace(PTRACE_SEIZE, tid)
        trace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WAIT_ALL)
        if moment == "anyhow" or turns(pid):
            print("frozen", flush=True)
            sys.stdin.read()
            return
        trace(PTRACE_DETACH, tid)
        time.sleep(BETWEEN_S * (1.0 + random.random()))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

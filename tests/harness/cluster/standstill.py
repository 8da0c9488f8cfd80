"""Stops a child process for certain. A SIGSTOP that was sent is not one that was obeyed: until the thread that takes it
gets to run, all others go on, which on a busy machine is long enough to answer."""

from __future__ import annotations

import os
import signal


def stop_child(pid: int) -> None:
    """All its threads stand still when this returns, or it has ended."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

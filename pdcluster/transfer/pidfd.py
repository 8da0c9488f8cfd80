"""The proof that a process is over: its pidfd. Linux only, like shared memory by descriptor; it knows no peers and no pages."""

from __future__ import annotations

import os
import select
import socket
import struct

SO_PEERPIDFD = 77
"""From Linux 6.5 on; the socket module has no name for it."""


def pidfd_of(sock: socket.socket, pid: int) -> int:
    """A descriptor of the very process that connected (its pid alone could have been given to another one by now)."""
    try:
        return struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]  # type: ignore[no-any-return]
    except OSError:
        return os.pidfd_open(pid)


def has_exited(pidfd: int) -> bool:
    """Whether the process ended; a stopped one has not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))

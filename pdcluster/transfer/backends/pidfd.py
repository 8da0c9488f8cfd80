"""The proof that a process is over: its pidfd. Linux only, like shared memory by descriptor; it knows no pages."""

from __future__ import annotations

import os
import select
import socket
import struct

from pdcluster.transfer.backends.base import Peer

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


class Processes:
    """The processes behind boots: pid → pidfd, open until it has exited. Not locked."""

    def __init__(self) -> None:
        self._pidfds: dict[Peer, dict[int, int]] = {}

    def meet(self, peer: Peer, pid: int, sock: socket.socket) -> None:
        """`peer` connected by `sock` from process `pid`. Processes of any boot that have exited are let go here: a node that outlives many
        boots of its neighbours must not collect their descriptors."""
        self._let_go()
        pidfds = self._pidfds.setdefault(peer, {})
        if pid not in pidfds:
            pidfds[pid] = pidfd_of(sock, pid)

    def have_exited(self, peer: Peer) -> bool:
        """Whether every process that ever connected as `peer` has ended. True as well when none did."""
        return all(has_exited(pidfd) for pidfd in self._pidfds.get(peer, {}).values())

    def forget(self, peer: Peer) -> bool:
        """Let go of its processes; False when there were none."""
        pidfds = self._pidfds.pop(peer, {})
        for pidfd in pidfds.values():
            os.close(pidfd)
        return bool(pidfds)

    def close(self) -> None:
        for peer in list(self._pidfds):
            self.forget(peer)

    def __len__(self) -> int:
        return sum(map(len, self._pidfds.values()))

    def _let_go(self) -> None:
        for peer, pidfds in list(self._pidfds.items()):
            for pid in [pid for pid, pidfd in pidfds.items() if has_exited(pidfd)]:
                os.close(pidfds.pop(pid))
            if not pidfds:
                del self._pidfds[peer]

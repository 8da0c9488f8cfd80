"""Another process's shared memory, mapped here to be written. The caller decides which bytes may be written."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import struct

from pdcluster.transfer.backends.base import Peer

POPULATE_BYTES = 2 << 20
# From Linux 5.14 on; the mmap module has no name for it.
MADV_POPULATE_WRITE = 23


class MappedMemory:
    """A reader's region, mapped here. Its memory exists already. `populate` enters many pages at a time into our page
    table; a copy would otherwise fault page by page.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # a forked child must not outlive the fence
        self.nbytes = nbytes
        anchor = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(anchor)
        self._entered = bytearray(-(-nbytes // POPULATE_BYTES))
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # without the GIL, unlike mmap's own
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._next = 0
        self.is_populated = False

    def populate(self, offset: int, nbytes: int) -> None:
        """Enter the bytes that are not entered yet. A kernel without support faults the pages in."""
        for block in range(offset // POPULATE_BYTES, -(-(offset + nbytes) // POPULATE_BYTES)):
            if not self._entered[block]:
                self._entered[block] = 1
                start = block * POPULATE_BYTES
                self._madvise(self.address + start, min(POPULATE_BYTES, self.nbytes - start), MADV_POPULATE_WRITE)

    def populate_more(self) -> bool:
        """Enter the next block. False when all are entered."""
        block = self._entered.find(0, self._next)
        if block < 0:
            self.is_populated = True
            return False
        self.populate(block * POPULATE_BYTES, 1)
        self._next = block + 1
        return True

    def close(self) -> None:
        self._memory.close()


# Proof that a process has ended: its pidfd. Linux only, like shared memory by descriptor.

# From Linux 6.5 on; the socket module has no name for it.
SO_PEERPIDFD = 77


def pidfd_of(sock: socket.socket, pid: int) -> int:
    """A descriptor of the process that connected. Its pid alone could already belong to another process."""
    try:
        return struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]  # type: ignore[no-any-return]
    except OSError:
        return os.pidfd_open(pid)


def has_exited(pidfd: int) -> bool:
    """Whether the process ended. A stopped process has not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class Processes:
    """The processes behind boots: pid → pidfd, open until the process has exited. Not locked."""

    def __init__(self) -> None:
        self._pidfds: dict[Peer, dict[int, int]] = {}

    def meet(self, peer: Peer, pid: int, sock: socket.socket) -> None:
        """Record that `peer` connected by `sock` from process `pid`. Exited processes of all boots are released here,
        so that a long-lived node does not collect its neighbours' descriptors.
        """
        self._let_go()
        pidfds = self._pidfds.setdefault(peer, {})
        if pid not in pidfds:
            pidfds[pid] = pidfd_of(sock, pid)

    def have_exited(self, peer: Peer) -> bool:
        """Whether every process that ever connected as `peer` has ended; True when none did."""
        return all(has_exited(pidfd) for pidfd in self._pidfds.get(peer, {}).values())

    def left(self, peer: Peer, pid: int) -> None:
        """Process `pid` says that it copies no more as `peer`."""
        pidfds = self._pidfds.get(peer, {})
        if pid in pidfds:
            os.close(pidfds.pop(pid))

    def forget(self, peer: Peer) -> bool:
        """Release its processes. False when there were none."""
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

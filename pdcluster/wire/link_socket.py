"""One connection after another to one address, carrying whole frames: what a `Dialer` speaks over. Byte level only;
what frames say is the dialer's.

Two of them: `ZmqLinkSocket` here, which a hub polls and which encrypts, and `stream_line.StreamLine`, which a router's
event loop drives itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from pdcluster.core.errors import ProtocolError
from pdcluster.wire.address import format_address, parse_address
from pdcluster.wire.sockets import Monitor, WireSettings, has_message, open_dealer

# As a bare number, which libzmq's binding takes as well as a flag, and in less time.
NOBLOCK = int(zmq.NOBLOCK)

# What becomes of a connection: it ended, or none came about. A line goes on calling until it is closed, but after DOWN
# nobody listens to it.
DOWN, REFUSED = "down", "refused"


class LinkSocket(Protocol):
    """Nothing here blocks. why: what is known of what went wrong last, to be told to people; "" for nothing."""

    why: str

    def send(self, frame: bytes) -> bool:
        """Whether it goes out, or will once there is a connection; False: too much waits already."""
        ...

    def take(self) -> bytes | None:
        """The next frame that came, None: there is none now."""
        ...

    def happened(self) -> list[str]:
        """DOWN and REFUSED since the last call, in their order."""
        ...

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What to poll for reading: frames, and what becomes of the connection. None where the line calls its owner by
        itself."""
        ...

    def close(self) -> None:
        """What has not left yet need not. The owner no longer polls `sockets`: a descriptor that is closed while it is
        polled may come back as that of another file."""
        ...


# A new line, which calls at once. Raises ProtocolError where nobody can.
OpenLine = Callable[[], LinkSocket]


class ZmqLinkSocket:
    """A DEALER socket and its monitor."""

    why = ""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, settings: WireSettings) -> None:
        target = "tcp://" + format_address(*parse_address(address))
        self._socket = open_dealer(context, settings)
        self._monitor = Monitor(context, self._socket)
        self._sockets = self._socket, self._monitor.socket
        try:
            self._socket.connect(target)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"cannot connect to {address}: {error}") from error

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self) -> bytes | None:
        return self._socket.recv(NOBLOCK) if has_message(self._socket) else None

    def happened(self) -> list[str]:
        return self._monitor.drain()

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return self._sockets

    def close(self) -> None:
        self._monitor.close()
        self._socket.close(0)

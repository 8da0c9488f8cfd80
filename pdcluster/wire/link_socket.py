"""The socket of a calling link: a ZMQ DEALER and the monitor of its connection.

A link opens a new one for every connection. Nothing here blocks, and nothing here reads what a frame says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import zmq

from pdcluster.core.address import format_address
from pdcluster.core.errors import ProtocolError
from pdcluster.wire.address import peer_address
from pdcluster.wire.sockets import READABLE, ConnectionEvent, Monitor, WireSettings, open_dealer

# As a bare number. libzmq's binding takes it as well as the flag, and in less time.
NOBLOCK = int(zmq.NOBLOCK)
EVENTS = zmq.EVENTS
# Bytes of large frames that may wait for a peer that does not read. Small frames wait by number (`high_water`).
MAX_WAITING_BYTES = 64 << 20
# Frames from this size on are counted by their bytes. ZMQ sends them without a copy and reports when they have left.
LARGE_BYTES = 16 << 10
# How long a closed connection may still deliver what was sent last.
LINGER_MS = 1000
NOBODY = "nobody accepts connections there"
SILENT = (
    "it took the connection and said nothing for the whole lease, as a process does that stands still or has no CPU; "
    "look at its machine"
)
CUT = (
    "the connection ended before a word was said; look at that process's log, "
    "and whether it has a security.cluster_key_file where this process has none"
)
NO_HANDSHAKE = (
    "the handshake failed, as it does when only one end has a cluster key, or each has another one; "
    "set the same security.cluster_key_file everywhere, or none"
)


class LinkSocket:
    """One caller's socket. It connects again and again until `close`; after DOWN its owner opens another one."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, settings: WireSettings, link_key: str = ""
    ) -> None:
        """link_key: as in `open_dealer`. Raises ProtocolError for an address that ZMQ cannot connect to, and where it
        has no socket left.
        """
        # Why the last connection failed, for people; "" for nothing.
        self.why = ""
        self._has_key = bool(settings.cluster_keys)
        target = "tcp://" + format_address(*peer_address(address))
        try:
            self._socket = open_dealer(context, settings, link_key)
            self._socket.copy_threshold = LARGE_BYTES
            self._monitor = _monitored(context, self._socket)
        except zmq.ZMQError as error:
            raise ProtocolError(f"no socket for {address}: {error}; is this process at its limit of files?") from error
        self._sockets = self._socket, self._monitor.socket
        # Large frames that ZMQ still holds, oldest first, and their bytes.
        self._large: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._waiting_bytes = 0
        self._was_up = False
        try:
            self._socket.connect(target)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"cannot connect to {address}: {error}") from error

    def send(self, frame: bytes) -> bool:
        """Whether the frame leaves, now or once there is a connection. False: too much waits already."""
        try:
            if len(frame) < LARGE_BYTES:
                self._socket.send(frame, NOBLOCK)
                return True
            self._forget_sent()
            if self._waiting_bytes >= MAX_WAITING_BYTES:
                return False
            self._large.append((self._socket.send(frame, NOBLOCK, copy=False, track=True), len(frame)))
        except zmq.Again:
            return False
        self._waiting_bytes += len(frame)
        return True

    def _forget_sent(self) -> None:
        while self._large and self._large[0][0].done:
            self._waiting_bytes -= self._large.popleft()[1]

    def take(self) -> bytes | None:
        """The next frame that arrived, None when there is none."""
        return self._socket.recv(NOBLOCK) if self._socket.get(EVENTS) & READABLE else None  # type: ignore[operator]

    def events(self) -> list[ConnectionEvent]:
        """DOWN and REFUSED since the last call, in their order. `why` says the reason."""
        events = self._monitor.drain()
        for event in events:
            self._note(event)
        return [event for event in events if event in (ConnectionEvent.DOWN, ConnectionEvent.REFUSED)]

    def _note(self, event: ConnectionEvent) -> None:
        """An end that wants another key looks like any other cut. It is the likely cause where this end has a key."""
        if event is ConnectionEvent.UP:
            self._was_up, self.why = True, ""
        elif event is ConnectionEvent.SILENT:
            self.why = SILENT
        elif event is ConnectionEvent.CUT:
            self.why = NO_HANDSHAKE if self._has_key else CUT
        elif event is ConnectionEvent.REFUSED:
            self.why = self.why or NOBODY
        elif not self._was_up and self.why in ("", NOBODY):
            self.why = NO_HANDSHAKE

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What to poll for reading: the frames, and the events of the connection."""
        return self._sockets

    def close(self) -> None:
        """Frames of an open connection have a second to leave. Idempotent.

        The owner must no longer poll `sockets`: a closed descriptor may come back as that of another file.
        """
        if self._socket.closed:
            return
        self.events()
        self._monitor.close()
        self._socket.close(LINGER_MS if self._was_up else 0)


def _monitored(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> Monitor:
    try:
        return Monitor(context, socket)
    except zmq.ZMQError:
        socket.close(0)
        raise

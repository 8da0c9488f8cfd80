"""The calling end of a link to one boot of one node. Plain and non-blocking: its owner polls its sockets.

A link is Hello, then numbered frames both ways, then silence or a cut. Both ends share these rules:

1. The first frame of every connection is Hello with the attempts that the caller still waits for. So is the first one
   after a gap. A socket is never used for two connections. What an old one held is never delivered after the Hello of
   the new one.
2. Frames are numbered per sender. Hello sets the count, and so does a Welcome of a smaller number, alone in their
   frames. A number that is not the next one means lost frames (gap): say Hello again, also before a Welcome. A number
   seen before is a duplicate: dropped, counted.
3. A Hello from the listening end asks for a Hello: it lost frames, or does not know the caller.
4. Any good frame proves that this boot of the node is alive (UP) and renews the lease. Silence for lease_s ends the
   link. So does a cut that the same boot does not heal within rewelcome_s.
5. A frame of another boot of that node ends the link at once. LOST is for ever. Whoever still wants the node opens a
   new link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Literal

import zmq

from pdcluster.core import messages as m
from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire import codec
from pdcluster.wire.address import peer_address
from pdcluster.wire.batch import MessageBatch
from pdcluster.wire.link_socket import LinkSocket
from pdcluster.wire.sockets import ConnectionEvent, WireSettings

# Messages that say something of the link when a frame begins with one.
FIRST_WORDS = frozenset((m.Hello, m.Welcome, m.Ping))

# (request, attempt, next output position expected) of each attempt still waited for.
Open = tuple[tuple[str, int, int], ...]


class LinkState(Enum):
    CONNECTING = auto()
    UP = auto()
    LOST = auto()


class ClientLink:
    """One thread owns it. `dropped` counts frames by reason, `gaps` the times when frames were missing. `replaced`:
    lost to a newer boot.
    """

    def __init__(
        self,
        me: Peer,
        endpoint: m.Endpoint,
        *,
        kind: Literal["router", "node"],
        context: zmq.Context[zmq.Socket[bytes]],
        settings: WireSettings,
        open_attempts: Callable[[], Open],
        now: float,
        dropped: Counter[str] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.peer = Peer(endpoint.node, endpoint.incarnation)
        self.state = LinkState.CONNECTING
        self.lost_because = ""
        self.replaced = False
        self.gaps = 0
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        self._me, self._kind, self._context, self._settings = me, kind, context, settings
        self._open_attempts = open_attempts
        peer_address(endpoint.address)  # raises ProtocolError
        self._batch = MessageBatch(me, endpoint.incarnation, max_frame_bytes=settings.max_frame_bytes)
        # Messages that wait for a flush.
        self.unsent = self._batch.parts
        self._sent = 0
        # Number of the frame that comes next; 0 before the first one of a connection, which have numbers from 1 on.
        self._next = 0
        self._heard_at = self._sent_at = self._hello_at = self._drained_at = now
        self._up_by = now + settings.lease_s
        self._was_up = False
        self._hello_due = False
        self._reopen_at: float | None = None
        self._socket: LinkSocket | None = None
        # What to poll for reading: messages, and what becomes of the connection. Another tuple when that is replaced.
        self.sockets: Sequence[zmq.Socket[bytes]] = ()
        # Sockets of connections that are over. They wait for `release`.
        self.retired: list[LinkSocket] = []
        self._events: list[ConnectionEvent] = []
        # What went wrong with the last connection.
        self._why = ""
        self._open_socket(now)

    # ------------------------------------------------------------ what the owner calls

    def release(self) -> None:
        """Close the sockets of connections that are over. The owner calls it once it no longer polls their sockets."""
        for socket in self.retired:
            socket.close()
        self.retired.clear()

    def put(self, message: m.AnyMessage) -> int:
        """Put one message into the next frame and return that frame's number. 0 when it has no room, or the link is
        lost or not open.
        """
        return self._sent + 1 if self._socket is not None and self._batch.put(message) else 0

    def send(self, message: m.AnyMessage, now: float) -> int:
        """As `put`, after what waits has left when there is no room. 0 when the link is lost, not open, or too much
        waits already."""
        number = self.put(message)
        if number or self._socket is None or not self.flush(now):
            return number
        return self.put(message)

    def flush(self, now: float) -> bool:
        """Hand what was put to the socket, as one frame. False when too much waits there: it is kept for the next
        flush."""
        if self._socket is None or not self.unsent:
            return True
        if not self._socket.send(self._batch.frame(self._sent + 1)):
            return False
        self._batch.clear()
        self._sent += 1
        self._sent_at = now
        return True

    def receive(self, now: float, *, looks_at_connection: bool = True) -> tuple[list[m.AnyMessage], bool]:
        """New messages in order, and whether more wait. About max_drain at most: frames are taken whole.
        looks_at_connection: False for an owner who knows that it did not change.
        """
        if looks_at_connection and self._socket is not None:
            self._events += self._socket.events()
        messages, more = self._drain(now)
        if self._events and not more:
            # Only now: what a node sent before it hung up still counts.
            events, self._events = self._events, []
            self._note_connection(events, now)
        return messages, more

    def tick(self, now: float) -> None:
        """Say what is due (Hello, Ping) and what waits, and end what is over. Call it a few times per heartbeat, after
        `receive`."""
        if self.state is LinkState.LOST:
            return
        if self._reopen_at is not None and now >= self._reopen_at:
            self._open_socket(now)
        if self._hello_due:
            self._ask_again(now)
        if self._socket is not None and not self.unsent and now - self._sent_at >= self._settings.heartbeat_s:
            self.send(m.Ping(), now)
        self.flush(now)
        self._end_if_over(now)

    def close(self, reason: str = "closed") -> None:
        """Drop the connection; nothing is sent any more. Idempotent; `release` follows."""
        if self.state is not LinkState.LOST:
            self.state, self.lost_because = LinkState.LOST, reason
        self._reopen_at = None
        self._retire_socket()

    # ------------------------------------------------------------ connection

    def _open_socket(self, now: float) -> None:
        self._reopen_at = None
        self._next = 0
        try:
            self._socket = LinkSocket(self._context, self.endpoint.address, self._settings, self.endpoint.link_key)
        except ProtocolError as error:
            self.close(str(error))
            return
        self.sockets = self._socket.sockets()
        self._say_hello(now)

    def _retire_socket(self) -> None:
        if self._socket is not None:
            self._why = self._socket.why
            self.retired.append(self._socket)
        self._socket = None
        self.sockets, self._events = (), []
        if self.unsent:
            # Lost with the connection, under its number: what was counted by it is not counted twice.
            self._batch.clear()
            self._sent += 1

    def _note_connection(self, events: list[ConnectionEvent], now: float) -> None:
        for event in events:
            if event is ConnectionEvent.DOWN:
                self._reconnect(now)
                return
            if self._was_up or self._kind == "node":
                # It was there and now nobody listens: that process is gone, no need to wait. A node calls another at an
                # address from a ticket, so somebody spoke with it before.
                self.close(f"{self.endpoint.address} refuses connections")
                return

    def _reconnect(self, now: float) -> None:
        self._retire_socket()
        if self.state is LinkState.UP:
            self.state = LinkState.CONNECTING
            self._up_by = now + self._settings.rewelcome_s
            self._open_socket(now)
        else:
            self._reopen_at = now + self._settings.hello_interval_s

    def _end_if_over(self, now: float) -> None:
        # Judged by the last complete drain: while this process was busy, frames may be waiting unread.
        if self.state is LinkState.UP and self._drained_at - self._heard_at >= self._settings.lease_s:
            self.close(f"nothing heard from {self.peer.node} for {self._settings.lease_s} s")
        elif self.state is LinkState.CONNECTING and now >= self._up_by:
            why = self._socket.why if self._socket is not None else self._why
            self.close(f"{self.peer.node} did not answer at {self.endpoint.address}{f': {why}' if why else ''}")

    # ------------------------------------------------------------ frames

    def _drain(self, now: float) -> tuple[list[m.AnyMessage], bool]:
        messages: list[m.AnyMessage] = []
        most = self._settings.max_drain
        for _ in range(most):
            socket = self._socket
            if socket is None:
                return messages, False
            frame = socket.take()
            if frame is None:
                self._drained_at = now
                return messages, False
            messages += self._accept(frame, now)
            if len(messages) >= most:
                break
        return messages, True

    def _say_hello(self, now: float) -> None:
        self._hello_at = now
        self._hello_due = not self.send(m.Hello(self._kind, self._open_attempts()), now)
        self.flush(now)

    def _ask_again(self, now: float) -> None:
        # At most one per interval: a peer that loses everything must not make us send everything.
        self._hello_due = True
        if now - self._hello_at >= self._settings.hello_interval_s:
            self._say_hello(now)

    def _accept(self, frame: bytes, now: float) -> Iterable[m.AnyMessage]:
        try:
            envelope = codec.decode(frame, max_bytes=self._settings.max_frame_bytes)
        except ProtocolError:
            self.dropped["malformed"] += 1
            return ()
        node, incarnation = self.peer
        if (
            envelope.sender != node
            or envelope.to_incarnation != self._me.incarnation
            or envelope.incarnation != incarnation
        ):
            return self._refuse(envelope)
        self._heard_at = now
        self.state, self._was_up = LinkState.UP, True
        messages = envelope.messages
        if envelope.sequence == self._next and type(messages[0]) not in FIRST_WORDS:  # as nearly all are
            self._next += 1
            return messages
        return self._in_order(envelope, now)

    def _refuse(self, envelope: m.Envelope) -> Iterable[m.AnyMessage]:
        """What is not from this boot of the node to this one of ours."""
        if envelope.sender == self.peer.node and envelope.incarnation != self.peer.incarnation:
            self.dropped["other_incarnation"] += 1
            self.replaced = True
            self.close(f"{self.peer.node} at {self.endpoint.address} is now another boot ({envelope.incarnation})")
        else:
            self.dropped["misdirected"] += 1
        return ()

    def _in_order(self, envelope: m.Envelope, now: float) -> Iterable[m.AnyMessage]:
        last, self._next = self._next - 1, envelope.sequence + 1
        first = envelope.messages[0]
        if isinstance(first, m.Hello):
            self.gaps += 1
            self._ask_again(now)
            return ()
        is_anew = isinstance(first, m.Welcome) and envelope.sequence <= last
        if last >= 0 and envelope.sequence != last + 1 and not is_anew:
            if envelope.sequence <= last:
                self._next = last + 1
                self.dropped["duplicate"] += 1
                return ()
            self.gaps += 1
            self._ask_again(now)
        return envelope.messages[1:] if isinstance(first, m.Ping) else envelope.messages

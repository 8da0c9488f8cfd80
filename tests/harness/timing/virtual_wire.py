"""A simulated ZMQ under the real links: the same Hub, ClientLink and NodeLink speak over it, and a tap decides what happens
to each frame.

Only what `pdcluster.wire` uses: one ROUTER per listening process, DEALERs that connect to it, and the monitor's two
events. A connection keeps the order of its frames, as TCP does, unless the tap asks otherwise. Give each process its
own context (`Wire.context`).
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from virtual_time import VirtualLoop

LATENCY_S = 0.0002
# Timers of the same moment go off in any order, so frames that follow each other get moments of their own.
TICK_S = 1e-7
RECONNECT_S = 0.05
FIRST_FD = 1 << 30


@dataclass(frozen=True, slots=True)
class Delivery:
    """A frame that arrives delay_s later than it would. in_order: it holds up what is sent after it."""

    data: bytes
    delay_s: float = 0.0
    in_order: bool = True


# (connection, sender, frame) → what arrives of it.
Tap = Callable[["Connection", str, bytes], list[Delivery]]


def as_sent(connection: Connection, sender: str, data: bytes) -> list[Delivery]:
    return [Delivery(data)]


@dataclass(eq=False, slots=True)
class Connection:
    identity: bytes
    dealer: Socket
    router: Socket
    is_up: bool = True
    # Process → when the last frame that it sent in order arrives.
    free_at: dict[str, float] = field(default_factory=dict)


class Wire:
    """muted: processes whose frames vanish while their connections stay up."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.tap: Tap = as_sent
        self.muted: set[str] = set()
        self.wakers: dict[str, Callable[[], None]] = {}
        self.monitors: dict[str, Socket] = {}
        self.listeners: dict[int, Socket] = {}
        self.connections: list[Connection] = []
        self.numbers = itertools.count(1)

    def context(self, owner: str) -> Context:
        return Context(self, owner)

    def send(self, connection: Connection, source: Socket, data: bytes) -> None:
        target = connection.router if source is connection.dealer else connection.dealer
        if source.owner in self.muted or target.owner in self.muted:
            return
        for delivery in self.tap(connection, source.owner, data):
            at = self.loop.time() + LATENCY_S + delivery.delay_s
            if delivery.in_order:
                at = connection.free_at[source.owner] = max(at, connection.free_at.get(source.owner, 0.0) + TICK_S)
            self.loop.call_at(at, self._arrive, connection, target, delivery.data)

    def _arrive(self, connection: Connection, target: Socket, data: bytes) -> None:
        # What a caller sent before it hung up still arrives; nothing reaches a socket that is closed.
        if target.closed or (target is connection.dealer and not connection.is_up):
            return
        target.put([connection.identity, data] if target is connection.router else [data])

    def cut(self, connection: Connection) -> None:
        """The connection ends; the caller is told, and calls again."""
        if connection.is_up:
            connection.is_up = False
            self.connections.remove(connection)
            connection.router.callers.pop(connection.identity, None)
            if not connection.dealer.closed:
                self.loop.call_later(LATENCY_S, connection.dealer.on_cut)

    def cut_all(self, first: str, second: str) -> None:
        for connection in [
            each for each in self.connections if {each.dealer.owner, each.router.owner} == {first, second}
        ]:
            self.cut(connection)


class Context:
    def __init__(self, wire: Wire, owner: str) -> None:
        self.wire = wire
        self.owner = owner

    def socket(self, kind: int) -> Socket:
        return Socket(self.wire, self.owner, kind)

    def destroy(self, linger: int | None = None) -> None:
        """Its sockets are closed by their owners."""


class Socket:
    def __init__(self, wire: Wire, owner: str, kind: int) -> None:
        self.wire, self.owner, self.kind = wire, owner, kind
        self.fd = FIRST_FD + next(wire.numbers)
        self.closed = False
        self.inbox: deque[list[bytes]] = deque()
        self.callers: dict[bytes, Connection] = {}
        self._connection: Connection | None = None
        self._unsent: list[bytes] = []
        self._port = 0
        self._watcher: Socket | None = None

    def fileno(self) -> int:
        return self.fd

    def setsockopt(self, option: int, value: object) -> None:
        """Options change nothing here."""

    def getsockopt(self, option: int) -> bytes:
        assert option == zmq.LAST_ENDPOINT
        return f"tcp://127.0.0.1:{self._port}".encode()

    # ------------------------------------------------------------ connecting

    def bind(self, address: str) -> None:
        assert address.startswith("tcp://127.0.0.1:")
        self._port = 10_000 + next(self.wire.numbers)
        self.wire.listeners[self._port] = self

    def connect(self, address: str) -> None:
        if address.startswith("inproc://"):
            self.wire.monitors[address]._watcher = self
        else:
            self._port = int(address.rpartition(":")[2])
            self.wire.loop.call_later(LATENCY_S, self._call)

    def monitor(self, address: str | None, events: int) -> None:
        if address is None:
            self._watcher = None
        else:
            self.wire.monitors[address] = self

    def _call(self) -> None:
        if self.closed or self._connection is not None:
            return
        listener = self.wire.listeners.get(self._port)
        if self.owner in self.wire.muted or (listener is not None and listener.owner in self.wire.muted):
            self.wire.loop.call_later(RECONNECT_S, self._call)
        elif listener is None:
            self._tell(zmq.EVENT_CONNECT_RETRIED)
            self.wire.loop.call_later(RECONNECT_S, self._call)
        else:
            self._connection = Connection(next(self.wire.numbers).to_bytes(5, "big"), self, listener)
            listener.callers[self._connection.identity] = self._connection
            self.wire.connections.append(self._connection)
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self.wire.send(self._connection, self, data)

    def on_cut(self) -> None:
        self._connection = None
        if not self.closed:
            self._tell(zmq.EVENT_DISCONNECTED)
            self.wire.loop.call_later(RECONNECT_S, self._call)

    def _tell(self, event: int) -> None:
        if self._watcher is not None:
            self._watcher.put([struct.pack("=hi", event, 0), b""])

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        if self.wire.listeners.get(self._port) is self:
            del self.wire.listeners[self._port]
        for connection in [*self.callers.values(), *([self._connection] if self._connection else [])]:
            self.wire.cut(connection)

    # ------------------------------------------------------------ frames

    def put(self, parts: list[bytes]) -> None:
        self.inbox.append(parts)
        self.wire.loop.notify(self.fd)
        waker = self.wire.wakers.get(self.owner)
        if waker is not None:
            waker()

    def send(self, data: bytes, flags: int = 0, copy: bool = True, track: bool = False) -> zmq.MessageTracker | None:
        """What is sent has left at once: a tracker of nothing is done."""
        if self._connection is None:
            self._unsent.append(data)
        else:
            self.wire.send(self._connection, self, data)
        return zmq.MessageTracker() if track else None

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int = 0) -> None:
        connection = self.callers.get(parts[0])
        if connection is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.wire.send(connection, self, parts[1])

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLOUT | (zmq.POLLIN if self.inbox else 0)

    def recv(self, flags: int = 0) -> bytes:
        (data,) = self.recv_multipart(flags)
        return data

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

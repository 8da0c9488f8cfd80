"""A TCP proxy on loopback that owns the wire between two ends: it cuts, truncates, flips, delays, holds and repeats
what passes, on order.

An order is for the next bytes towards the listener, after a number of them; where they are cut knows nothing of frames,
as on a real wire.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from dataclasses import dataclass, field

RECORDED_BYTES = 1 << 20
READ_BYTES = 32 << 10
CONNECT_S = 2.0


@dataclass
class Order:
    """kind: cut, truncate, flip, delay, repeat or swap; after: bytes that pass before it."""

    kind: str
    after: int
    bit: int = 0
    seconds: float = 0.4


@dataclass(eq=False)
class Connection:
    near: socket.socket
    far: socket.socket
    # The first bytes towards the listener.
    sent: bytearray = field(default_factory=bytearray)
    is_truncated: bool = False


class MeddlingProxy:
    """`target` may be changed: later connections go there, with whatever the dialler believes about it. acted: orders
    that were carried out."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.acted = 0
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._flow = threading.Event()
        self._flow.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._is_over = False
        self._start(self._accept)

    def order(self, order: Order) -> None:
        with self._lock:
            self._order = order

    def act_now(self, kind: str) -> None:
        """Cut or truncate every connection, whether something passes or not."""
        with self._lock:
            connections = list(self._connections)
        self.acted += 1
        for connection in connections:
            connection.is_truncated = True
            shut(connection.far, socket.SHUT_RDWR if kind == "cut" else socket.SHUT_WR)

    def hold(self) -> None:
        """Connections stay up and carry nothing, until `heal`."""
        self.acted += 1
        self._flow.clear()

    def heal(self) -> None:
        with self._lock:
            self._order = None
        self._flow.set()

    def recorded(self) -> bytes:
        """The first bytes that each connection sent towards the listener."""
        with self._lock:
            return b"".join(bytes(connection.sent) for connection in self._connections)

    def repeat(self) -> None:
        """What every connection said so far is said again on a new one, which stays open for a while."""
        with self._lock:
            recorded = [bytes(connection.sent) for connection in self._connections if connection.sent]
        for data in recorded[-3:]:
            self.acted += 1
            self._start(self._say_again, data)

    def end(self) -> None:
        self._is_over = True
        self.heal()
        for sock in [
            self._listener,
            *itertools.chain.from_iterable((each.near, each.far) for each in self._connections),
        ]:
            shut(sock)
        for thread in self._threads:
            thread.join(5)
        for sock in [
            self._listener,
            *itertools.chain.from_iterable((each.near, each.far) for each in self._connections),
        ]:
            sock.close()

    # ------------------------------------------------------------ threads

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), CONNECT_S)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            connection = Connection(near, far)
            with self._lock:
                self._connections.append(connection)
            self._start(self._forward, connection)
            self._start(self._answer, connection)

    def _forward(self, connection: Connection) -> None:
        """From the dialler to the listener: what orders are about."""
        try:
            while data := connection.near.recv(READ_BYTES):
                self._flow.wait()
                room = RECORDED_BYTES - len(connection.sent)
                connection.sent += data[: max(room, 0)]
                data = self._meddle(connection, data)
                if not connection.is_truncated:
                    connection.far.sendall(data)
            shut(connection.far, socket.SHUT_WR)
        except OSError:
            self._end(connection)

    def _answer(self, connection: Connection) -> None:
        try:
            while data := connection.far.recv(READ_BYTES):
                self._flow.wait()
                connection.near.sendall(data)
            shut(connection.near, socket.SHUT_WR)
        except OSError:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        shut(connection.near)
        shut(connection.far)

    def _meddle(self, connection: Connection, data: bytes) -> bytes:
        with self._lock:
            order = self._order
            if order is None:
                return data
            if order.after >= len(data):
                order.after -= len(data)
                return data
            self._order = None
            self.acted += 1
        at = order.after
        if order.kind == "flip":
            return data[:at] + bytes([data[at] ^ 1 << order.bit]) + data[at + 1 :]
        if order.kind == "delay":
            time.sleep(order.seconds)
            return data
        if order.kind == "repeat":
            return data + data[at:]
        if order.kind == "swap":
            return data[:at] + swapped(data[at:])
        connection.far.sendall(data[:at])
        if order.kind == "truncate":
            connection.is_truncated = True
            shut(connection.far, socket.SHUT_WR)
            return b""
        assert order.kind == "cut"
        self._end(connection)
        raise ConnectionAbortedError("cut")

    def _say_again(self, data: bytes) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.target), CONNECT_S) as sock:
                sock.settimeout(CONNECT_S)
                sock.sendall(data)
                while sock.recv(READ_BYTES):
                    continue
        except OSError:
            return  # the listener hung up, or waits for more


def swapped(data: bytes) -> bytes:
    """Its halves in the other order."""
    half = len(data) // 2
    return data[half:] + data[:half]


def shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    try:
        sock.shutdown(how)
    except OSError:
        return  # it ended by itself

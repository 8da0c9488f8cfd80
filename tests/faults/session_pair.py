"""Both ends of a transfer over a real medium, one of them in a process of its own, and what is between them: the test
hands the control messages over, and can cut every connection of a medium that goes over TCP.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from session_side import AnySide, Control, RemoteSide, Side

from pdcluster.core.messages import AbortAck, Commit, Ticket
from pdcluster.transfer.backends.tcp_links import TcpAdvert

LIMIT_S = 80.0


class Pair:
    """remote: which end, reader or writer, runs in a process of its own. on_message: asked before a control message
    goes over; False loses it."""

    def __init__(self, backend: str, remote: str, *, through_proxy: bool = False) -> None:
        self.backend = backend
        self.remote = RemoteSide(remote, backend)
        self.local = Side("writer" if remote == "reader" else "reader", backend)
        self.reader: AnySide = self.remote if remote == "reader" else self.local
        self.writer: AnySide = self.local if remote == "reader" else self.remote
        self.seen: Counter[tuple[str, int]] = Counter()
        self.on_message: Callable[[Control], bool] = lambda message: True
        self.proxy: Proxy | None = None
        self._through_proxy = through_proxy
        # The remote process is stopped or dead: nothing is handed to it.
        self.silent = False

    def open(self, pages: list[int], deadline_s: float = 30.0) -> tuple[int, str]:
        """(nonce, ticket)"""
        data = self.reader.call("open", pages, deadline_s)
        ticket = msgspec.msgpack.decode(bytes.fromhex(data), type=Ticket)
        if self._through_proxy:
            ((name, advert),) = ticket.reader.adverts
            ticket = msgspec.structs.replace(
                ticket, reader=msgspec.structs.replace(ticket.reader, adverts=((name, self._redirected(advert)),))
            )
            data = msgspec.msgpack.encode(ticket).hex()
        return ticket.nonce, data

    def _redirected(self, advert: bytes) -> bytes:
        real = msgspec.msgpack.decode(advert, type=TcpAdvert)
        if self.proxy is None:
            self.proxy = Proxy(real.host, real.port)
        return msgspec.msgpack.encode(TcpAdvert("127.0.0.1", self.proxy.port, real.token))

    def step(self) -> None:
        for side, other in ((self.reader, self.writer), (self.writer, self.reader)):
            events, messages = side.take()
            self.seen.update(events)
            for message in messages:
                if self.on_message(message) and not (self.silent and other is self.remote):
                    other.handle(message)

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}; seen {dict(self.seen)}"
            self.step()
            time.sleep(0.0005)

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.step()
            time.sleep(0.001)

    def has(self, *kinds: str, nonce: int) -> bool:
        """Did one of these events come?"""
        return any(self.seen[kind, nonce] for kind in kinds)

    def transfer(self, sources: list[int], targets: list[int]) -> int:
        """A whole one that ends well, tried again while the path recovers."""
        for _ in range(8):
            nonce, ticket = self.open(targets)
            if self.writer.call("accept", ticket):
                self.writer.call("push", nonce, sources, 0, True)
                self.until(lambda nonce=nonce: self.has("Landed", "Failed", nonce=nonce), "an end of the transfer")
                if self.has("Landed", nonce=nonce):
                    self.until(lambda nonce=nonce: self.has("Drained", nonce=nonce), "the writer is done")
                    return nonce
            else:
                self.reader.call("abort", nonce)
            self.until(lambda nonce=nonce: self.has("Reclaimed", nonce=nonce), "the pages come back")
            self.run(1.0)
        raise AssertionError("no transfer goes through any more")

    def end(self) -> None:
        self.remote.end()
        self.local.end()
        if self.proxy is not None:
            self.proxy.end()


def is_commit(message: Control) -> bool:
    return isinstance(message, Commit)


def is_abort_ack(message: Control) -> bool:
    return isinstance(message, AbortAck)


class Proxy:
    """Passes TCP connections on, and cuts all of them when told."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # cut

    def cut(self) -> None:
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            _shut(each)

    def end(self) -> None:
        _shut(self._listener)
        sockets = [*self._sockets]
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for each in [self._listener, *sockets]:
            each.close()


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it ended by itself

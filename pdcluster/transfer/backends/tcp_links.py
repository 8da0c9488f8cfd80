"""Authenticated TCP connections between two boots: listening, the hello, sends and receives with progress deadlines.

A hello names the writer's boot and proves that the writer knows the token of the reader's advert (`lane_hello`), so
only a holder of a ticket gets in. All sockets are non-blocking. Another thread ends a connection by shutting its socket
down. Payload formats belong to the backends.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import socket
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from pdcluster.core.address import format_address
from pdcluster.core.errors import ConfigError, PeerUnreachable, ProtocolError
from pdcluster.processes.listening import listening_place
from pdcluster.transfer.backends.base import DECODE_ERRORS, Peer
from pdcluster.transfer.backends.lane_hello import TOKEN_BYTES, Greeted, LaneKeys, hear_hello, say_hello
from pdcluster.transfer.backends.ledger import Counts
from pdcluster.transfer.backends.sealing import LENGTH, RECORD_BYTES, TAG_BYTES, RecordOpener, RecordSealer
from pdcluster.transfer.layout.runs import SpanTable

LOG = logging.getLogger(__name__)

MAX_LINKS = 1024
# Connections whose hello is not over, and how long it may take. The accepting thread serves them all. One more ends the
# eldest of the address that has most of them, so that a stranger ends none of another host.
MAX_HALF_OPEN, HELLO_S = 32, 5.0
# Most bytes of one receive, so that a thread waiting for a check waits microseconds.
BURST_BYTES = 1 << 20
MAX_VECTOR = 64
# Taken at once.
MOST_ANSWERS = 64
# Most bytes of one send. Nobody waits for it, and the socket takes no more than it has room for.
SEND_BYTES = 4 << 20
GATHER_BYTES, GATHER_S = 512 << 10, 0.01
# A congestion control that every Linux has and allows to everyone.
UNPACED = b"reno"
SEAL_BYTES = 8


def sealed(frame: bytes) -> bytes:
    """A frame that says where bytes go, followed by its xxh3-64; `Link.receive_seal` checks it.

    A chunk's digest covers its payload, but a payload in another chunk's place spoils that chunk after its own digest
    was taken. So a damaged frame is found before it acts.
    """
    return frame + xxhash.xxh3_64_digest(frame)


class TcpAdvert(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    token: bytes


@lru_cache(maxsize=1024)
def decode_advert(data: bytes) -> TcpAdvert:
    try:
        advert = msgspec.msgpack.decode(data, type=TcpAdvert)
    except DECODE_ERRORS as error:
        raise PeerUnreachable(f"the peer's advert is not readable: {error}") from error
    if not 0 < advert.port < 65536 or len(advert.token) != TOKEN_BYTES:
        raise PeerUnreachable(f"the peer's advert names port {advert.port} and a token of {len(advert.token)} bytes")
    return advert


class Cursor:
    """A position in spans of a memory that are sent or filled piece by piece. It creates views only for one system call
    and does not keep them, which costs a dozen instructions of Python instead of a hundred.
    """

    def __init__(self, memory: memoryview, spans: SpanTable | None = None) -> None:
        """spans: inside the memory, none empty; default: all of it."""
        self._memory = memory
        rows = np.array([(0, len(memory))]) if spans is None else spans.joined().rows
        # The remaining part of the span at `_row`.
        self._starts: list[int] = rows[:, 0].tolist()
        self._ends: list[int] = rows.sum(axis=1).tolist()
        # Bytes up to the end of each span.
        self._totals: list[int] = rows[:, 1].cumsum().tolist()
        self._row = self._done = 0

    @property
    def started(self) -> bool:
        return self._done > 0

    @property
    def is_done(self) -> bool:
        return self._done == self._totals[-1]

    def head(self, most_bytes: int = BURST_BYTES) -> list[memoryview]:
        """The next bytes, at most `most_bytes` in at most MAX_VECTOR pieces."""
        first, until, memory = self._row, self._done + most_bytes, self._memory
        end = min(bisect_left(self._totals, until, first) + 1, first + MAX_VECTOR, len(self._totals))
        pieces = [
            memory[start:stop] for start, stop in zip(self._starts[first:end], self._ends[first:end], strict=True)
        ]
        if (beyond := self._totals[end - 1] - until) > 0:
            pieces[-1] = pieces[-1][:-beyond]
        return pieces

    def advance(self, nbytes: int) -> None:
        """Move on by bytes that `head` returned."""
        self._done += nbytes
        row = self._row = bisect_right(self._totals, self._done, self._row)
        if row < len(self._totals):
            self._starts[row] = self._ends[row] - (self._totals[row] - self._done)


class Link:
    """One connection, for one thread. Any thread may call `end`."""

    is_sealed = False
    num_flushed = 0

    def __init__(self, sock: socket.socket, peer: Peer, progress_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self.peer = peer
        # Locked while bytes go into memory; see `barrier`.
        self.lock = threading.Lock()
        self._progress_s = progress_s
        self._arriving = select.poll()
        self._arriving.register(sock, select.POLLIN)
        self._wakes_at = 1

    def end(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it ended by itself

    def barrier(self) -> None:
        """Return when the receiving thread has passed its current check. What was revoked before the call is not
        written after it.
        """
        with self.lock:
            return

    def wait(self, events: int, timeout_s: float | None) -> None:
        """Wait until the socket is ready. Raises TimeoutError without progress for timeout_s; None waits for ever."""
        self._wake_at(1)
        poller = select.poll()
        poller.register(self.sock, events)
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            raise TimeoutError(f"no progress with {self.peer.node} for {timeout_s} s")

    def _wake_at(self, nbytes: int) -> None:
        """Set the kernel's low-water mark: the socket becomes readable at `nbytes`, or when the connection is over."""
        if nbytes != self._wakes_at:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes

    def gather(self, nbytes: int, timeout_s: float) -> None:
        """Wait until `nbytes`, GATHER_BYTES, or a few bytes after a pause can be read at once. Raises TimeoutError when
        none come for timeout_s.

        Fewer and larger reads wake both ends less often, and each costs some Python. Until `wait` or the next
        `receive`, a poll of the socket waits for as many bytes.
        """
        self._wake_at(min(nbytes, GATHER_BYTES))
        if not self._arriving.poll(GATHER_S * 1000):
            self.wait(select.POLLIN, timeout_s)

    def receive_into(self, view: memoryview, *, idle: bool = False) -> None:
        """Fill `view`. idle: no deadline for its first byte. Afterwards a poll of the socket reports the next byte."""
        position = 0
        while position < len(view):
            if len(view) - position >= GATHER_BYTES:
                self.gather(len(view) - position, self._progress_s)
            try:
                count = self.sock.recv_into(view[position:])
            except BlockingIOError:
                if idle and not position:
                    self.wait(select.POLLIN, None)
                else:
                    self.gather(len(view) - position, self._progress_s)
                continue
            if not count:
                raise ConnectionResetError(f"{self.peer.node} closed the connection")
            position += count
        self._wake_at(1)

    def receive(self, nbytes: int, *, idle: bool = False) -> bytearray:
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), idle=idle)
        return data

    def receive_seal(self, *parts: bytes | bytearray) -> None:
        """Receive the seal of a frame that came in these parts. Raises ProtocolError when it does not match."""
        seal, state = self.receive(SEAL_BYTES), xxhash.xxh3_64()
        for part in parts:
            state.update(part)
        if state.digest() != seal:
            raise ProtocolError("a frame was damaged on its way")

    def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, self._progress_s)

    # Without waiting, for a thread that polls. They raise BlockingIOError.

    def send_some(self, pieces: list[memoryview]) -> int:
        """Send from the begin of the pieces. Returns how many of their bytes it took. `flush` must follow."""
        return self.sock.sendmsg(pieces)

    def flush(self) -> None:
        """Return when the socket has all that `send_some` took. `num_flushed` grows by what it sends."""

    def recv_some(self, nbytes: int) -> bytes:
        """What has come, at most about so much. b"": the peer closed it."""
        return self.sock.recv(nbytes)


class SealedLink(Link):
    """A link whose bytes go in sealed records (`sealing`)."""

    is_sealed = True

    def __init__(self, sock: socket.socket, peer: Peer, progress_s: float, seals: bytes, opens: bytes) -> None:
        """seals, opens: the keys of what this end sends, and of what it receives."""
        super().__init__(sock, peer, progress_s)
        self._sealer, self._opener = RecordSealer(seals), RecordOpener(opens)
        # Of a record that is being sent.
        self._unsent = memoryview(b"")
        # Of the last record that was received: what nobody took yet.
        self._plain = memoryview(b"")
        self._scratch = memoryview(bytearray(RECORD_BYTES))
        self._sealed = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        # Behind the last whole record, for `recv_some`.
        self._partial = b""

    def receive_into(self, view: memoryview, *, idle: bool = False) -> None:
        position = 0
        while position < len(view):
            if not self._plain:
                position += self._receive_record(view[position:], idle=idle and not position)
                continue
            count = min(len(self._plain), len(view) - position)
            view[position : position + count] = self._plain[:count]
            self._plain = self._plain[count:]
            position += count

    def _receive_record(self, view: memoryview, *, idle: bool) -> int:
        """Returns how many bytes went into the view: all of the record, or none where it has more than that."""
        head = bytearray(LENGTH.size)
        super().receive_into(memoryview(head), idle=idle)
        size = self._opener.size_of(head)
        sealed = self._sealed[:size]
        super().receive_into(sealed)
        count = size - TAG_BYTES
        if count <= len(view):
            self._opener.open_into(head, sealed, view[:count])
            return count
        self._plain = self._scratch[:count]
        self._opener.open_into(head, sealed, self._plain)
        return 0

    def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            super().send(self._sealer.seal(view[:RECORD_BYTES]))
            view = view[RECORD_BYTES:]

    def send_some(self, pieces: list[memoryview]) -> int:
        self.flush()
        plain = pieces[0][:RECORD_BYTES]
        self._unsent = self._sealer.seal(plain)
        return len(plain)

    def flush(self) -> None:
        while self._unsent:
            count = self.sock.send(self._unsent)
            self.num_flushed += count
            self._unsent = self._unsent[count:]

    def recv_some(self, nbytes: int) -> bytes:
        data = self.sock.recv(nbytes)
        if not data:
            return b""
        data = self._partial + data
        found = []
        while len(data) >= LENGTH.size and len(data) >= (
            end := LENGTH.size + self._opener.size_of(data[: LENGTH.size])
        ):
            plain = bytearray(end - LENGTH.size - TAG_BYTES)
            self._opener.open_into(data[: LENGTH.size], memoryview(data)[LENGTH.size : end], memoryview(plain))
            found.append(bytes(plain))
            data = data[end:]
        self._partial = data
        if not found:
            raise BlockingIOError
        return b"".join(found)


class AnswerReader:
    """Reads answers of one fixed format from a link, as many as are there."""

    def __init__(self, link: Link, form: struct.Struct) -> None:
        self._link, self._form = link, form
        self._partial = b""

    def take(self) -> Iterable[tuple[Any, ...]]:
        try:
            data = self._link.recv_some(MOST_ANSWERS * self._form.size)
        except BlockingIOError:
            return ()
        if not data:
            raise ConnectionResetError("the reader closed it")
        data = self._partial + data
        whole = len(data) - len(data) % self._form.size
        self._partial = data[whole:]
        return self._form.iter_unpack(data[:whole])


class HalfOpen:
    """A connection whose hello is not over."""

    def __init__(self, sock: socket.socket, host: str, token: bytes, *, is_sealed: bool) -> None:
        """host: the address that it comes from."""
        sock.setblocking(False)
        self.sock = sock
        self.host = host
        self.ends_at = time.monotonic() + HELLO_S
        self._hello = hear_hello(token, is_sealed=is_sealed, send=self._send)
        self._needed = next(self._hello)
        self._received = b""

    def advance(self) -> Greeted | None:
        """Take what has come. The hello's result once it is over. Raises OSError or ProtocolError where it failed."""
        while True:
            try:
                data = self.sock.recv(self._needed - len(self._received))
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionResetError("it closed the connection during its hello")
            self._received += data
            if len(self._received) < self._needed:
                continue
            received, self._received = self._received, b""
            try:
                self._needed = self._hello.send(received)
            except StopIteration as end:
                greeted: Greeted = end.value
                return greeted
            if not self._needed:  # names may be empty
                raise ProtocolError("its hello names no node")

    def _send(self, data: bytes) -> None:
        """A new connection takes these few bytes at once."""
        if self.sock.send(data) != len(data):
            raise ConnectionResetError("the connection takes no bytes during its hello")


class Listener:
    """Accepts links and runs `serve(link)` for each in a thread of its own. `serve` returns or raises when the link is
    over. Hellos need no threads.
    """

    def __init__(
        self,
        where: tuple[str, int],
        serve: Callable[[Link], None],
        counts: Counts,
        *,
        progress_s: float,
        is_sealed: bool = False,
    ) -> None:
        self._serve = serve
        self._counts = counts
        self._progress_s, self._is_sealed = progress_s, is_sealed
        self._lock = threading.Lock()
        self._links: dict[Link, threading.Thread] = {}
        self._closed = False
        self._token = os.urandom(TOKEN_BYTES)
        self._sock = _listening(*where)
        self._sock.setblocking(False)
        self.host = where[0]
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=f"kv-accept-{self.port}", daemon=True)
        self._thread.start()

    def advert(self) -> bytes:
        return msgspec.msgpack.encode(TcpAdvert(self.host, self.port, self._token))

    def barrier(self) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.barrier()

    def end_peer(self, peer: Peer, timeout_s: float = 2.0) -> bool:
        """End the peer's links and wait for their threads. False when one did not stop in time."""
        with self._lock:
            links = {link: thread for link, thread in self._links.items() if link.peer == peer}
        for link in links:
            link.end()
        for thread in links.values():
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in links.values())

    def is_serving(self) -> bool:
        """Whether a link's thread still runs."""
        with self._lock:
            return bool(self._links)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = dict(self._links)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        finally:
            for link in links:
                link.end()
            for thread in (self._thread, *links.values()):
                thread.join(2.0)
            self._sock.close()

    def _accept(self) -> None:
        """Run until it is closed: take connections and their hellos."""
        half_open: dict[int, HalfOpen] = {}
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        try:
            while not self._closed:
                now = time.monotonic()
                left = [half.ends_at - now for half in half_open.values()]
                for fd, _ in poller.poll(max(min(left), 0.0) * 1000 if left else None):
                    if fd == self._sock.fileno():
                        self._admit(half_open, poller)
                    elif fd in half_open:
                        self._hear(half_open, fd, poller)
                self._end_late(half_open, poller)
        finally:
            for half in half_open.values():
                half.sock.close()

    def _admit(self, half_open: dict[int, HalfOpen], poller: select.poll) -> None:
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:
            return  # the connection ended before it was accepted
        except OSError:
            if not self._closed:
                self._counts.add("accept_failed")  # out of descriptors: the backlog waits
                time.sleep(0.05)
            return
        if len(half_open) >= MAX_HALF_OPEN:
            counts = Counter(half.host for half in half_open.values())
            most = max(counts.values())
            eldest = next(fd for fd, half in half_open.items() if counts[half.host] == most)
            self._drop(half_open, eldest, poller, "too_many_hellos")
        half_open[sock.fileno()] = HalfOpen(sock, address[0], self._token, is_sealed=self._is_sealed)
        poller.register(sock, select.POLLIN)

    def _hear(self, half_open: dict[int, HalfOpen], fd: int, poller: select.poll) -> None:
        half = half_open[fd]
        try:
            greeted = half.advance()
            link: Link | None = None
            if greeted is not None:
                link = link_of(half.sock, greeted.writer, self._progress_s, greeted.keys, is_reader=True)
        except ProtocolError as error:
            LOG.warning("dropped a transfer connection: %s", error)
            self._drop(half_open, fd, poller, "bad_frame")
        except OSError as error:
            LOG.debug("a transfer connection ended during its hello: %s", error)
            self._drop(half_open, fd, poller, "link_ended")
        except Exception:  # of one connection; this thread serves all of them
            LOG.exception("a transfer connection failed during its hello")
            self._drop(half_open, fd, poller, "failed_hello")
        else:
            if link is not None:
                poller.unregister(fd)
                del half_open[fd]
                self._take(link)

    def _end_late(self, half_open: dict[int, HalfOpen], poller: select.poll) -> None:
        now = time.monotonic()
        for fd in [fd for fd, half in half_open.items() if half.ends_at <= now]:
            self._drop(half_open, fd, poller, "late_hello")

    def _drop(self, half_open: dict[int, HalfOpen], fd: int, poller: select.poll, reason: str) -> None:
        self._counts.add(reason)
        poller.unregister(fd)
        half_open.pop(fd).sock.close()

    def _take(self, link: Link) -> None:
        thread = threading.Thread(target=self._run, args=(link,), name=f"kv-receive-{self.port}", daemon=True)
        with self._lock:
            refused = self._closed or len(self._links) >= MAX_LINKS
            if not refused:
                self._links[link] = thread
        if refused:
            self._counts.add("too_many_links")
            link.sock.close()
        else:
            self._start(link, thread)

    def _start(self, link: Link, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the process is out of threads; the next link may get one
            self._counts.add("accept_failed")
            LOG.warning("dropped a transfer connection: %s", error)
            self._forget(link)

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.pop(link, None)
        link.sock.close()

    def _run(self, link: Link) -> None:
        try:
            self._serve(link)
        except ProtocolError as error:
            self._counts.add("bad_frame")
            LOG.warning("dropped a transfer connection of %s: %s", link.peer.node or "an unknown peer", error)
        except OSError as error:
            self._counts.add("link_ended")
            LOG.debug("transfer connection of %s ended: %s", link.peer.node, error)
        finally:
            self._forget(link)


def link_of(sock: socket.socket, peer: Peer, progress_s: float, keys: LaneKeys | None, *, is_reader: bool) -> Link:
    """A link after its hello, which gave these keys."""
    if keys is None:
        return Link(sock, peer, progress_s)
    seals, opens = (keys.to_writer, keys.to_reader) if is_reader else (keys.to_reader, keys.to_writer)
    return SealedLink(sock, peer, progress_s, seals, opens)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, place = listening_place(host, port)
        return socket.create_server(place, family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"the transfer engine cannot listen on {format_address(host, port)}: {error.strerror}; choose an address "
            "of this host with --transfer-host"
        ) from error


def connect(
    me: Peer, peer: Peer, advert: TcpAdvert, *, connect_s: float, progress_s: float, is_sealed: bool = False
) -> Link:
    """A link to the listener behind `advert`. Raises OSError or ProtocolError when it fails."""
    sock = socket.create_connection((advert.host, advert.port), timeout=connect_s)
    try:
        if is_same_host(sock.getsockname()[0], sock.getpeername()[0]):
            send_unpaced(sock)
        receive = partial(_receive_by, sock, time.monotonic() + HELLO_S)
        keys = say_hello(me, advert.token, is_sealed=is_sealed, send=sock.sendall, receive=receive)
    except ConnectionResetError as error:
        sock.close()
        raise ConnectionRefusedError(f"{peer.node} did not accept the hello: {error}") from error
    except BaseException:
        sock.close()
        raise
    return link_of(sock, peer, progress_s, keys, is_reader=False)


def _receive_by(sock: socket.socket, ends_at: float, nbytes: int) -> bytes:
    """So many bytes of a socket that blocks. Raises TimeoutError at that time, however they trickle in."""
    data = b""
    while len(data) < nbytes:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no whole hello came within {HELLO_S:g} s")
        sock.settimeout(left_s)
        received = sock.recv(nbytes - len(data))
        if not received:
            raise ConnectionResetError("it closed the connection during the hello")
        data += received
    return data


def is_same_host(own: str, peer: str) -> bool:
    """Whether both addresses of a connection belong to this host."""
    return own == peer or ipaddress.ip_address(peer).is_loopback


def send_unpaced(sock: socket.socket) -> None:
    """Switch off pacing. Within a host there is no network queue to keep short. A congestion control that paces (BBR)
    only makes both ends wait for timers.
    """
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
    except OSError as error:  # not allowed, or an older kernel: that is only slower
        LOG.info(
            "connections inside of this host keep the system's congestion control and not %s: %s",
            UNPACED.decode(),
            error,
        )

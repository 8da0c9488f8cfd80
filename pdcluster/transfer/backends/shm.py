"""Backend `shm`: both processes on one host. The reader's pool is shared memory (a memfd); the writer maps it and
copies straight into the pages.

The memfd travels by SCM_RIGHTS over an abstract unix socket, so nothing remains when a process is killed. On the same
socket the writer reports what it has copied (`shm_frames`). The reader cannot check a copy. The only fence is the end
of the writer's process, which its pidfd proves, or of the boot: a process that goes on as another boot says goodbye
when the threads that copied have ended. Only processes of the same user on the same host get in; those could read each
other's memory anyway.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pdcluster.core.errors import ConfigError, IntegrityError, PeerUnreachable, ProtocolError
from pdcluster.transfer.backends.base import Arrival, Fence, Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import (
    Arrivals,
    Counts,
    Doorbell,
    Inbox,
    Permits,
    Writes,
    level_of_end,
    start_or_release,
)
from pdcluster.transfer.backends.shm_frames import (
    MAX_HELLO_BYTES,
    MAX_NOTICE_BYTES,
    MAX_NOTICE_SPANS,
    MAX_REGIONS,
    TOKEN_BYTES,
    CopyNotice,
    Notices,
    SharedRegions,
    ShmAdvert,
    ShmHello,
    decode_advert,
    decode_hello,
    decode_shared,
    encode,
    pack_notice,
    pack_progress,
)
from pdcluster.transfer.backends.shm_memory import MappedMemory, Processes
from pdcluster.transfer.copying.copy import GilWaits, Payload, Table, copies_inside, native
from pdcluster.transfer.layout.runs import MOST_BYTES, RunTable, run_table
from pdcluster.transfer.layout.spans import CopyRuns

LOG = logging.getLogger(__name__)

MAX_LINKS = 1024
MAX_BARRED = 1024
UCRED = struct.Struct("3i")
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
# BURST: bytes copied at a time. TOLD: the writer reports progress this often, so that the reader digests at the same
# time and has at most one such piece left at the end. A longer copy without digests has a notice before and after it;
# the reader checks its targets while the bytes move.
BURST_BYTES, TOLD_BYTES = 16 << 20, 2 << 20
# The range of a write while only its sources are checked. The reader's memory is not mapped before the connection
# exists.
ANYWHERE = (0, MOST_BYTES)
# With more queued writes than this (the one that just ended included), the mover wakes nobody. Waking would take the
# GIL from the next copy, and nobody waits for room yet.
QUIET_WRITES = 3


@dataclass(frozen=True, slots=True)
class ShmSettings:
    """connect_s: deadline of the hello's answer.
    progress_s: deadline of a full socket of notices.
    retry_s: pause after a failed connect.
    """

    connect_s: float = 2.0
    progress_s: float = 5.0
    retry_s: float = 1.0


def _wait(sock: socket.socket, events: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(sock, events)
    if not poller.poll(timeout_s * 1000):
        raise TimeoutError(f"the other side did not answer within {timeout_s} s")


# ---------------------------------------------------------------- writing


class _Write(NamedTuple):
    handle: Handle
    source: Region
    region: int
    stamp: Stamp
    runs: RunTable
    # Rows for the mover. None: the reader's memory was not mapped yet when the write came.
    table: Table | None
    digests: bool


class _Mover:
    """The thread that copies to one peer. It owns the connected `sock`."""

    def __init__(
        self,
        sock: socket.socket,
        me: Peer,
        peer: Peer,
        advert: ShmAdvert,
        settings: ShmSettings,
        writes: Writes,
        waits: GilWaits,
    ) -> None:
        self._sock, self._me, self.peer, self.advert, self._settings, self._writes = (
            sock,
            me,
            peer,
            advert,
            settings,
            writes,
        )
        self._waits = waits
        # A write stays queued until it is copied.
        self.inbox: Inbox[_Write] = Inbox()
        # By region id.
        self._maps: dict[int, MappedMemory] = {}
        self.thread = threading.Thread(target=self._run, name=f"kv-copy-{peer.node}", daemon=True)
        start_or_release(self.thread, peer, self._end)

    def table_of(self, runs: RunTable, source: Region, region: int, nbytes: int) -> Table | None:
        """The addresses that the runs read and write. None when a run lies outside, or the reader's memory is not
        mapped yet.
        """
        mapping = self._maps.get(region)
        return (
            None
            if mapping is None
            else copies_inside(runs, (source.address, source.nbytes), (mapping.address, mapping.nbytes), nbytes)
        )

    def _run(self) -> None:
        try:
            self._greet(self._sock)
            self._serve(self._sock)
        except (OSError, ProtocolError) as error:
            LOG.log(level_of_end(error, self.inbox), "the transfer to %s by shm is over: %s", self.peer.node, error)
        except Exception:
            LOG.exception("the transfer thread to %s by shm failed", self.peer.node)
        finally:
            self._end()

    def _end(self) -> None:
        self._sock.close()
        self._settle_all()

    def _settle_all(self) -> None:
        """Copies run in this thread, so none is in flight here. The remaining writes are definitely not written."""
        for write in self.inbox.fail():
            self._writes.settle(write.handle, WriteStatus.FAILED)
        for mapping in self._maps.values():
            mapping.close()

    def _greet(self, sock: socket.socket) -> None:
        sock.send(encode(ShmHello(self.advert.token, self.advert.epoch, self._me.node, self._me.incarnation)))
        _wait(sock, select.POLLIN, self._settings.connect_s)
        data, fds, _, _ = socket.recv_fds(sock, 65536, MAX_REGIONS)
        try:
            self._map(data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _map(self, data: bytes, fds: list[int]) -> None:
        shared = decode_shared(data)
        if len(shared.regions) != len(fds):
            raise ProtocolError(f"{len(shared.regions)} regions came with {len(fds)} descriptors")
        for (region, nbytes), fd in zip(shared.regions, fds, strict=True):
            if not 0 < nbytes <= os.fstat(fd).st_size:
                raise ProtocolError(
                    f"region {region} is said to have {nbytes} bytes, its memory has {os.fstat(fd).st_size}"
                )
            self._maps[region] = MappedMemory(fd, nbytes)

    def _serve(self, sock: socket.socket) -> None:
        poller = select.poll()
        poller.register(self.inbox.fd, select.POLLIN)
        poller.register(sock, select.POLLIN)
        while not self.inbox.is_ending:
            while self.inbox and not self.inbox.is_ending:
                self._copy(sock, self.inbox.first())
                self.inbox.take()
            ready = poller.poll(0 if self._populate_more() else None)
            self.inbox.was_heard()
            if len(ready) > 1 or (ready and ready[0][0] != self.inbox.fd):
                raise ConnectionResetError("the reader closed it")  # the reader never sends after the hello

    def _populate_more(self) -> bool:
        """Use a pause to enter pages that later copies need."""
        return any(mapping.populate_more() for mapping in self._maps.values())

    def _copy(self, sock: socket.socket, write: _Write) -> None:
        mapping, spans, table = self._maps.get(write.region), write.runs.targets, write.table
        if table is None:
            table = self.table_of(write.runs, write.source, write.region, write.stamp.nbytes)
        if mapping is None or table is None:
            self._writes.settle(write.handle, WriteStatus.FAILED)
            return
        if not mapping.is_populated:
            for offset, nbytes in spans.joined():
                mapping.populate(offset, nbytes)
        payload = Payload(table, digests=write.digests, waits=self._waits)
        nbytes, is_told = write.stamp.nbytes, write.stamp.nbytes > TOLD_BYTES and len(spans) <= MAX_NOTICE_SPANS
        burst = TOLD_BYTES if is_told and write.digests else BURST_BYTES
        if is_told:
            self._notify(sock, pack_notice(CopyNotice(write.stamp, write.region, spans, has_begun=True)))
        for begin in range(0, nbytes, burst):  # bounded, so that `end` is noticed soon
            if self.inbox.is_ending:
                raise ConnectionAbortedError("closed by this node")
            payload.advance(burst)
            if is_told and (write.digests or begin + burst >= nbytes):
                self._notify(sock, pack_progress(min(begin + burst, nbytes)))
        if not is_told:
            self._notify(sock, pack_notice(CopyNotice(write.stamp, write.region, spans)))
        self._writes.settle(
            write.handle,
            WriteStatus.DONE,
            payload.digest() if write.digests else None,
            quietly=len(self.inbox) > QUIET_WRITES,
        )

    def _notify(self, sock: socket.socket, notice: bytes) -> None:
        deadline = time.monotonic() + self._settings.progress_s
        while True:
            try:
                sock.send(notice)
                return
            except BlockingIOError:
                if self.inbox.is_ending or time.monotonic() > deadline:
                    raise TimeoutError("the reader takes no notices") from None
                poller = select.poll()  # select takes no descriptor above 1023
                poller.register(sock, select.POLLOUT)
                poller.poll(100)


# ---------------------------------------------------------------- the backend


@dataclass(slots=True, eq=False)
class _Inlet:
    """A writer's connection, at the reader."""

    sock: socket.socket
    peer: Peer | None = None
    thread: threading.Thread | None = None


class ShmBackend:
    """Backend `shm`. One thread calls the public methods; movers, acceptor and inlets have their own threads."""

    def __init__(self, me: Peer, settings: ShmSettings | None = None, *, name: str = "shm") -> None:
        self.name = name
        self._me = me
        self._settings = settings if settings is not None else ShmSettings()
        self._doorbell = Doorbell()
        self.wakeup_fd = self._doorbell.fd
        self._counts = Counts()
        self.counters: Mapping[str, int] = self._counts.by_reason
        self._writes = Writes(self._doorbell)
        self._arrivals = Arrivals(self._doorbell)
        self._permits = Permits(self._counts)
        self.gil_waits = GilWaits()
        native()  # load now, not during the first transfer
        self._regions: dict[int, Region] = {}
        self._movers: dict[Peer, _Mover] = {}
        self._ended: list[_Mover] = []
        # Whom this boot has connected to, for its goodbye.
        self._readers: OrderedDict[Peer, ShmAdvert] = OrderedDict()
        self._lock = threading.Lock()
        self._links: set[_Inlet] = set()
        # Writers that have our memory. Used under the lock.
        self._met = Processes()
        self._epoch = 0
        # Fenced boots: the oldest advert they may still use; infinity for an exited process. At most MAX_BARRED.
        self._least_epoch: dict[Peer, float] = {}
        # The oldest advert that any other boot may use.
        self._floor = 0
        self._closed = False
        self._token = os.urandom(TOKEN_BYTES)
        self._socket_name = b"pdcluster-kv-" + os.urandom(8).hex().encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + self._socket_name)
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._accept, name="kv-accept-shm", daemon=True)
        self._thread.start()

    def register(self, region: Region) -> None:
        if region.is_source:
            self._regions[region.id] = region
            return
        if region.fd is None:
            raise ConfigError(
                f"transfer backend shm needs region {region.id} in shared memory (a memfd); use --transfer tcp instead"
            )
        if os.fstat(region.fd).st_size < region.nbytes:
            raise IntegrityError(
                f"region {region.id} has {region.nbytes} bytes, its memfd only {os.fstat(region.fd).st_size}"
            )
        try:
            fcntl.fcntl(region.fd, F_ADD_SEALS, F_SEAL_SHRINK)
        except PermissionError:
            LOG.debug(
                "region %d is not sealed against shrinking: its memfd was made without MFD_ALLOW_SEALING", region.id
            )
        self._regions[region.id] = region

    def advert(self) -> bytes:
        return encode(ShmAdvert(self._socket_name, self._token, self._epoch))

    def permit(self, permit: Permit) -> None:
        self._permits.grant(permit)

    def revoke(self, nonce: int) -> Fence:
        """Later notices are dropped, but a copy cannot be kept out."""
        self._permits.revoke(nonce)
        return Fence.CANNOT_FENCE

    def arrivals(self) -> list[Arrival]:
        return self._arrivals.take()

    def poll(self, handle: Handle) -> WriteStatus:
        return self._writes.poll(handle)

    def take_digest(self, handle: Handle) -> int | None:
        return self._writes.take_digest(handle)

    def take_duration(self, handle: Handle) -> float | None:
        return self._writes.take_duration(handle)

    def connect(self, peer: Peer, advert: bytes) -> None:
        decoded = decode_advert(advert)
        mover = self._movers.get(peer)
        if mover is not None and decoded.epoch < mover.advert.epoch:
            raise PeerUnreachable(f"the ticket of {peer.node} is older than its connection by shared memory")
        if (
            mover is not None
            and mover.inbox.failed_at is None
            and (mover.advert.socket, mover.advert.token) == (decoded.socket, decoded.token)
        ):
            return
        if (
            mover is not None
            and mover.inbox.failed_at is not None
            and time.monotonic() - mover.inbox.failed_at < self._settings.retry_s
        ):
            raise PeerUnreachable(f"{peer.node} could not be reached by shared memory a moment ago")
        self._movers[peer] = self._start(peer, decoded)

    def _start(self, peer: Peer, advert: ShmAdvert) -> _Mover:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(b"\0" + advert.socket)  # at once: there is no network in between
        except OSError as error:
            sock.close()
            raise PeerUnreachable(f"{peer.node} does not accept connections on this host: {error}") from error
        self._readers[peer] = advert
        self._readers.move_to_end(peer)
        if len(self._readers) > MAX_BARRED:
            self._readers.popitem(last=False)
        return _Mover(sock, self._me, peer, advert, self._settings, self._writes, self.gil_waits)

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        mover, region, rows = self._movers.get(peer), self._regions[source_region], run_table(runs)
        if mover is None:
            raise PeerUnreachable(f"{peer.node} is not connected; call connect first")
        table = mover.table_of(rows, region, target_region, stamp.nbytes)
        if table is None and copies_inside(rows, (region.address, region.nbytes), ANYWHERE, stamp.nbytes) is None:
            raise IntegrityError(
                f"a write of {stamp.nbytes} bytes does not add up or reads outside of region {source_region}"
            )
        if mover.inbox.failed_at is not None and time.monotonic() - mover.inbox.failed_at >= self._settings.retry_s:
            mover = self._movers[peer] = self._start(peer, mover.advert)
            table = None  # of the other mover's mapping
        handle = self._writes.new()
        if not mover.inbox.add(_Write(handle, region, target_region, stamp, rows, table, digests)):
            self._writes.settle(handle, WriteStatus.FAILED)
        return handle

    # ------------------------------------------------------------ ending

    def close(self, peer: Peer) -> Fence:
        mover = self._movers.pop(peer, None)
        if mover is not None:
            mover.inbox.end()
            self._ended = [each for each in (*self._ended, mover) if each.thread.is_alive()]
        self._permits.revoke_writer(peer)
        with self._lock:
            for inlet in self._links:
                if inlet.peer == peer:
                    _shut(inlet.sock)
            if not self._met.have_exited(peer):
                return Fence.CANNOT_FENCE
            self._bar(peer)
        return Fence.FENCED

    def _bar(self, peer: Peer) -> None:
        """Fence a boot, and keep that proof valid when it connects later.

        A boot that never came may be alive. It is let in with an advert newer than every ticket it can hold now. Past
        MAX_BARRED this holds for every boot that is not connected. The barred boots can then be forgotten, because a
        ticket is never written by a connection with a newer advert than its own (session, R10).
        """
        was_met = self._met.forget(peer)
        if len(self._least_epoch) >= MAX_BARRED:
            self._epoch += 1
            self._floor = self._epoch
            self._least_epoch.clear()
        self._epoch += not was_met
        self._least_epoch[peer] = math.inf if was_met else self._epoch

    def shutdown(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links)
        movers = [*self._movers.values(), *self._ended]
        for mover in movers:
            mover.inbox.end()
        for inlet in links:
            _shut(inlet.sock)
        _shut(self._listener)
        for thread in (self._thread, *(mover.thread for mover in movers), *(inlet.thread for inlet in links)):
            if thread is not None:
                thread.join(self._settings.connect_s + 1.0)
        late = {mover.peer for mover in movers if mover.thread.is_alive()}
        for peer, advert in self._readers.items():
            if peer not in late:
                self._say_goodbye(peer, advert)
        self._listener.close()
        self._met.close()
        self._movers.clear()
        self._doorbell.close()

    def _say_goodbye(self, peer: Peer, advert: ShmAdvert) -> None:
        """Tell a reader that this boot copies no more. One that is gone needs no word."""
        hello = ShmHello(advert.token, advert.epoch, self._me.node, self._me.incarnation, leaves=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            try:
                sock.connect(b"\0" + advert.socket)
                sock.send(encode(hello))
            except OSError as error:
                LOG.debug("no goodbye to %s by shm: %s", peer.node, error)

    # ------------------------------------------------------------ receiving, on threads of its own

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._counts.add("accept_failed")
                time.sleep(0.05)
                continue
            inlet = _Inlet(sock)
            inlet.thread = threading.Thread(target=self._run, args=(inlet,), name="kv-notices-shm", daemon=True)
            with self._lock:
                refused = self._closed or len(self._links) >= MAX_LINKS
                if not refused:
                    self._links.add(inlet)
            if refused:
                self._counts.add("too_many_links")
                sock.close()
            else:
                self._start_inlet(inlet, inlet.thread)

    def _start_inlet(self, inlet: _Inlet, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the process is out of threads; the next connection may get one
            self._counts.add("accept_failed")
            LOG.warning("dropped a transfer connection by shm: %s", error)
            self._forget(inlet)

    def _forget(self, inlet: _Inlet) -> None:
        with self._lock:
            self._links.discard(inlet)
        inlet.sock.close()

    def _run(self, inlet: _Inlet) -> None:
        try:
            peer, notices = self._welcome(inlet), Notices(self._regions, self._permits, self._arrivals, self._counts)
            while data := inlet.sock.recv(MAX_NOTICE_BYTES + 1):
                notices.take(peer, data)
        except ProtocolError as error:
            self._counts.add("bad_frame")
            LOG.warning("dropped a transfer connection by shm: %s", error)
        except OSError as error:
            self._counts.add("link_ended")
            LOG.debug("a transfer connection by shm ended: %s", error)
        finally:
            self._forget(inlet)

    def _welcome(self, inlet: _Inlet) -> Peer:
        """Check the writer's identity, then share the regions."""
        sock = inlet.sock
        pid, uid, _ = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        if uid != os.getuid():
            raise ProtocolError(f"process {pid} belongs to user {uid}, this node to {os.getuid()}")
        _wait(sock, select.POLLIN, self._settings.connect_s)
        data = sock.recv(MAX_HELLO_BYTES + 1)
        if not data:
            raise ConnectionResetError("closed before its hello")
        hello = decode_hello(data)
        if not hmac.compare_digest(hello.token, self._token):
            raise ProtocolError("its hello does not carry this boot's token")
        peer = Peer(hello.node, hello.incarnation)
        if hello.leaves:
            with self._lock:
                self._met.left(peer, pid)
            raise ConnectionResetError("it said goodbye")
        with self._lock:
            if self._closed or hello.epoch < self._least_epoch.get(peer, self._floor):
                raise ProtocolError(f"boot {peer.incarnation} of {peer.node} was closed before")
            inlet.peer = peer
            self._met.meet(peer, pid, sock)
        regions = [region for region in self._regions.values() if not region.is_source]
        shared = SharedRegions(tuple((region.id, region.nbytes) for region in regions))
        socket.send_fds(sock, [encode(shared)], [region.fd for region in regions if region.fd is not None])
        return peer


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it ended by itself

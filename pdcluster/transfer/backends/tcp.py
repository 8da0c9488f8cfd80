"""Backend `tcp`: scatter/gather sockets straight from the writer's pages into the reader's, over a few lanes per peer.
Also the reference.

Frame of a write, little endian: FRAME header, num_runs × (offset, bytes), their seal, payload in run order. The reader
answers ACK when the payload is in memory (landed) or was discarded (no permit). It checks a frame against its permits
before any payload goes into memory, and again before every burst, so a revoke takes effect within a frame. Small runs
go through a block that stays in the cache. A write is LOST when its connection ends before its answer.
"""

from __future__ import annotations

import logging
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from pdcluster.core.address import format_address
from pdcluster.core.errors import IntegrityError, PeerUnreachable, ProtocolError
from pdcluster.transfer.backends.base import Arrival, Fence, Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import (
    Arrivals,
    Counts,
    Doorbell,
    Permits,
    Writes,
    level_of_end,
    memory_of,
    start_or_release,
)
from pdcluster.transfer.backends.tcp_links import (
    BURST_BYTES,
    SEND_BYTES,
    AnswerReader,
    Cursor,
    Link,
    Listener,
    TcpAdvert,
    connect,
    decode_advert,
    sealed,
)
from pdcluster.transfer.copying.copy import GilWaits, Payload, native, packed, packing, reads, table_of
from pdcluster.transfer.layout.runs import RunTable, SpanTable, run_table
from pdcluster.transfer.layout.spans import CopyRuns

# Small runs of a socket's write, packed into a block that stays in the cache: one system call and one piece of Python
# per block, not per run.
#
# Different layouts cut pages into runs of a few KiB. Handing each to the kernel costs more than copying it once more
# between caches. For `tcp`, which checks who may write where.

BLOCK_BYTES = 1024 << 10
# Runs that are shorter on average are packed.
SCATTERED_BYTES = 32 << 10


def straight(spans: SpanTable) -> SpanTable | None:
    """The spans joined, to go to the kernel as they lie. None when they are so short that packing costs less."""
    joined = spans.joined()
    return None if joined.nbytes < len(joined) * SCATTERED_BYTES else joined


class Block:
    """Memory of one thread."""

    def __init__(self) -> None:
        self._bytes = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        self.view = self._bytes.data
        self.address = self._bytes.ctypes.data


class Packer:
    """The payload of a write to be sent, with the interface of `tcp_links.Cursor`: block after block of its runs. One
    write at a time uses `block`. The payload digests what it packs.
    """

    def __init__(self, runs: RunTable, source: int, payload: Payload, block: Block) -> None:
        self._source, self._payload, self._block = source, payload, block
        self._pieces = deque(runs.pieces(BLOCK_BYTES))
        self._cursor = Cursor(memoryview(b""))

    @property
    def is_done(self) -> bool:
        return self._cursor.is_done and not self._pieces

    def head(self, most_bytes: int = BURST_BYTES) -> list[memoryview]:
        if self._cursor.is_done:
            self._pack(self._pieces.popleft())
        return self._cursor.head(most_bytes)

    def advance(self, nbytes: int) -> None:
        self._cursor.advance(nbytes)

    def _pack(self, piece: RunTable) -> None:
        nbytes = piece.nbytes
        self._payload.extend(packing(piece, self._source, self._block.address))
        self._payload.advance(nbytes)
        self._cursor = Cursor(self._block.view[:nbytes])


class Unpacker:
    """A write that is received. The caller fills `next_view` with the next bytes; `put` copies and digests them."""

    def __init__(self, spans: SpanTable, address: int, block: Block, *, digests: bool) -> None:
        self._address, self._block = address, block
        self._pieces = deque(each.sources for each in RunTable(spans.rows.take((0, 0, 1), axis=1)).pieces(BLOCK_BYTES))
        self._payload = Payload(table_of(()), digests=digests, of_copy=True)
        self._digests = digests
        self.left = int(spans.rows[:, 1].sum())

    def next_view(self) -> memoryview:
        return self._block.view[: min(BLOCK_BYTES, self.left)]

    def put(self) -> None:
        piece = self._pieces.popleft()
        nbytes = int(piece.rows[:, 1].sum())
        self._payload.extend(packed(piece, self._address, self._block.address))
        self._payload.advance(nbytes)
        self.left -= nbytes

    def digest(self) -> int | None:
        return self._payload.digest() if self._digests else None


LOG = logging.getLogger(__name__)

FRAME = struct.Struct("<4sIQIIIQ")
RUN_BYTES = 16
ACK = struct.Struct("<4sQIIB")
WRITE_MAGIC, ACK_MAGIC = b"KVw1", b"KVa1"
MAX_RUNS = 65536
MAX_WRITE_BYTES = 1 << 30
# Bytes are digested after they are sent or received, while the kernel's copy keeps them in the cache. A sender that
# digested first would wait for memory, and the receiver for the sender. The source is pinned until the answer. If it
# changed all the same, the digests of both ends would differ.
DIGEST_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """progress_s: a stalled connection ends after this long.
    retry_s: pause after a failed connect.
    is_sealed: frames and answers are encrypted, and peers must do the same.
    """

    host: str = "127.0.0.1"
    port: int = 0
    lanes: int = 2
    connect_s: float = 2.0
    progress_s: float = 5.0
    retry_s: float = 1.0
    is_sealed: bool = False


@dataclass(slots=True)
class _Body:
    """Of a write. payload: digested as far as it was sent, in bursts that are still in the cache; None when a Packer
    digests.
    """

    cursor: Cursor | Packer
    payload: Payload | None
    # Sent and not digested.
    fresh: int = 0

    def advance(self, nbytes: int) -> None:
        self.cursor.advance(nbytes)
        self.fresh += nbytes
        if self.fresh >= DIGEST_BYTES:
            self.digest_sent()

    def digest_sent(self) -> None:
        if self.payload is not None and self.fresh:
            self.payload.advance(self.fresh)
        self.fresh = 0


@dataclass(slots=True, eq=False)
class _Write:
    handle: Handle
    stamp: Stamp
    # Sent alone, so that the receiver gets ready during the first burst of the payload.
    header: Cursor
    prepare: Callable[[], tuple[_Body, Payload | None]]
    body: _Body | None = None
    # Computes the digest, if one is wanted.
    payload: Payload | None = None

    @property
    def is_done(self) -> bool:
        return self.body is not None and self.body.cursor.is_done

    def head(self) -> list[memoryview]:
        """What is sent next."""
        if not self.header.is_done:
            return self.header.head()
        if self.body is None:
            self.body, self.payload = self.prepare()
        return self.body.cursor.head(SEND_BYTES)

    def advance(self, nbytes: int) -> None:
        if not self.header.is_done:
            self.header.advance(nbytes)
            return
        assert self.body is not None  # `head` created it
        self.body.advance(nbytes)

    def digest_sent(self) -> None:
        """Digest while the other end or the network is busy."""
        if self.body is not None:
            self.body.digest_sent()

    def digest(self) -> int | None:
        return None if self.payload is None else self.payload.digest()


class _Lane:
    """One outgoing connection and its thread: sends queued writes, takes their answers in order."""

    def __init__(self, me: Peer, peer: Peer, advert: TcpAdvert, settings: TcpSettings, writes: Writes) -> None:
        self._me, self._peer, self._advert, self._settings, self._writes = me, peer, advert, settings, writes
        self._lock = threading.Lock()
        self._waiting: deque[_Write] = deque()
        self._doorbell = Doorbell()
        self._ending = False
        self.failed_at: float | None = None
        self.queued_bytes = 0
        self._unanswered: deque[_Write] = deque()
        self._sending: _Write | None = None
        self._progress = 0.0
        self.block = Block()
        self.thread = threading.Thread(target=self._run, name=f"kv-send-{peer.node}", daemon=True)
        start_or_release(self.thread, peer, self._doorbell.close)

    def add(self, write: _Write) -> bool:
        """Queue a write. False when the lane is over."""
        with self._lock:
            if self._ending or self.failed_at is not None:
                return False
            self._waiting.append(write)
            self.queued_bytes += write.stamp.nbytes
        self._doorbell.ring()
        return True

    def end(self) -> None:
        self._ending = True
        self._doorbell.ring()

    def _run(self) -> None:
        link: Link | None = None
        try:
            link = connect(
                self._me,
                self._peer,
                self._advert,
                connect_s=self._settings.connect_s,
                progress_s=self._settings.progress_s,
                is_sealed=self._settings.is_sealed,
            )
            self._serve(link)
        except (OSError, ProtocolError) as error:
            level = level_of_end(error, self._waiting, self._sending, self._unanswered)
            LOG.log(level, "the transfer to %s by tcp is over: %s", self._peer.node, error)
        except Exception:
            LOG.exception("the transfer thread to %s by tcp failed", self._peer.node)
        finally:
            if link is not None:
                link.sock.close()
            self._settle_all()

    def _settle_all(self) -> None:
        with self._lock:
            self.failed_at = time.monotonic()
            waiting, self._waiting = list(self._waiting), deque()
        sending = [] if self._sending is None else [self._sending]
        for write in [*self._unanswered, *sending, *waiting]:
            self._writes.settle(write.handle, WriteStatus.LOST if write.header.started else WriteStatus.FAILED)
        self._doorbell.close()

    def _serve(self, link: Link) -> None:
        poller = select.poll()
        poller.register(self._doorbell.fd, select.POLLIN)
        answers = AnswerReader(link, ACK)
        self._progress = time.monotonic()
        while not self._ending:
            self._next_write()
            poller.register(link.sock, select.POLLIN | (select.POLLOUT if self._sending else 0))
            busy = self._sending is not None or bool(self._unanswered)
            ready = dict(poller.poll(self._settings.progress_s * 250 if busy else None))
            self._doorbell.clear()
            events = ready.get(link.sock.fileno(), 0)
            if events & ~select.POLLOUT:
                self._take_answers(answers)
            if events & select.POLLOUT:
                self._send(link)
            if busy and time.monotonic() - self._progress > self._settings.progress_s:
                raise TimeoutError(f"nothing moved for {self._settings.progress_s} s")

    def _next_write(self) -> None:
        if self._sending is None and self._waiting:
            with self._lock:
                self._sending = self._waiting.popleft()
            if not self._unanswered:
                self._progress = time.monotonic()

    def _send(self, link: Link) -> None:
        write, flushed = self._sending, link.num_flushed
        assert write is not None
        try:
            while not write.is_done:
                write.advance(link.send_some(write.head()))
                self._progress = time.monotonic()
            link.flush()
        except BlockingIOError:
            write.digest_sent()
            if link.num_flushed != flushed:
                self._progress = time.monotonic()
            return
        write.digest_sent()
        self._unanswered.append(write)
        self._sending = None

    def _take_answers(self, answers: AnswerReader) -> None:
        for magic, nonce, chunk, trial, landed in answers.take():
            self._progress = time.monotonic()
            self._answered(magic, (nonce, chunk, trial), bool(landed))

    def _answered(self, magic: bytes, key: tuple[int, int, int], landed: bool) -> None:
        write = self._unanswered[0] if self._unanswered else None
        if magic != ACK_MAGIC or write is None or (write.stamp.nonce, write.stamp.chunk, write.stamp.trial) != key:
            raise ProtocolError(f"an answer to chunk {key[1]} came that was not asked for")
        self._unanswered.popleft()
        with self._lock:
            self.queued_bytes -= write.stamp.nbytes
        if landed:
            self._writes.settle(write.handle, WriteStatus.DONE, write.digest())
        else:
            self._writes.settle(write.handle, WriteStatus.REFUSED)


@dataclass(slots=True)
class _Remote:
    advert: TcpAdvert
    lanes: list[_Lane]


class TcpBackend:
    """Backend `tcp`. One thread calls the public methods; lanes, listener and receivers have their own threads."""

    def __init__(self, me: Peer, settings: TcpSettings | None = None, *, name: str = "tcp") -> None:
        self.name = name
        self._me = me
        self._settings = settings if settings is not None else TcpSettings()
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
        self._memory: dict[int, memoryview] = {}
        self._remotes: dict[Peer, _Remote] = {}
        self._ended: list[_Lane] = []
        self._listener = Listener(
            (self._settings.host, self._settings.port),
            self._serve,
            self._counts,
            progress_s=self._settings.progress_s,
            is_sealed=self._settings.is_sealed,
        )

    def register(self, region: Region) -> None:
        self._memory[region.id] = memory_of(region)
        self._regions[region.id] = region

    def advert(self) -> bytes:
        return self._listener.advert()

    def permit(self, permit: Permit) -> None:
        self._permits.grant(permit)

    def revoke(self, nonce: int) -> Fence:
        self._permits.revoke(nonce)
        self._listener.barrier()
        return Fence.FENCED

    def arrivals(self) -> list[Arrival]:
        return self._arrivals.take()

    def poll(self, handle: Handle) -> WriteStatus:
        return self._writes.poll(handle)

    def take_digest(self, handle: Handle) -> int | None:
        return self._writes.take_digest(handle)

    def take_duration(self, handle: Handle) -> float | None:
        return self._writes.take_duration(handle)

    # ------------------------------------------------------------ writing

    def connect(self, peer: Peer, advert: bytes) -> None:
        remote = self._remotes.get(peer)
        decoded = decode_advert(advert)
        if remote is None or remote.advert != decoded:
            remote = self._remotes[peer] = _Remote(decoded, [])
        self._lane(peer, remote)

    def _lane(self, peer: Peer, remote: _Remote) -> _Lane:
        """The lane with the shortest queue. A new one when all are busy and more are allowed."""
        failures = [lane.failed_at for lane in remote.lanes if lane.failed_at is not None]
        living = [lane for lane in remote.lanes if lane.failed_at is None]
        if not living and failures and time.monotonic() - max(failures) < self._settings.retry_s:
            where = format_address(remote.advert.host, remote.advert.port)
            raise PeerUnreachable(f"{peer.node} could not be reached at {where} a moment ago")
        remote.lanes = living
        best = min(living, key=lambda lane: lane.queued_bytes, default=None)
        if best is None or (best.queued_bytes and len(living) < self._settings.lanes):
            best = _Lane(self._me, peer, remote.advert, self._settings, self._writes)
            remote.lanes.append(best)
        return best

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        remote = self._remotes.get(peer)
        if remote is None:
            raise PeerUnreachable(f"{peer.node} is not connected; call connect first")
        region, table = self._regions[source_region], run_table(runs)
        if (
            len(table) > MAX_RUNS
            or not 0 < stamp.nbytes <= MAX_WRITE_BYTES
            or not table.sources.add_up_to(stamp.nbytes)
        ):
            raise IntegrityError(
                f"a write has {len(table)} runs and {stamp.nbytes} bytes; at most {MAX_RUNS} and {MAX_WRITE_BYTES}, "
                "adding up"
            )
        if not table.sources.are_inside(region.nbytes):
            raise IntegrityError(f"a write reads outside of region {source_region} ({region.nbytes} bytes)")
        header = FRAME.pack(WRITE_MAGIC, len(table), stamp.nonce, stamp.chunk, stamp.trial, target_region, stamp.nbytes)
        lane = self._lane(peer, remote)
        handle = self._writes.new()
        frame = Cursor(memoryview(sealed(header + table.targets.pack())))
        if not lane.add(
            _Write(handle, stamp, frame, partial(self._prepare, table, region, lane.block, digests=digests))
        ):
            self._writes.settle(handle, WriteStatus.FAILED)
        return handle

    def _prepare(self, runs: RunTable, region: Region, block: Block, *, digests: bool) -> tuple[_Body, Payload | None]:
        """Runs on the lane's thread, while the header is on its way."""
        sources = None if self._settings.is_sealed else straight(runs.sources)
        if sources is None:
            packing = Payload(table_of(()), digests=digests, cached=True, waits=self.gil_waits)
            return _Body(Packer(runs, region.address, packing, block), None), packing if digests else None
        payload = (
            Payload(reads(sources, region.address), digests=True, cached=True, waits=self.gil_waits)
            if digests
            else None
        )
        return _Body(Cursor(self._memory[region.id], sources), payload), payload

    # ------------------------------------------------------------ receiving, on the listener's threads

    def _serve(self, link: Link) -> None:
        block = Block()
        while True:
            head = link.receive(FRAME.size, idle=True)
            magic, num_runs, nonce, chunk, trial, region, nbytes = FRAME.unpack(head)
            if magic != WRITE_MAGIC or not 0 < num_runs <= MAX_RUNS or not 0 < nbytes <= MAX_WRITE_BYTES:
                raise ProtocolError(f"a frame with {num_runs} runs and {nbytes} bytes")
            table = link.receive(num_runs * RUN_BYTES)
            link.receive_seal(head, table)
            spans = SpanTable.unpack(table)
            if not spans.add_up_to(nbytes):
                raise ProtocolError(f"the runs of a frame do not add up to {nbytes} bytes")
            self._receive(link, Stamp(nonce, chunk, trial, nbytes), region, spans, block)

    def _receive(self, link: Link, stamp: Stamp, region_id: int, spans: SpanTable, block: Block) -> None:
        """Receive a frame's payload into memory under its permit, or discard it. The answer goes out before the arrival
        is reported: the writer needs longer for its Commit than this end for the rest of the digest.
        """
        region, permit = self._allowed(link, stamp, region_id, spans)
        if permit is None or region is None:
            _discard(link, stamp.nbytes)
            _answer(link, stamp, landed=False)
            return
        left, take_digest = self._land(link, permit, stamp, region, spans, block)
        _discard(link, left)
        with link.lock:
            landed = not left and self._permits.is_current(permit)
        _answer(link, stamp, landed=landed)
        digest = take_digest() if landed else None
        with link.lock:
            if landed and self._permits.is_current(permit):
                self._arrivals.add(stamp, digest, spans, region_id)
            else:
                self._counts.add("revoked_while_landing")

    def _allowed(
        self, link: Link, stamp: Stamp, region_id: int, spans: SpanTable
    ) -> tuple[Region | None, Permit | None]:
        region = self._regions.get(region_id)
        if region is None or region.is_source or not spans.are_inside(region.nbytes):
            self._counts.add("outside_region")
            return region, None
        return region, self._permits.find(link.peer, stamp.nonce, region_id, spans)

    def _land(
        self, link: Link, permit: Permit, stamp: Stamp, region: Region, spans: SpanTable, block: Block
    ) -> tuple[int, Callable[[], int | None]]:
        """Receive into memory. Returns how many bytes were still to come when the permit was revoked, and the source of
        the digest.
        """
        joined = None if link.is_sealed else straight(spans)
        if joined is None:
            unpacker = Unpacker(spans, region.address, block, digests=permit.digests)
            return self._unpack(link, permit, unpacker), unpacker.digest
        cursor = Cursor(self._memory[region.id], joined)
        payload = Payload(reads(joined, region.address), digests=True) if permit.digests else None
        return self._fill(link, permit, cursor, payload, stamp.nbytes), partial(_finished, payload, stamp.nbytes)

    def _unpack(self, link: Link, permit: Permit, unpacker: Unpacker) -> int:
        """As `_fill`, for many small runs."""
        while unpacker.left:
            view = unpacker.next_view()
            link.receive_into(view)
            with link.lock:
                if not self._permits.is_current(permit):
                    return unpacker.left - len(view)
                unpacker.put()
        return 0

    def _fill(self, link: Link, permit: Permit, cursor: Cursor, payload: Payload | None, left: int) -> int:
        """Receive into memory while the permit stands, and digest all but the last piece. Returns how many bytes were
        still to come when it was revoked.

        One thread receives a frame once. Its writer sends no other frame for these bytes before this one was answered
        or its lane ended. After its answer it sends them only with a later trial, which the Commit names.
        """
        fresh = 0
        while left:
            link.gather(left, self._settings.progress_s)
            with link.lock:
                if not self._permits.is_current(permit):
                    return left
                try:
                    count = link.sock.recvmsg_into(cursor.head())[0]
                except BlockingIOError:
                    continue
            if not count:
                raise ConnectionResetError("the writer closed it in the middle of a frame")
            cursor.advance(count)
            left -= count
            fresh += count
            if payload is not None and fresh >= DIGEST_BYTES and left:
                payload.advance(fresh)
                fresh = 0
        return 0

    # ------------------------------------------------------------ ending

    def close(self, peer: Peer) -> Fence:
        remote = self._remotes.pop(peer, None)
        if remote is not None:
            for lane in remote.lanes:
                lane.end()
            self._ended = [lane for lane in (*self._ended, *remote.lanes) if lane.thread.is_alive()]
        self._permits.revoke_writer(peer)
        stopped = self._listener.end_peer(peer)
        self._listener.barrier()
        return Fence.FENCED if stopped else Fence.CANNOT_FENCE

    def shutdown(self) -> None:
        lanes = [lane for remote in self._remotes.values() for lane in remote.lanes] + self._ended
        for lane in lanes:
            lane.end()
        self._listener.close()
        for lane in lanes:
            lane.thread.join(self._settings.connect_s + 1.0)
        self._remotes.clear()
        self._ended.clear()
        self._doorbell.close()


def _answer(link: Link, stamp: Stamp, *, landed: bool) -> None:
    link.send(ACK.pack(ACK_MAGIC, stamp.nonce, stamp.chunk, stamp.trial, landed))


def _finished(payload: Payload | None, nbytes: int) -> int | None:
    """The digest of a payload of this many bytes."""
    if payload is None:
        return None
    payload.advance(nbytes)
    return payload.digest()


def _discard(link: Link, nbytes: int) -> None:
    scratch = memoryview(bytearray(min(nbytes, BURST_BYTES)))
    while nbytes:
        take = min(nbytes, len(scratch))
        link.receive_into(scratch[:take])
        nbytes -= take

"""A backend over a transfer library that cannot cancel a write (Mooncake, NIXL): through staging blocks at both ends.

A write whose outcome such a library does not know may still land later. So it never sees the KV pool: per connection the reader owns a ring of
large blocks and the writer a staging buffer of the same shape. A piece of a write goes
    pages → (copy) staging block i → (engine) ring block i → (notice on our own link; permit checked) → (copy) pages.
A piece whose engine write failed or has no known outcome gets no notice, so it can not reach the pages: for the session that is FAILED, and
block i is not used again on this connection. What the session digests is the copy in the pages.
"""

from __future__ import annotations

import logging
import select
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pdcluster.errors import IntegrityError, PeerUnreachable, ProtocolError
from pdcluster.transfer.base import DECODE_ERRORS, Arrival, Fence, Handle, Peer, Permit, Region, Runs, Stamp, WriteStatus
from pdcluster.transfer.ledger import Arrivals, Counts, Doorbell, Permits, Writes
from pdcluster.transfer.links import Advert, Link, Listener, connect, decode_advert, sealed
from pdcluster.transfer.moving import GilWaits, Payload, native, packed, packing, table_of
from pdcluster.transfer.runs import RunTable, SpanTable, chained, run_table
from pdcluster.transfer.staging import Blocks, Engine, StagedSettings

LOG = logging.getLogger(__name__)

NOTICE = struct.Struct("<4sIIQIIIQQ")
"""magic, block, num_runs, nonce, chunk, trial, region, bytes of this piece, bytes of the whole write; then num_runs × (offset, bytes) and the seal of
all."""
RUN_BYTES = 16
ANSWER = struct.Struct("<4sIB")
"""magic, block, whether the piece was copied to its pages."""
NOTICE_MAGIC, AWAKE_MAGIC, ANSWER_MAGIC = b"KVm1", b"KVw1", b"KVb1"
"""AWAKE: a notice of nothing but that a write is under way."""
LENGTH = struct.Struct("<I")
MAX_GRANT = 1 << 16
MAX_BLOCKS = 512
"""Of a ring, and so the most writes that the library has under way for a peer."""
MAX_RING_BYTES = 1 << 30
MAX_RUNS = 65536
MAX_WRITE_BYTES = 1 << 30
MAX_UNFINISHED = 4096
ENGINE_POLL_S = 0.0002


class _Grant(msgspec.Struct, frozen=True, array_like=True):
    """The reader's ring for one connection. The engine wants an address; it checks it against the registered ring, and nothing else is registered.
    engine: what its engine wants of ours to be met."""

    engine: bytes
    address: int
    block_bytes: int
    blocks: int


def _wait_for_news(poller: select.poll, timeout_s: float | None) -> None:
    """select would know fractions of a millisecond, but no descriptor above 1023."""
    if timeout_s is None or timeout_s >= 0.001:
        poller.poll(None if timeout_s is None else timeout_s * 1000)
    elif not poller.poll(0):
        time.sleep(timeout_s)


# ---------------------------------------------------------------- writing


@dataclass(slots=True, eq=False)
class _Write:
    handle: Handle
    source: Region
    region: int
    stamp: Stamp
    runs: RunTable
    payload: Payload
    """Digests what was put into staging, piece after piece."""
    digests: bool
    pieces: deque[RunTable] | None = None
    """Not started yet; cut when the size of the peer's blocks is known."""
    unanswered: int = 0
    """Pieces with the engine or with the reader."""
    noticed: int = 0
    """Pieces whose notice was sent and not answered: they may be copied to the pages."""
    failed: bool = False
    refused: bool = False


@dataclass(slots=True)
class _Piece:
    write: _Write
    runs: RunTable
    nbytes: int
    batch: int
    submitted: float = field(default_factory=time.monotonic)


class _Pump:
    """The thread that writes to one peer, over one link and one pair of rings."""

    def __init__(self, name: str, me: Peer, peer: Peer, advert: Advert, settings: StagedSettings, engine: Engine, writes: Writes) -> None:
        self._name, self._me, self._peer, self.advert = name, me, peer, advert
        self._settings, self._engine, self._writes = settings, engine, writes
        self._lock = threading.Lock()
        self._queue: deque[_Write] = deque()
        self._doorbell = Doorbell()
        self._ending = False
        self.failed_at: float | None = None
        self._free: list[int] = []
        self._engine_has: dict[int, _Piece] = {}
        self._reader_has: dict[int, _Piece] = {}
        self._partial = b""
        self._progress = 0.0
        self._awake_at = 0.0
        self.thread = threading.Thread(target=self._run, name=f"kv-{name}-{peer.node}", daemon=True)
        self.thread.start()

    def add(self, write: _Write) -> bool:
        with self._lock:
            if self._ending or self.failed_at is not None:
                return False
            self._queue.append(write)
        self._doorbell.ring()
        return True

    def end(self) -> None:
        self._ending = True
        self._doorbell.ring()

    def _run(self) -> None:
        link: Link | None = None
        staging: Blocks | None = None
        far: str | None = None
        try:
            link = connect(self._me, self._peer, self.advert, connect_s=self._settings.connect_s, progress_s=self._settings.progress_s)
            grant = _read_grant(link)
            far = self._engine.meet(grant.engine)
            staging = Blocks(self._engine, grant.blocks, grant.block_bytes)
            self._free = list(range(grant.blocks))
            self._serve(link, grant, far, staging)
        except (OSError, ProtocolError) as error:
            LOG.warning("the transfer to %s by %s is over: %s", self._peer.node, self._name, error)
        except Exception:
            LOG.exception("the transfer thread to %s by %s failed", self._peer.node, self._name)
        finally:
            if link is not None:
                link.sock.close()
            if staging is not None:
                staging.retire()
            if far is not None:
                self._engine.part(far)
            self._settle_all()

    def _settle_all(self) -> None:
        with self._lock:
            self.failed_at = time.monotonic()
            queued, self._queue = list(self._queue), deque()
        begun = [piece.write for piece in (*self._engine_has.values(), *self._reader_has.values())]
        for write in [*begun, *queued]:
            self._writes.settle(write.handle, WriteStatus.LOST if write.noticed else WriteStatus.FAILED)
        self._doorbell.close()

    def _serve(self, link: Link, grant: _Grant, far: str, staging: Blocks) -> None:
        self._progress = time.monotonic()
        poller = select.poll()
        for fd in (link.sock.fileno(), self._doorbell.fd):
            poller.register(fd, select.POLLIN)
        while not self._ending:
            self._start_piece(grant, far, staging)
            self._keep_awake(link)
            self._check_engine(link)
            self._take_answers(link)
            if not (self._free or self._engine_has or self._reader_has):
                raise ConnectionAbortedError("every staging block has a write of unknown outcome; a new connection gets new ones")
            if self._reader_has and time.monotonic() - self._progress > self._settings.progress_s:
                raise TimeoutError(f"no answer for {self._settings.progress_s} s")
            timeout = ENGINE_POLL_S if self._engine_has else self._settings.progress_s / 4 if self._reader_has else None
            if not self._can_start():
                _wait_for_news(poller, timeout)
                self._doorbell.clear()

    def _can_start(self) -> bool:
        """Not more with the engine than keep it busy: it moves all that it has at the same time, so that none would be there for the reader to copy
        before all are."""
        return bool(self._free and self._queue) and len(self._engine_has) < self._settings.flying

    def _start_piece(self, grant: _Grant, far: str, staging: Blocks) -> None:
        """One at a time, so that the engine's answers for earlier pieces do not wait for the copies of later ones."""
        if not self._can_start():
            return
        write = self._queue[0]
        if write.pieces is None:
            write.pieces = deque(write.runs.pieces(grant.block_bytes))
        runs = write.pieces.popleft()
        if not write.pieces:
            with self._lock:
                self._queue.popleft()
        self._start(grant, far, staging, write, runs)

    def _start(self, grant: _Grant, far: str, staging: Blocks, write: _Write, runs: RunTable) -> None:
        block, nbytes = self._free.pop(0), runs.nbytes
        write.payload.extend(packing(runs, write.source.address, staging.at(block)))
        write.payload.advance(nbytes)
        batch = self._engine.submit(far, staging.at(block), grant.address + block * grant.block_bytes, nbytes)
        piece = _Piece(write, runs, nbytes, batch if batch is not None else 0)
        write.unanswered += 1
        if batch is None:
            self._free.append(block)  # refused before anything was sent
            self._answered(piece, copied=False)
            return
        self._engine_has[block] = piece

    def _keep_awake(self, link: Link) -> None:
        """The other end's engine makes progress only when it is called, so it is told when to."""
        now = time.monotonic()
        if self._engine.needs_calls and self._engine_has and now >= self._awake_at:
            self._awake_at = now + self._settings.awake_s
            link.send(sealed(NOTICE.pack(AWAKE_MAGIC, 0, 0, 0, 0, 0, 0, 0, 0)))

    def _check_engine(self, link: Link) -> None:
        """Notices of one write go out in the order of its bytes, because the reader digests them so."""
        held: set[Handle] = set()
        for block, piece in list(self._engine_has.items()):
            if piece.write.handle in held:
                continue
            status = self._engine.check(piece.batch)
            if status is WriteStatus.PENDING and time.monotonic() - piece.submitted < self._settings.unknown_s:
                held.add(piece.write.handle)
                continue
            del self._engine_has[block]
            if status is WriteStatus.DONE:
                self._notify(link, block, piece)
            else:
                LOG.warning("%s does not know what became of %d bytes to %s; a staging block is retired", self._name, piece.nbytes, self._peer.node)
                self._answered(piece, copied=False)  # the block does not become free: the engine may still write it

    def _notify(self, link: Link, block: int, piece: _Piece) -> None:
        stamp = piece.write.stamp
        header = NOTICE.pack(
            NOTICE_MAGIC, block, len(piece.runs), stamp.nonce, stamp.chunk, stamp.trial, piece.write.region, piece.nbytes, stamp.nbytes
        )
        piece.write.noticed += 1
        if not self._reader_has:
            self._progress = time.monotonic()
        self._reader_has[block] = piece
        link.send(sealed(header + piece.runs.targets.pack()))

    def _take_answers(self, link: Link) -> None:
        try:
            data = link.sock.recv(64 * ANSWER.size)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the reader closed it")
        self._progress = time.monotonic()
        data = self._partial + data
        whole = len(data) - len(data) % ANSWER.size
        self._partial = data[whole:]
        for magic, block, copied in ANSWER.iter_unpack(data[:whole]):
            piece = self._reader_has.pop(block, None)
            if magic != ANSWER_MAGIC or piece is None:
                raise ProtocolError(f"an answer for block {block} came that was not asked for")
            piece.write.noticed -= 1
            self._free.append(block)
            piece.write.refused = piece.write.refused or not copied
            self._answered(piece, copied=bool(copied))

    def _answered(self, piece: _Piece, *, copied: bool) -> None:
        write = piece.write
        write.unanswered -= 1
        write.failed = write.failed or not copied
        if write.failed and write.pieces:
            write.pieces.clear()  # the rest need not go
            with self._lock:
                self._queue.remove(write)
        if not write.unanswered and not write.pieces:
            if write.failed:
                self._writes.settle(write.handle, WriteStatus.REFUSED if write.refused else WriteStatus.FAILED)
            else:
                self._writes.settle(write.handle, WriteStatus.DONE, write.payload.digest() if write.digests else None)


@dataclass(slots=True)
class _Landing:
    """A write at the reader, so far. Its payload is copied and digested in the pages, piece after piece."""

    payload: Payload
    nbytes: int = 0
    spans: list[SpanTable] = field(default_factory=list)


def _read_grant(link: Link) -> _Grant:
    head = link.receive(LENGTH.size)
    (length,) = LENGTH.unpack(head)
    if length > MAX_GRANT:
        raise ProtocolError(f"a grant of {length} bytes")
    body = link.receive(length)
    link.receive_seal(head, body)
    try:
        grant = msgspec.msgpack.decode(body, type=_Grant)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the grant is not readable: {error}") from error
    if not (0 < grant.blocks <= MAX_BLOCKS and 4096 <= grant.block_bytes <= 64 << 20 and grant.blocks * grant.block_bytes <= MAX_RING_BYTES):
        raise ProtocolError(f"a ring of {grant.blocks} blocks of {grant.block_bytes} bytes")
    return grant


# ---------------------------------------------------------------- the backend


class StagedBackend:
    """See module. Public methods belong to one thread; pumps, listener and receivers have threads of their own."""

    def __init__(self, me: Peer, name: str, engine: Engine, settings: StagedSettings, *, owns_engine: bool = True) -> None:
        """owns_engine: close it at `shutdown`; False when the caller shares it."""
        self.name = name
        self._me = me
        self._settings = settings
        self._engine = engine
        self._owns_engine = owns_engine
        self._doorbell = Doorbell()
        self.wakeup_fd = self._doorbell.fd
        self._counts = Counts()
        self.counters: Mapping[str, int] = self._counts.by_reason
        self._writes = Writes(self._doorbell)
        self._arrivals = Arrivals(self._doorbell)
        self._permits = Permits(self._counts)
        self.gil_waits = GilWaits()
        native()  # loaded now and not during the first transfer
        self._regions: dict[int, Region] = {}
        self._pumps: dict[Peer, _Pump] = {}
        self._ended: list[_Pump] = []
        self._listener = Listener(self._settings.host, self._serve, self._counts, progress_s=self._settings.progress_s)

    def register(self, region: Region) -> None:
        """Not with the engine: it sees only staging blocks."""
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
        decoded = decode_advert(advert)
        pump = self._pumps.get(peer)
        if pump is None or pump.advert != decoded:
            self._pumps[peer] = self._start(peer, decoded)
        else:
            self._living(peer, pump)

    def _start(self, peer: Peer, advert: Advert) -> _Pump:
        return _Pump(self.name, self._me, peer, advert, self._settings, self._engine, self._writes)

    def _living(self, peer: Peer, pump: _Pump) -> _Pump:
        """The pump, or a new one when it ended a while ago."""
        if pump.failed_at is None:
            return pump
        if time.monotonic() - pump.failed_at < self._settings.retry_s:
            raise PeerUnreachable(f"{peer.node} could not be reached by {self.name} a moment ago")
        self._pumps[peer] = self._start(peer, pump.advert)
        return self._pumps[peer]

    def write(self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: Runs, digests: bool = False) -> Handle:
        pump, region = self._pumps.get(peer), self._regions[source_region]
        if pump is None:
            raise PeerUnreachable(f"{peer.node} is not connected; call connect first")
        table = run_table(runs)
        if len(table) > MAX_RUNS or not 0 < stamp.nbytes <= MAX_WRITE_BYTES or not table.sources.add_up_to(stamp.nbytes):
            raise IntegrityError(f"a write has {len(table)} runs and {stamp.nbytes} bytes; at most {MAX_RUNS} and {MAX_WRITE_BYTES}, adding up")
        if not table.sources.are_inside(region.nbytes):
            raise IntegrityError(f"a write reads outside of region {source_region} ({region.nbytes} bytes)")
        pump = self._living(peer, pump)
        handle = self._writes.new()
        payload = Payload(table_of(()), digests=digests, cached=True, waits=self.gil_waits)
        if not pump.add(_Write(handle, region, target_region, stamp, table, payload, digests)):
            self._writes.settle(handle, WriteStatus.FAILED)
        return handle

    # ------------------------------------------------------------ receiving, on the listener's threads

    def _serve(self, link: Link) -> None:
        ring = Blocks(self._engine, self._settings.blocks, self._settings.block_bytes)
        try:
            wanted = self._engine.grant(ring.address, ring.nbytes)
            grant = msgspec.msgpack.encode(_Grant(wanted, ring.address, ring.block_bytes, self._settings.blocks))
            link.send(sealed(LENGTH.pack(len(grant)) + grant))
            landed: OrderedDict[tuple[int, int, int], _Landing] = OrderedDict()
            while True:
                block, copied = self._receive(link, ring, landed)
                link.send(ANSWER.pack(ANSWER_MAGIC, block, copied))
        finally:
            ring.retire()

    def _receive(self, link: Link, ring: Blocks, landed: OrderedDict[tuple[int, int, int], _Landing]) -> tuple[int, bool]:
        """One notice: check it, copy its piece to the pages. landed: unfinished writes so far."""
        head = self._next_notice(link)
        magic, block, num_runs, nonce, chunk, trial, region_id, nbytes, total = NOTICE.unpack(head)
        if magic != NOTICE_MAGIC or block >= self._settings.blocks or not 0 < num_runs <= MAX_RUNS or not 0 < total <= MAX_WRITE_BYTES:
            raise ProtocolError(f"a notice for block {block} with {num_runs} runs of {total} bytes")
        table = link.receive(num_runs * RUN_BYTES)
        link.receive_seal(head, table)
        spans = SpanTable.unpack(table)
        if not 0 < nbytes <= min(ring.block_bytes, total) or not spans.add_up_to(nbytes):
            raise ProtocolError(f"a notice of {nbytes} bytes in blocks of {ring.block_bytes}, or its runs do not add up")
        region = self._regions.get(region_id)
        if region is None or not spans.are_inside(region.nbytes):
            self._counts.add("outside_region")
            return block, False
        permit = self._permits.find(link.peer, nonce, region_id, spans)
        if permit is None:
            return block, False
        stamp = Stamp(nonce, chunk, trial, total)
        landing = landed.setdefault((nonce, chunk, trial), _Landing(Payload(table_of(()), digests=permit.digests, of_copy=True)))
        if not self._copy(link, permit, landing, region, ring.at(block), spans):
            return block, False
        self._count(stamp, landing, permit, landed)
        return block, True

    def _next_notice(self, link: Link) -> bytearray:
        while True:
            head = link.receive(NOTICE.size, idle=True)
            if not head.startswith(AWAKE_MAGIC):
                return head
            link.receive_seal(head)
            self._engine.expect()

    def _copy(self, link: Link, permit: Permit, landing: _Landing, region: Region, source: int, spans: SpanTable) -> bool:
        nbytes = int(spans.rows[:, 1].sum())
        landing.payload.extend(packed(spans, region.address, source))
        with link.lock:
            if not self._permits.is_current(permit):
                self._counts.add("revoked_while_landing")
                return False
            landing.payload.advance(nbytes)
        landing.nbytes += nbytes
        landing.spans.append(spans)
        return True

    def _count(self, stamp: Stamp, landing: _Landing, permit: Permit, landed: OrderedDict[tuple[int, int, int], _Landing]) -> None:
        if landing.nbytes >= stamp.nbytes:
            del landed[stamp.nonce, stamp.chunk, stamp.trial]
            self._arrivals.add(stamp, landing.payload.digest() if permit.digests else None, chained(landing.spans), permit.region)
        elif len(landed) > MAX_UNFINISHED:
            landed.popitem(last=False)  # of a writer that gave up; if not, its chunk is asked for again

    # ------------------------------------------------------------ ending

    def close(self, peer: Peer) -> Fence:
        pump = self._pumps.pop(peer, None)
        if pump is not None:
            pump.end()
            self._ended = [each for each in (*self._ended, pump) if each.thread.is_alive()]
        self._permits.revoke_writer(peer)
        stopped = self._listener.end_peer(peer)
        self._listener.barrier()
        return Fence.FENCED if stopped else Fence.CANNOT_FENCE

    def shutdown(self) -> None:
        pumps = [*self._pumps.values(), *self._ended]
        for pump in pumps:
            pump.end()
        self._listener.close()
        for pump in pumps:
            pump.thread.join(self._settings.connect_s + 1.0)
        self._pumps.clear()
        self._ended.clear()
        self._doorbell.close()
        if self._owns_engine and not any(pump.thread.is_alive() for pump in pumps) and not self._listener.is_serving():
            self._owns_engine = False
            self._engine.close()

"""A backend over a transfer library that cannot cancel a write (Mooncake, NIXL): through staging blocks, at least at
the reader.

A write of unknown outcome may still land later, so the library never writes the KV pool. The reader owns a ring of
large blocks per connection. A piece of a write takes these steps:
1. The library writes it from the pages to ring block i. A piece of many short runs, or for a library that needs
   registered sources, is first gathered in a staging block of the writer (`staging`).
2. The writer sends a notice on our own link, and the reader checks the permit.
3. The reader copies the piece to the pages.

A piece whose library write failed or has no known outcome gets no notice. So it cannot reach the pages, and block i is
not used again on this connection. For the session that is FAILED, as soon as the library reads none of the write's
pages (`source_reads`). The session digests the reader's copy in the pages.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pdcluster.core.errors import IntegrityError, PeerUnreachable, ProtocolError
from pdcluster.transfer.backends.base import Arrival, Fence, Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import Arrivals, Counts, Doorbell, Permits, Writes
from pdcluster.transfer.backends.staged.pump import Pump, StagedWrite
from pdcluster.transfer.backends.staged.source_reads import SourceReads
from pdcluster.transfer.backends.staged.staging import (
    ANSWER,
    ANSWER_MAGIC,
    AWAKE_MAGIC,
    LENGTH,
    MAX_RUNS,
    MAX_WRITE_BYTES,
    NOTICE,
    NOTICE_MAGIC,
    RUN_BYTES,
    Blocks,
    Grant,
    StagedSettings,
    TransferLibrary,
)
from pdcluster.transfer.backends.tcp_links import Link, Listener, TcpAdvert, decode_advert, sealed
from pdcluster.transfer.copying.copy import GilWaits, Payload, native, packed, table_of
from pdcluster.transfer.layout.runs import SpanTable, chained, run_table
from pdcluster.transfer.layout.spans import CopyRuns

LOG = logging.getLogger(__name__)

MAX_UNFINISHED = 4096


@dataclass(slots=True)
class _Landing:
    """A write at the reader, so far. Its payload is copied and digested in the pages piece by piece."""

    payload: Payload
    nbytes: int = 0
    spans: list[SpanTable] = field(default_factory=list)


# ---------------------------------------------------------------- the backend


class StagedBackend:
    """The backend. One thread calls the public methods; pumps, listener and receivers have their own threads."""

    def __init__(
        self, me: Peer, name: str, engine: TransferLibrary, settings: StagedSettings, *, owns_engine: bool = True
    ) -> None:
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
        self._reads = SourceReads(engine, self._writes, settings.unknown_s)
        self._arrivals = Arrivals(self._doorbell)
        self._permits = Permits(self._counts)
        self.gil_waits = GilWaits()
        native()  # load now, not during the first transfer
        self._regions: dict[int, Region] = {}
        self._pumps: dict[Peer, Pump] = {}
        self._ended: list[Pump] = []
        self._listener = Listener(
            (self._settings.host, 0),
            self._serve,
            self._counts,
            progress_s=self._settings.progress_s,
            is_sealed=self._settings.is_sealed,
        )

    def register(self, region: Region) -> None:
        """Register the region here, but not with the library: others can write what is registered there."""
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
        if self._reads:
            self._reads.look(handle)
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

    def _start(self, peer: Peer, advert: TcpAdvert) -> Pump:
        return Pump(self.name, self._me, peer, advert, self._settings, self._engine, self._reads)

    def _living(self, peer: Peer, pump: Pump) -> Pump:
        """The pump, or a new one when it has ended."""
        if pump.inbox.failed_at is None:
            return pump
        if time.monotonic() - pump.inbox.failed_at < self._settings.retry_s:
            raise PeerUnreachable(f"{peer.node} could not be reached by {self.name} a moment ago")
        self._pumps[peer] = self._start(peer, pump.advert)
        return self._pumps[peer]

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        pump, region = self._pumps.get(peer), self._regions[source_region]
        if pump is None:
            raise PeerUnreachable(f"{peer.node} is not connected; call connect first")
        table = run_table(runs)
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
        pump = self._living(peer, pump)
        handle = self._writes.new()
        payload = Payload(table_of(()), digests=digests, cached=True, waits=self.gil_waits)
        if not pump.inbox.add(StagedWrite(handle, region, target_region, stamp, table, payload, digests)):
            self._writes.settle(handle, WriteStatus.FAILED)
        return handle

    # ------------------------------------------------------------ receiving, on the listener's threads

    def _serve(self, link: Link) -> None:
        ring = Blocks(self._engine, self._settings.blocks, self._settings.block_bytes)
        try:
            wanted = self._engine.grant(ring.address, ring.nbytes)
            grant = msgspec.msgpack.encode(Grant(wanted, ring.address, ring.block_bytes, self._settings.blocks))
            link.send(sealed(LENGTH.pack(len(grant)) + grant))
            landed: OrderedDict[tuple[int, int, int], _Landing] = OrderedDict()
            while True:
                block, copied = self._receive(link, ring, landed)
                link.send(ANSWER.pack(ANSWER_MAGIC, block, copied))
        finally:
            ring.retire()

    def _receive(
        self, link: Link, ring: Blocks, landed: OrderedDict[tuple[int, int, int], _Landing]
    ) -> tuple[int, bool]:
        """Handle one notice: check it and copy its piece to the pages. landed: unfinished writes so far."""
        head = self._next_notice(link)
        magic, block, num_runs, nonce, chunk, trial, region_id, nbytes, total = NOTICE.unpack(head)
        if (
            magic != NOTICE_MAGIC
            or block >= self._settings.blocks
            or not 0 < num_runs <= MAX_RUNS
            or not 0 < total <= MAX_WRITE_BYTES
        ):
            raise ProtocolError(f"a notice for block {block} with {num_runs} runs of {total} bytes")
        table = link.receive(num_runs * RUN_BYTES)
        link.receive_seal(head, table)
        spans = SpanTable.unpack(table)
        if not 0 < nbytes <= min(ring.block_bytes, total) or not spans.add_up_to(nbytes):
            raise ProtocolError(
                f"a notice of {nbytes} bytes in blocks of {ring.block_bytes}, or its runs do not add up"
            )
        region = self._regions.get(region_id)
        if region is None or not spans.are_inside(region.nbytes):
            self._counts.add("outside_region")
            return block, False
        permit = self._permits.find(link.peer, nonce, region_id, spans)
        if permit is None:
            return block, False
        stamp = Stamp(nonce, chunk, trial, total)
        landing = landed.setdefault(
            (nonce, chunk, trial), _Landing(Payload(table_of(()), digests=permit.digests, of_copy=True))
        )
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

    def _copy(
        self, link: Link, permit: Permit, landing: _Landing, region: Region, source: int, spans: SpanTable
    ) -> bool:
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

    def _count(
        self, stamp: Stamp, landing: _Landing, permit: Permit, landed: OrderedDict[tuple[int, int, int], _Landing]
    ) -> None:
        if landing.nbytes >= stamp.nbytes:
            del landed[stamp.nonce, stamp.chunk, stamp.trial]
            self._arrivals.add(
                stamp, landing.payload.digest() if permit.digests else None, chained(landing.spans), permit.region
            )
        elif len(landed) > MAX_UNFINISHED:
            landed.popitem(last=False)  # of a writer that gave up; otherwise its chunk is requested again

    # ------------------------------------------------------------ ending

    def close(self, peer: Peer) -> Fence:
        pump = self._pumps.pop(peer, None)
        if pump is not None:
            pump.inbox.end()
            self._ended = [each for each in (*self._ended, pump) if each.thread.is_alive()]
        self._permits.revoke_writer(peer)
        stopped = self._listener.end_peer(peer)
        self._listener.barrier()
        return Fence.FENCED if stopped else Fence.CANNOT_FENCE

    def shutdown(self) -> None:
        pumps = [*self._pumps.values(), *self._ended]
        for pump in pumps:
            pump.inbox.end()
        self._listener.close()
        for pump in pumps:
            pump.thread.join(self._settings.connect_s + 1.0)
        self._pumps.clear()
        self._ended.clear()
        self._doorbell.close()
        if self._owns_engine and not any(pump.thread.is_alive() for pump in pumps) and not self._listener.is_serving():
            self._owns_engine = False
            self._engine.close()
            self._reads.end()

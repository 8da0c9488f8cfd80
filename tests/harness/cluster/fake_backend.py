"""An in-process backend with scripted faults: delays, drops, duplicates, reordering, torn, late and lost writes, bit
flips, unknown results.

`FakeNetwork` holds the schedule and an injected clock; a `FakeBackend` is one boot's end. Nothing happens by itself:
every call first carries out the events that are due, in time order.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import Arrival, Fence, Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import Arrivals, Counts, Doorbell, Permits, Writes, is_inside
from pdcluster.transfer.layout.spans import CopyRun, CopyRuns


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one write; the default is no fault.

    delay_s: from write until the last byte lands; the first half lands at half of it.
    answer_s: from there to the final status, DONE or FAILED (then it never lands).
    lost_s: from write to LOST; the write still lands, from a copy of the source made then.
    unknown_s: from write to UNKNOWN, until the final status; it still reads the source.
    torn_bytes: only this many bytes land.
    flip_byte: the byte at this offset lands wrong.
    arrivals: how many stamps arrive.
    arrival_s: from landing to stamp.
    """

    delay_s: float = 0.0
    answer_s: float = 0.0
    status: WriteStatus = WriteStatus.DONE
    lost_s: float | None = None
    unknown_s: float | None = None
    torn_bytes: int | None = None
    flip_byte: int | None = None
    arrivals: int = 1
    arrival_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Write:
    handle: Handle
    writer: FakeBackend
    target: Peer
    source: Region
    region: int
    stamp: Stamp
    runs: CopyRuns
    fault: Fault
    # Its connection ended: no further byte lands, and the source is not read.
    cut: bool = False
    # The payload, once the source is no longer read.
    snapshot: bytes | None = None


class FakeNetwork:
    """The schedule of all faults.
    plan: the fault of each write.
    on_land: called with the receiving backend, the stamp and the spans just before bytes change.
    checks_permits: as on tcp, a landing needs a permit and a nonce can be fenced. Without it, as on shm, only the
    writer's death (`kill`) is a fence.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        plan: Callable[[Stamp], Fault] | None = None,
        checks_permits: bool = True,
        on_land: Callable[[FakeBackend, Stamp, list[tuple[int, int]]], None] | None = None,
    ) -> None:
        self.clock = clock
        self.plan = plan if plan is not None else lambda _: Fault()
        self.checks_permits = checks_permits
        self.on_land = on_land
        self.backends: dict[Peer, FakeBackend] = {}
        self.killed: set[Peer] = set()
        self.writes: list[_Write] = []
        self._schedule: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._schedule, (self.clock() + delay_s, next(self._order), action))

    def run_due(self) -> None:
        while self._schedule and self._schedule[0][0] <= self.clock():
            heapq.heappop(self._schedule)[2]()

    def next_event(self) -> float | None:
        return self._schedule[0][0] if self._schedule else None

    def kill(self, peer: Peer) -> None:
        """End the peer's process: its writes stop where they are, and writes to it are lost."""
        self.run_due()
        self.killed.add(peer)
        for write in list(self.writes):
            if peer in (write.writer.me, write.target):
                self.cut(write)

    def cut(self, write: _Write) -> None:
        """End a write's connection. It is FAILED when nothing was sent, else LOST."""
        write.cut = True
        write.writer.settle(write, WriteStatus.LOST)


class FakeBackend:
    """One boot's end of a FakeNetwork."""

    def __init__(self, network: FakeNetwork, me: Peer, name: str = "fake") -> None:
        self.name = name
        self.me = me
        self.network = network
        self._doorbell = Doorbell()
        self.wakeup_fd = self._doorbell.fd
        self._counts = Counts()
        self.counters: Mapping[str, int] = self._counts.by_reason
        self._regions: dict[int, Region] = {}
        self._permits = Permits(self._counts)
        self._writes = Writes(self._doorbell, network.clock)
        self._arrivals = Arrivals(self._doorbell)
        # The epoch of the advert in use.
        self._connected: dict[Peer, int] = {}
        # Peers whose hello came with their first write. On a medium without checks they can write.
        self._met: set[Peer] = set()
        self._epoch = 0
        # Fenced peers that never came, as on shm: the oldest advert they may still use.
        self._least_epoch: dict[Peer, int] = {}
        network.backends[me] = self

    def register(self, region: Region) -> None:
        self._regions[region.id] = region

    def advert(self) -> bytes:
        return f"{self.me.node}/{self.me.incarnation}/{self._epoch}".encode()

    def connect(self, peer: Peer, advert: bytes) -> None:
        target, (name, _, epoch) = self.network.backends.get(peer), advert.rpartition(b"/")
        if name != f"{peer.node}/{peer.incarnation}".encode():
            raise PeerUnreachable(f"the advert {advert!r} is not that of {peer.node}")
        if int(epoch) < self._connected.get(peer, 0):
            raise PeerUnreachable(f"the ticket of {peer.node} is older than its connection")
        if peer in self._connected:
            return
        if target is None or peer in self.network.killed:
            raise PeerUnreachable(f"no fake backend answers for {peer.node}; is its boot {peer.incarnation} over?")
        self._connected[peer] = int(epoch)

    def permit(self, permit: Permit) -> None:
        self._permits.grant(permit)

    def revoke(self, nonce: int) -> Fence:
        self.network.run_due()
        self._permits.revoke(nonce)
        return Fence.FENCED if self.network.checks_permits else Fence.CANNOT_FENCE

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        if peer not in self._connected:
            raise PeerUnreachable(f"{peer.node} is not connected; call connect first")
        network, fault, handle = self.network, self.network.plan(stamp), self._writes.new()
        if not self._is_welcome(peer):
            del self._connected[peer]
            self._writes.settle(handle, WriteStatus.FAILED)
            return handle
        write = _Write(handle, self, peer, self._regions[source_region], target_region, stamp, runs, fault)
        network.writes.append(write)
        if fault.unknown_s is not None:
            network.at(fault.unknown_s, lambda: self._writes.settle(handle, WriteStatus.UNKNOWN))
        if fault.lost_s is not None:
            network.at(fault.lost_s, lambda: self._lose(write))
        middle = stamp.nbytes // 2 if fault.delay_s else 0
        if middle:
            network.at(fault.delay_s / 2, lambda: self._land_half(write, middle))
        network.at(fault.delay_s, lambda: self._finish(write, middle))
        return handle

    def _is_welcome(self, peer: Peer) -> bool:
        """Check the hello, with the advert that `connect` got."""
        target = self.network.backends.get(peer)
        if target is not None and self._connected[peer] < target._least_epoch.get(self.me, 0):
            return False
        if target is not None:
            target._met.add(self.me)
        return True

    def poll(self, handle: Handle) -> WriteStatus:
        self.network.run_due()
        return self._writes.poll(handle)

    def take_digest(self, handle: Handle) -> int | None:
        return self._writes.take_digest(handle)

    def take_duration(self, handle: Handle) -> float | None:
        return self._writes.take_duration(handle)

    def arrivals(self) -> list[Arrival]:
        self.network.run_due()
        return self._arrivals.take()

    def close(self, peer: Peer) -> Fence:
        network = self.network
        network.run_due()
        self._connected.pop(peer, None)
        for write in [each for each in network.writes if each.writer is self and each.target == peer]:
            network.cut(write)
        if network.checks_permits:
            self._permits.revoke_writer(peer)
            for write in [each for each in network.writes if each.writer.me == peer and each.target == self.me]:
                network.cut(write)
            return Fence.FENCED
        if peer in self._met:
            return Fence.FENCED if peer in network.killed else Fence.CANNOT_FENCE
        self._epoch += 1
        self._least_epoch[peer] = self._epoch
        return Fence.FENCED

    def shutdown(self) -> None:
        self.network.backends.pop(self.me, None)
        self._doorbell.close()

    def settle(self, write: _Write, status: WriteStatus) -> None:
        self._writes.settle(write.handle, status)
        if write in self.network.writes:
            self.network.writes.remove(write)

    # ------------------------------------------------------------ landing

    def _lose(self, write: _Write) -> None:
        write.snapshot = b"".join(ctypes.string_at(write.source.address + run.source, run.nbytes) for run in write.runs)
        self._writes.settle(write.handle, WriteStatus.LOST)

    def _land_half(self, write: _Write, middle: int) -> None:
        self._land(write, 0, middle)

    def _finish(self, write: _Write, start: int) -> None:
        fault = write.fault
        reached = not write.cut and fault.status is not WriteStatus.FAILED and write.target in self.network.backends
        landed = self._land(write, start, write.stamp.nbytes)
        if landed:
            target = self.network.backends[write.target]
            for _ in range(fault.arrivals):
                self.network.at(fault.arrival_s, lambda: target._arrivals.add(write.stamp, region=write.region))
        refused = WriteStatus.REFUSED if reached else WriteStatus.FAILED
        status = refused if fault.status is WriteStatus.DONE and not landed else fault.status
        self.network.at(fault.answer_s, lambda: self.settle(write, status))

    def _land(self, write: _Write, start: int, end: int) -> bool:
        """Copy bytes [start, end) of the payload if the write can still land."""
        fault, target = write.fault, self.network.backends.get(write.target)
        if write.cut or target is None or fault.status is WriteStatus.FAILED:
            return False
        if not target._accepts(write):
            return False
        end = end if fault.torn_bytes is None else min(end, fault.torn_bytes)
        position = 0
        for run in write.runs:
            low, high = max(start, position), min(end, position + run.nbytes)
            if low < high:
                target._copy(write, run, low - position, high - position, position)
            position += run.nbytes
        return True

    def _accepts(self, write: _Write) -> bool:
        spans = [(run.target, run.nbytes) for run in write.runs]
        region = self._regions.get(write.region)
        if region is None or not all(is_inside(region, *span) for span in spans):
            self._counts.add("outside_region")
            return False
        if sum(nbytes for _, nbytes in spans) != write.stamp.nbytes:
            self._counts.add("bad_length")
            return False
        permitted = self._permits.find(write.writer.me, write.stamp.nonce, write.region, spans) is not None
        return permitted or not self.network.checks_permits

    def _copy(self, write: _Write, run: CopyRun, low: int, high: int, position: int) -> None:
        region, flip, snapshot = self._regions[write.region], write.fault.flip_byte, write.snapshot
        if self.network.on_land is not None:
            self.network.on_land(self, write.stamp, [(run.target + low, high - low)])
        source = (
            write.source.address + run.source + low if snapshot is None else snapshot[position + low : position + high]
        )
        ctypes.memmove(region.address + run.target + low, source, high - low)
        if flip is not None and position + low <= flip < position + high:
            ctypes.c_ubyte.from_address(region.address + run.target + flip - position).value ^= 0x10

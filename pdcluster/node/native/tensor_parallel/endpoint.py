"""The transfer endpoint of a rank above 0: its backends over its pool, on a thread beside the computing one.

Rank 0 holds the protocol (`transfer.protocol.session`). It sends what to permit, write and digest; this end does it and
reports back. It decides nothing, and keeps only writes in flight.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster.core.errors import PeerUnreachable
from pdcluster.node.native.tensor_parallel.channel import RankChannel, frame
from pdcluster.node.native.tensor_parallel.messages import (
    Allow,
    Close,
    Digest,
    DigestResult,
    Fenced,
    FromRank,
    Revoke,
    Settled,
    ToRank,
    WriteRequest,
    arrived,
    permit_of,
    unpack_runs,
)
from pdcluster.transfer.backends.base import Backend, Fence, Handle, Peer, Stamp, WriteStatus
from pdcluster.transfer.layout.runs import RunTable, SpanTable
from pdcluster.transfer.layout.spans import digest

logger = logging.getLogger(__name__)

# Writes in flight are looked at this often even without a wake-up.
LOOK_AGAIN_MS = 50
# A message has begun, so its rest comes at once.
RECEIVE_S = 10.0


@dataclass(slots=True)
class WriteInFlight:
    """A write in flight.

    runs: to digest what was sent, where that was asked for and the medium's mover did not.
    """

    medium: str
    handle: Handle
    runs: RunTable | None
    is_unknown: bool = False


class RankEndpoint:
    def __init__(self, channel: RankChannel, backends: Mapping[str, Backend], memory: memoryview) -> None:
        self._channel = channel
        self._backends = backends
        self._memory = memory.cast("B")
        self._flights: dict[int, WriteInFlight] = {}
        self._news: list[FromRank] = []
        self._poller = select.poll()
        for fd in (channel.fileno(), *(backend.wakeup_fd for backend in backends.values())):
            self._poller.register(fd, select.POLLIN)

    def run(self) -> None:
        """Serve until rank 0 ends the channel."""
        try:
            while self._turn():
                pass
        except ConnectionError:
            logger.debug("rank 0 ended the channel while it was told something")

    def _turn(self) -> bool:
        ready = {fd for fd, _ in self._poller.poll(LOOK_AGAIN_MS if self._flights else None)}
        if self._channel.fileno() in ready:
            message = self._channel.receive(RECEIVE_S)
            if message is None:
                return False
            assert isinstance(message, ToRank)
            self._do(message)
        self._look()
        self._tell()
        return True

    def _do(self, message: ToRank) -> None:
        if isinstance(message, WriteRequest):
            self._write(message)
        elif isinstance(message, Allow):
            self._backends[message.medium].permit(permit_of(message))
        elif isinstance(message, Revoke | Close):
            self._fence(message)
        elif isinstance(message, Digest):
            self._news.append(DigestResult(message.question, digest(self._memory, SpanTable.unpack(message.spans))))
        else:
            self._look()
            self._news.append(DigestResult(message.question, 0))

    def _write(self, message: WriteRequest) -> None:
        backend, peer, runs, stamp = (
            self._backends[message.medium],
            Peer(*message.peer),
            unpack_runs(message.runs),
            Stamp(*message.stamp),
        )
        try:
            backend.connect(peer, message.advert)  # session, R10
            handle = backend.write(peer, message.source_region, message.target_region, stamp, runs, message.digests)
        except PeerUnreachable as error:
            logger.info("no transfer connection by %s: %s", message.medium, error)
            self._news.append(Settled(message.medium, message.handle, WriteStatus.FAILED.value))
            return
        self._flights[message.handle] = WriteInFlight(message.medium, handle, runs if message.digests else None)

    def _fence(self, message: Revoke | Close) -> None:
        backend = self._backends[message.medium]
        fence = backend.revoke(message.nonce) if isinstance(message, Revoke) else backend.close(Peer(*message.peer))
        self._news.append(Fenced(message.medium, message.question, fence is Fence.FENCED, backend.advert()))

    def _look(self) -> None:
        """Arrivals first: that clears the wake-up that both share."""
        for name, backend in self._backends.items():
            self._news.extend(arrived(name, arrival) for arrival in backend.arrivals())
        for number, flight in list(self._flights.items()):
            status = self._backends[flight.medium].poll(flight.handle)
            if status is WriteStatus.PENDING or (status is WriteStatus.UNKNOWN and flight.is_unknown):
                continue
            flight.is_unknown = status is WriteStatus.UNKNOWN
            self._news.append(self._settled(number, flight, status))
            if not flight.is_unknown:
                del self._flights[number]

    def _settled(self, number: int, flight: WriteInFlight, status: WriteStatus) -> Settled:
        if status is not WriteStatus.DONE:
            return Settled(flight.medium, number, status.value)
        backend = self._backends[flight.medium]
        taken, seconds = backend.take_digest(flight.handle), backend.take_duration(flight.handle)
        if taken is None and flight.runs is not None:
            taken = digest(self._memory, flight.runs.sources)
        return Settled(flight.medium, number, status.value, taken, seconds)

    def _tell(self) -> None:
        news, self._news = self._news, []
        if news:
            self._channel.send(b"".join(map(frame, news)))

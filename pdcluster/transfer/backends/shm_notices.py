"""What a reader makes of the notices of one connection by shared memory: arrivals, with digests of what lies in its own pages. For `shm`.

The writer copies in one thread, each byte of a write once, and tells of a byte only after its copy; so what is digested here can not be copied again
by this write. It moves nothing and fences nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import Peer, Permit, Region
from pdcluster.transfer.backends.ledger import Arrivals, Counts, Permits
from pdcluster.transfer.backends.shm_frames import Notice, decode_notice
from pdcluster.transfer.copying.copy import Payload, reads
from pdcluster.transfer.layout.runs import SpanTable


@dataclass(slots=True)
class _Copy:
    """One that is under way. permit, payload: None when it is not permitted (any more), and when nobody wants its digest. spans: what it says of
    where it goes when it arrived."""

    notice: Notice
    spans: SpanTable
    permit: Permit | None
    payload: Payload | None
    nbytes: int = 0


class Notices:
    """Of one connection; used by one thread."""

    def __init__(self, regions: Mapping[int, Region], permits: Permits, arrivals: Arrivals, counts: Counts) -> None:
        self._regions, self._permits, self._arrivals, self._counts = regions, permits, arrivals, counts
        self._copy: _Copy | None = None

    def take(self, peer: Peer, data: bytes) -> None:
        """Raises ProtocolError for what no writer says."""
        notice = decode_notice(data)
        if isinstance(notice, int):
            self._go_on(notice)
            return
        permit = self._permits.find(peer, notice.stamp.nonce, notice.region, notice.spans)
        is_digested = permit is not None and permit.digests and len(notice.spans) > 0
        payload = Payload(reads(notice.spans, self._regions[notice.region].address), digests=True) if is_digested else None
        spans = notice.spans.joined() if is_digested and notice.has_begun else notice.spans  # for whoever compares them, while bytes travel
        self._copy = _Copy(notice, spans, permit, payload)
        if not notice.has_begun:
            self._go_on(notice.stamp.nbytes)

    def _go_on(self, nbytes: int) -> None:
        """So many bytes of the copy are in place."""
        copy = self._copy
        if copy is None or not copy.nbytes < nbytes <= copy.notice.stamp.nbytes:
            raise ProtocolError(f"progress to {nbytes} bytes of a copy that did not begin, or is further already")
        fresh, copy.nbytes = nbytes - copy.nbytes, nbytes
        if copy.permit is not None and not self._permits.is_current(copy.permit):
            self._counts.add("revoked_while_landing")
            copy.permit = copy.payload = None
        if copy.payload is not None:
            copy.payload.advance(fresh)
        if nbytes == copy.notice.stamp.nbytes:
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        self._copy = None
        if copy.permit is not None:
            digest = None if copy.payload is None else copy.payload.digest()
            self._arrivals.add(copy.notice.stamp, digest, copy.spans, copy.notice.region)

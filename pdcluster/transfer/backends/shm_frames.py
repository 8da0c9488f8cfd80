"""What backend `shm` sends over its unix sockets: the advert, the hello and its answer, and the notices of copies.
Formats only; malformed bytes of a peer raise our own errors and nothing else.

A short copy has one notice, when it is finished. A long one has a notice when it begins and then reports progress, so
that the reader digests what is in place meanwhile. It is finished when all its bytes are in place.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec

from pdcluster.core.errors import PeerUnreachable, ProtocolError
from pdcluster.transfer.backends.base import DECODE_ERRORS, Peer, Permit, Region, Stamp
from pdcluster.transfer.backends.ledger import Arrivals, Counts, Permits
from pdcluster.transfer.copying.copy import Payload, reads
from pdcluster.transfer.layout.runs import SpanTable

# magic, nonce, chunk, trial, region, bytes; then the spans written, SPAN_BYTES each, or none when they do not fit one
# notice.
NOTICE = struct.Struct("<4sQIIIQ")
SPAN_BYTES = 16
# magic, bytes in place of the latest copy, in the order of its spans.
PROGRESS = struct.Struct("<4sQ")
MAGIC, BEGUN_MAGIC, PROGRESS_MAGIC = b"KVs2", b"KVb2", b"KVp2"
MAX_NOTICE_SPANS = 4096
MAX_NOTICE_BYTES = NOTICE.size + MAX_NOTICE_SPANS * SPAN_BYTES
MAX_HELLO_BYTES = 1024
MAX_REGIONS = 64
TOKEN_BYTES = 16
MAX_SOCKET_NAME_BYTES = 107


class ShmAdvert(msgspec.Struct, frozen=True, array_like=True):
    """epoch: counts fences of boots that never came. Such a fence refuses what the boot may still hold: adverts of
    older epochs.
    """

    socket: bytes
    token: bytes
    epoch: int = 0


class ShmHello(msgspec.Struct, frozen=True, array_like=True):
    token: bytes
    epoch: int
    node: str
    incarnation: str
    # The boot copies no more, and its threads that did have ended.
    leaves: bool = False


class SharedRegions(msgspec.Struct, frozen=True, array_like=True):
    """The reader's regions, (id, nbytes), in the order of the descriptors that travel with it."""

    regions: tuple[tuple[int, int], ...]


Frame = TypeVar("Frame", ShmHello, SharedRegions)


def encode(frame: ShmAdvert | ShmHello | SharedRegions) -> bytes:
    return msgspec.msgpack.encode(frame)


@lru_cache(maxsize=1024)
def decode_advert(data: bytes) -> ShmAdvert:
    try:
        advert = msgspec.msgpack.decode(data, type=ShmAdvert)
    except DECODE_ERRORS as error:
        raise PeerUnreachable(f"the peer's advert for shm is not readable: {error}") from error
    if not 0 < len(advert.socket) < MAX_SOCKET_NAME_BYTES or len(advert.token) != TOKEN_BYTES:
        raise PeerUnreachable(
            f"the peer's advert for shm names a socket of {len(advert.socket)} and a token of {len(advert.token)} bytes"
        )
    return advert


def decode_hello(data: bytes) -> ShmHello:
    if len(data) > MAX_HELLO_BYTES:
        raise ProtocolError(f"a hello of more than {MAX_HELLO_BYTES} bytes")
    return _decode("hello", data, ShmHello)


def decode_shared(data: bytes) -> SharedRegions:
    return _decode("answer to the hello", data, SharedRegions)


def _decode(name: str, data: bytes, kind: type[Frame]) -> Frame:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the {name} is not readable: {error}") from error


class CopyNotice(NamedTuple):
    """A copy that is finished, or has begun. spans: none when they do not fit a notice; always there for one that has
    begun.
    """

    stamp: Stamp
    region: int
    spans: SpanTable
    has_begun: bool = False


def pack_notice(notice: CopyNotice) -> bytes:
    stamp, region, spans, has_begun = notice
    where = spans.pack() if len(spans) <= MAX_NOTICE_SPANS else b""
    return (
        NOTICE.pack(BEGUN_MAGIC if has_begun else MAGIC, stamp.nonce, stamp.chunk, stamp.trial, region, stamp.nbytes)
        + where
    )


def pack_progress(nbytes: int) -> bytes:
    return PROGRESS.pack(PROGRESS_MAGIC, nbytes)


def decode_notice(data: bytes) -> CopyNotice | int:
    """A notice, or the bytes in place of a progress report."""
    if len(data) == PROGRESS.size and data.startswith(PROGRESS_MAGIC):
        return int(PROGRESS.unpack(data)[1])
    spans_bytes = len(data) - NOTICE.size
    if (
        not 0 <= spans_bytes <= MAX_NOTICE_SPANS * SPAN_BYTES
        or spans_bytes % SPAN_BYTES
        or not data.startswith((MAGIC, BEGUN_MAGIC))
    ):
        raise ProtocolError(f"a notice of {len(data)} bytes")
    _, nonce, chunk, trial, region, nbytes = NOTICE.unpack_from(data)
    spans, has_begun = SpanTable.unpack(memoryview(data)[NOTICE.size :]), data.startswith(BEGUN_MAGIC)
    if (has_begun or len(spans)) and not spans.add_up_to(nbytes):
        raise ProtocolError(f"the runs of a notice do not add up to {nbytes} bytes")
    return CopyNotice(Stamp(nonce, chunk, trial, nbytes), region, spans, has_begun)


# What a reader makes of the notices of one shared-memory connection: arrivals, with digests of its own pages. For
# `shm`.
#
# The writer copies in one thread, writes each byte once, and reports a byte only after its copy. So this write cannot
# change what is digested here. This module moves nothing and fences nothing.


@dataclass(slots=True)
class _Copy:
    """A copy in progress.
    permit, payload: None when the copy is not permitted, and when nobody wants its digest.
    spans: where it says it goes, for its arrival.
    """

    notice: CopyNotice
    spans: SpanTable
    permit: Permit | None
    payload: Payload | None
    nbytes: int = 0


class Notices:
    """The notices of one connection, for one thread."""

    def __init__(self, regions: Mapping[int, Region], permits: Permits, arrivals: Arrivals, counts: Counts) -> None:
        self._regions, self._permits, self._arrivals, self._counts = regions, permits, arrivals, counts
        self._copy: _Copy | None = None

    def take(self, peer: Peer, data: bytes) -> None:
        """Handle a notice. Raises ProtocolError for malformed ones."""
        notice = decode_notice(data)
        if isinstance(notice, int):
            self._go_on(notice)
            return
        permit = self._permits.find(peer, notice.stamp.nonce, notice.region, notice.spans)
        is_digested = permit is not None and permit.digests and len(notice.spans) > 0
        payload = (
            Payload(reads(notice.spans, self._regions[notice.region].address), digests=True) if is_digested else None
        )
        spans = (
            notice.spans.joined() if is_digested and notice.has_begun else notice.spans
        )  # for the comparison, while bytes travel
        self._copy = _Copy(notice, spans, permit, payload)
        if not notice.has_begun:
            self._go_on(notice.stamp.nbytes)

    def _go_on(self, nbytes: int) -> None:
        """This many bytes of the copy are in place."""
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

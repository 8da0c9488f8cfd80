"""What backend `shm` says over its unix sockets: the advert, the hello and its answer, and the notices of copies. Formats only; whatever is
wrong in what a peer sent raises our own errors and nothing else.

A short copy has one notice, when it is finished. A long one has a notice when it begins and then tells its progress, so that the reader digests
what is in place while the rest is copied; it is finished when all its bytes are in place.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec

from pdcluster.core.errors import PeerUnreachable, ProtocolError
from pdcluster.transfer.backends.base import DECODE_ERRORS, Stamp
from pdcluster.transfer.layout.runs import SpanTable

NOTICE = struct.Struct("<4sQIIIQ")
"""magic, nonce, chunk, trial, region, bytes; then the spans written, SPAN_BYTES each, or none where they are too many for one notice."""
SPAN_BYTES = 16
PROGRESS = struct.Struct("<4sQ")
"""magic, bytes in place of the copy that began last, in the order of its spans."""
MAGIC, BEGUN_MAGIC, PROGRESS_MAGIC = b"KVs2", b"KVb2", b"KVp2"
MAX_NOTICE_SPANS = 4096
MAX_NOTICE_BYTES = NOTICE.size + MAX_NOTICE_SPANS * SPAN_BYTES
MAX_HELLO_BYTES = 1024
MAX_REGIONS = 64
TOKEN_BYTES = 16
MAX_SOCKET_NAME_BYTES = 107


class Advert(msgspec.Struct, frozen=True, array_like=True):
    """epoch: counts the times when a boot that never came was fenced by refusing what it may still hold, which are adverts of older epochs."""

    socket: bytes
    token: bytes
    epoch: int = 0


class Hello(msgspec.Struct, frozen=True, array_like=True):
    token: bytes
    epoch: int
    node: str
    incarnation: str


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """The reader's regions, (id, nbytes), in the order of the descriptors that travel with it."""

    regions: tuple[tuple[int, int], ...]


Frame = TypeVar("Frame", Hello, Shared)


def encode(frame: Advert | Hello | Shared) -> bytes:
    return msgspec.msgpack.encode(frame)


@lru_cache(maxsize=1024)
def decode_advert(data: bytes) -> Advert:
    try:
        advert = msgspec.msgpack.decode(data, type=Advert)
    except DECODE_ERRORS as error:
        raise PeerUnreachable(f"the peer's advert for shm is not readable: {error}") from error
    if not 0 < len(advert.socket) < MAX_SOCKET_NAME_BYTES or len(advert.token) != TOKEN_BYTES:
        raise PeerUnreachable(f"the peer's advert for shm names a socket of {len(advert.socket)} and a token of {len(advert.token)} bytes")
    return advert


def decode_hello(data: bytes) -> Hello:
    if len(data) > MAX_HELLO_BYTES:
        raise ProtocolError(f"a hello of more than {MAX_HELLO_BYTES} bytes")
    return _decode("hello", data, Hello)


def decode_shared(data: bytes) -> Shared:
    return _decode("answer to the hello", data, Shared)


def _decode(name: str, data: bytes, kind: type[Frame]) -> Frame:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the {name} is not readable: {error}") from error


class Notice(NamedTuple):
    """Of a copy that is finished, or has begun. spans: none where they are too many for a notice; never of one that has begun."""

    stamp: Stamp
    region: int
    spans: SpanTable
    has_begun: bool = False


def pack_notice(notice: Notice) -> bytes:
    stamp, region, spans, has_begun = notice
    where = spans.pack() if len(spans) <= MAX_NOTICE_SPANS else b""
    return NOTICE.pack(BEGUN_MAGIC if has_begun else MAGIC, stamp.nonce, stamp.chunk, stamp.trial, region, stamp.nbytes) + where


def pack_progress(nbytes: int) -> bytes:
    return PROGRESS.pack(PROGRESS_MAGIC, nbytes)


def decode_notice(data: bytes) -> Notice | int:
    """A notice, or the bytes of a progress."""
    if len(data) == PROGRESS.size and data.startswith(PROGRESS_MAGIC):
        return int(PROGRESS.unpack(data)[1])
    spans_bytes = len(data) - NOTICE.size
    if not 0 <= spans_bytes <= MAX_NOTICE_SPANS * SPAN_BYTES or spans_bytes % SPAN_BYTES or not data.startswith((MAGIC, BEGUN_MAGIC)):
        raise ProtocolError(f"a notice of {len(data)} bytes")
    _, nonce, chunk, trial, region, nbytes = NOTICE.unpack_from(data)
    spans, has_begun = SpanTable.unpack(memoryview(data)[NOTICE.size :]), data.startswith(BEGUN_MAGIC)
    if (has_begun or len(spans)) and not spans.add_up_to(nbytes):
        raise ProtocolError(f"the runs of a notice do not add up to {nbytes} bytes")
    return Notice(Stamp(nonce, chunk, trial, nbytes), region, spans, has_begun)

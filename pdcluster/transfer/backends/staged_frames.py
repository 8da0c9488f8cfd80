"""What a staged backend (`staged`) says over its own link: the reader's ring, notices of pieces in it, and the answers to them. Formats only."""

from __future__ import annotations

import struct

import msgspec

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import DECODE_ERRORS
from pdcluster.transfer.backends.tcp_links import Link

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
"""Of a ring."""
MAX_RING_BYTES = 1 << 30
MAX_RUNS = 65536
MAX_WRITE_BYTES = 1 << 30


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The reader's ring for one connection. The engine wants an address; it checks it against the registered ring, and nothing else is registered.
    engine: what its engine wants of ours to be met."""

    engine: bytes
    address: int
    block_bytes: int
    blocks: int


def read_grant(link: Link) -> Grant:
    head = link.receive(LENGTH.size)
    (length,) = LENGTH.unpack(head)
    if length > MAX_GRANT:
        raise ProtocolError(f"a grant of {length} bytes")
    body = link.receive(length)
    link.receive_seal(head, body)
    try:
        grant = msgspec.msgpack.decode(body, type=Grant)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the grant is not readable: {error}") from error
    if not (0 < grant.blocks <= MAX_BLOCKS and 4096 <= grant.block_bytes <= 64 << 20 and grant.blocks * grant.block_bytes <= MAX_RING_BYTES):
        raise ProtocolError(f"a ring of {grant.blocks} blocks of {grant.block_bytes} bytes")
    return grant

"""Small runs of a socket's write, packed into a block that stays in the cache: one system call and one piece of Python per block instead of per run.

Mismatched layouts cut pages into runs of a few KiB. Handing each to the kernel costs more than copying it once more between caches. Used by `tcp`;
who may write where is checked there.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pdcluster.transfer.backends.tcp_links import BURST_BYTES, Cursor
from pdcluster.transfer.copying.copy import Payload, packed, packing, table_of
from pdcluster.transfer.layout.runs import RunTable, SpanTable

BLOCK_BYTES = 1024 << 10
SCATTERED_BYTES = 32 << 10
"""Runs that are shorter on average are packed."""


def straight(spans: SpanTable) -> SpanTable | None:
    """The spans joined, to be handed to the kernel as they lie; None where even joined they are so short that a block of them costs less."""
    joined = spans.joined()
    return None if joined.nbytes < len(joined) * SCATTERED_BYTES else joined


class Block:
    """Memory of one thread."""

    def __init__(self) -> None:
        self._bytes = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        self.view = self._bytes.data
        self.address = self._bytes.ctypes.data


class Packer:
    """The payload of a write to be sent, with the surface of `links.Cursor`: block after block of its runs. `block` is used by one write at a time.
    The payload digests what it packs."""

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
    """A write that is received: `next_view` is to be filled with what comes next, `put` copies it to its places and digests it."""

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

"""What waits to be said to one peer: messages, each encoded once when it comes, that leave together as one numbered frame.

A frame costs the same for one message as for fifty: a number, a digest, a wake-up of ZMQ's thread here and one of the reader there. So whoever owns
a link flushes at the end of its turn, not after every message. Not here: when that is (`wire.links`, `wire.hub`), and the frame's numbers.
"""

from __future__ import annotations

from pdcluster import messages as m
from pdcluster.transfer.base import Peer
from pdcluster.wire import codec

MAX_BATCH_BYTES = 256 << 10
"""So much waits at most for a turn's end, which bounds what a peer's queue of frames can hold; a larger message has a frame of its own."""


class Batch:
    def __init__(self, me: Peer, to_incarnation: str, *, max_frame_bytes: int) -> None:
        self._head = codec.encode_head(me.node, me.incarnation, to_incarnation)
        self._most_bytes = max_frame_bytes - len(self._head) - codec.MAX_TAIL_BYTES
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._parts)

    def encode(self, message: m.AnyMessage) -> bytes:
        """The message as `add` takes it; raises ProtocolError when no frame could hold it."""
        return codec.encode_message(message, max_bytes=self._most_bytes)

    def has_room(self, message: m.AnyMessage, part: bytes) -> bool:
        """Whether it may go with what waits already; when nothing does, it may."""
        if not self._parts:
            return True
        if self._is_closed or isinstance(message, codec.ALONE) or len(self._parts) >= m.MAX_MESSAGES:
            return False
        return self._num_bytes + len(part) <= min(MAX_BATCH_BYTES, self._most_bytes)

    def add(self, message: m.AnyMessage, part: bytes) -> None:
        """part: what `encode` made of the message, for which there is room."""
        self._parts.append(part)
        self._num_bytes += len(part)
        self._is_closed = isinstance(message, codec.ALONE)

    def frame(self, sequence: int) -> bytes:
        """All that waits, as frame number `sequence`. It still waits until `clear`."""
        return codec.assemble(self._head, sequence, self._parts)

    def clear(self) -> None:
        self._parts.clear()
        self._num_bytes = 0
        self._is_closed = False

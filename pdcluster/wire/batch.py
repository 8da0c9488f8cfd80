"""What waits to be said to one peer: messages, encoded once, that leave together as one numbered frame.

A frame costs the same for one message as for fifty: a number, a digest, a wake-up of two threads. So the owner of a
link flushes at the end of its turn, not after every message.
"""

from __future__ import annotations

from pdcluster.core import messages as m
from pdcluster.core.messages import MAX_MESSAGES
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire import codec
from pdcluster.wire.codec import ALONE, encoded

# The most that waits for a turn's end. It bounds a peer's queue of frames. A larger message has a frame of its own.
MAX_BATCH_BYTES = 256 << 10


class MessageBatch:
    def __init__(self, me: Peer, to_incarnation: str, *, max_frame_bytes: int) -> None:
        self._head = codec.encode_head(me.node, me.incarnation, to_incarnation)
        self._most_bytes = max_frame_bytes - len(self._head) - codec.MAX_TAIL_BYTES
        # The messages that wait. Owners read it; it stays the same list.
        self.parts: list[bytes] = []
        # Bytes that may go with what waits already; none behind a message that goes alone.
        self._room = self._most_room = min(MAX_BATCH_BYTES, self._most_bytes)

    def put(self, message: m.AnyMessage) -> bool:
        """Whether it waits with the others now; False: what waits has to leave first. Raises ProtocolError when no
        frame could hold it."""
        part, parts, kind = encoded(message), self.parts, type(message)
        size = len(part)
        if size <= self._room and len(parts) < MAX_MESSAGES and kind not in ALONE:  # as nearly always
            self._room -= size
        elif size > self._most_bytes:
            raise codec.too_large(kind.__name__, size, self._most_bytes)
        elif parts:
            return False
        else:
            self._room = -1
        parts.append(part)
        return True

    def frame(self, sequence: int) -> bytes:
        """All that waits, as frame number `sequence`. It still waits until `clear`."""
        return codec.assemble(self._head, sequence, self.parts)

    def clear(self) -> None:
        self.parts.clear()
        self._room = self._most_room

"""Write coalescing: all that a connection posts in a turn of the loop leaves in one write.

A write is most of a token's cost.
"""

from __future__ import annotations

from asyncio import get_running_loop
from typing import Protocol


class CoalescedWriter(Protocol):
    def write(self, data: bytes, /) -> object:
        """Write now, whatever was posted."""
        ...


class WriteCoalescer:
    """The posts of all connections of one server, in its loop."""

    __slots__ = ("is_due", "parts")

    def __init__(self) -> None:
        # What each connection has to send. Whoever adds to it checks `is_due`.
        self.parts: dict[CoalescedWriter, bytes] = {}
        self.is_due = False

    def flush_soon(self) -> None:
        self.is_due = True
        get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self.is_due, parts = False, self.parts
        while parts:
            line, data = parts.popitem()
            line.write(data)

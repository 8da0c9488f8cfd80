"""What lines send together when a turn of the loop ends: a write is what costs most of a token, so all that comes to a
line in a turn shares it."""

from __future__ import annotations

from asyncio import get_running_loop
from typing import Protocol


class CoalescedWriter(Protocol):
    def write(self, data: bytes, /) -> object:
        """Now, whatever was posted."""
        ...


class WriteCoalescer:
    """Of all lines of one server, in its loop."""

    __slots__ = ("is_due", "parts")

    def __init__(self) -> None:
        # What each line has to send. Who adds to it looks at `is_due`.
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

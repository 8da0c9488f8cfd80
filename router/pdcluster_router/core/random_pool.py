"""Random bytes from the operating system, read for many requests at a time.

A system call for each id costs more than making the id. Safe in threads. Not safe after a fork; router processes never
fork.
"""

from __future__ import annotations

import os
import struct

NUM_BYTES = 12
_NUM_AT_ONCE = 256
_cut = struct.Struct(f"{NUM_BYTES}s" * _NUM_AT_ONCE)

_left: list[bytes] = []


def draw() -> bytes:
    """12 random bytes that no one else gets."""
    while True:
        try:
            return _left.pop()
        except IndexError:  # no test first: another thread may take the last between test and pop
            _left.extend(_cut.unpack(os.urandom(_cut.size)))


def draw_bits(num_bits: int) -> int:
    """A random number of up to 96 bits."""
    return int.from_bytes(draw()) >> (NUM_BYTES * 8 - num_bits)

"""Random bytes of the operating system, drawn for many requests at a time: a system call for each id and each seed
costs more than the rest of making them. Safe in threads; not after a fork, which no process of the router does.
"""

from __future__ import annotations

import os
import struct

NUM_BYTES = 12
_NUM_AT_ONCE = 256
_cut = struct.Struct(f"{NUM_BYTES}s" * _NUM_AT_ONCE)

_left: list[bytes] = []


def draw() -> bytes:
    """12 bytes that nobody else gets."""
    while True:
        try:
            return _left.pop()
        except IndexError:  # asked for, not tested: another thread may take the last between a test and a pop
            _left.extend(_cut.unpack(os.urandom(_cut.size)))


def draw_bits(num_bits: int) -> int:
    """A number of up to 96 bits."""
    return int.from_bytes(draw()) >> (NUM_BYTES * 8 - num_bits)

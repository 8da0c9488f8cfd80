"""Numbers that look random and are equal on every router that asks for the same: hashes of integers and names. No state."""

from __future__ import annotations

from zlib import crc32

MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """64 bits that depend on every bit of every value (splitmix64's finaliser over their sum with odd steps)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def number_of(name: str) -> int:
    return crc32(name.encode())

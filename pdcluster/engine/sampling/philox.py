"""Counter-based random numbers: Philox4x32-10 over arrays. The same (seed, choice, position) gives the same number on any node, in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""32-bit words, kept in 64 bits so that products do not overflow."""

_ROUNDS = 10
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over each element of the arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position); seeds count modulo 2^64."""
    seed, choice, position = (np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], np.uint64) for values in (seeds, choices, positions))
    counter = (position & _LOW, position >> _SHIFT, choice & _LOW, choice >> _SHIFT)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _SHIFT))
    bits = ((high << _SHIFT) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53

"""A long list of token ids straight from its JSON text into an array: without an object for each number, which takes several times as long.

All numbers are read at once: of each the eight bytes before the comma that ends it are one word, in which what stands before the number is blanked
out, and neighbours are added up to pairs, fours and eight digits.

Only what is plainly a list of whole numbers from 0 on; all else is for whoever decodes JSON in full, and for those who say what is wrong with it.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

LONG_BYTES = 16 * 1024
"""Of text, from which on it pays."""

MOST_DIGITS = 8
"""More than ids of any vocabulary have."""

_BLANKS = b" \t\r\n"
_COMMA, _BLANK, _ZERO, _BEGIN, _END = b", 0[]"

Words = NDArray[np.uint64]


def token_list(text: bytes) -> array[int] | None:
    """text: valid JSON. None where it is no flat list of such numbers, or one of them has more digits."""
    words = _digits(text)
    if words is None:
        words = _digits(text.translate(None, _BLANKS))
    return None if words is None else array("i", _values(words).astype(np.int32).tobytes())


def _digits(text: bytes) -> Words | None:
    """The digits of each number, the last one in the highest byte, zeros before the first. None where there is more, or less, between the numbers
    than a comma each, or a comma and a blank."""
    codes = np.frombuffer(text, np.uint8)
    commas = np.flatnonzero(codes == _COMMA)
    gap = 2 if len(commas) and codes[commas[0] + 1] == _BLANK else 1
    if len(codes) < 3 or codes[0] != _BEGIN or codes[-1] != _END or np.count_nonzero(codes - _ZERO < 10) + gap * len(commas) + 2 != len(codes):
        return None
    if gap == 2 and (codes[commas + 1] != _BLANK).any():
        return None
    ends = np.append(commas, len(codes) - 1)
    num_digits = np.diff(ends, prepend=1 - gap) - gap
    if num_digits.min() < 1 or num_digits.max() > MOST_DIGITS:
        return None
    before = np.ndarray(len(text), f"V{MOST_DIGITS}", bytes(MOST_DIGITS) + text, strides=(1,))
    words: Words = before[ends].view("<u8")
    blanked = ((MOST_DIGITS - num_digits) * 8).view(np.uint64)
    words >>= blanked
    words <<= blanked
    words &= 0x0F0F0F0F0F0F0F0F
    return words


def _values(words: Words) -> Words:
    for factor, shift, kept in ((10 << 8 | 1, 8, 0x00FF00FF00FF00FF), (100 << 16 | 1, 16, 0x0000FFFF0000FFFF), (10_000 << 32 | 1, 32, 0xFFFFFFFF)):
        words *= factor
        words >>= shift
        words &= kept
    return words

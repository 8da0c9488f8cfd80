"""A long list of token ids, straight from JSON text into an array. An object per number would take several times as
long.

Many numbers are read at once. The eight bytes before each comma form one word. Bytes before the number are blanked, and
neighbours are added to pairs, fours and eight digits. Numbers are read in blocks, because new memory costs more than
the arithmetic.

Only plain lists of whole numbers from 0 on are read. The full JSON decoder handles everything else and reports errors.

A process that has `token_id_scan` compiled reads the list in place within a body (`cut_list`), in a third of the time.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdcluster.api.openai.token_id_scan import MOST_DIGITS

# Bytes of text from which it pays.
LONG_BYTES = 16 * 1024

# Arrays of this size reuse memory.
BLOCK_BYTES = 48 * 1024

_BLANKS = b" \t\r\n"
_COMMA, _BLANK, _ZERO, _BEGIN, _END = b", 0[]"

# So that the first number, too, has a comma and enough bytes before it.
_BEFORE = bytes(MOST_DIGITS - 1) + b","

_EIGHT = np.dtype(f"V{MOST_DIGITS}")
_least, _largest = np.minimum.reduce, np.maximum.reduce

Words = NDArray[np.uint64]
Scan = Callable[[NDArray[np.uint8], NDArray[np.int32]], tuple[int, int]]

# Replaces a list in a body. Nobody can guess it, so the field with this value held the list.
MARK = b'"%s"' % secrets.token_hex(16).encode()

_scan: Scan | None = None


def use_scan(scan: Scan | None) -> None:
    """scan: `token_id_scan.scan_ids`, compiled. None: no list is read in place."""
    global _scan
    _scan = scan


def cut_list(body: bytes, begins: re.Pattern[bytes]) -> tuple[array[int], bytes] | None:
    """The list of token ids that begins at the first `begins`, and the body with MARK in its place. The new body is
    JSON exactly if the old one was.

    begins: ends with the bracket. Returns None where nothing begins so, the list has another form, or there is no
    compiled scan. The field that holds MARK after decoding held the list.
    """
    scan, found = _scan, begins.search(body)
    if scan is None or found is None:
        return None
    begin = found.end()
    ids = np.empty((len(body) - begin) // 2 + 1, np.int32)
    num, size = scan(np.frombuffer(body, np.uint8, offset=begin), ids)
    if num < 0:
        return None
    packed = array("i")
    packed.frombytes(ids[:num].view(np.uint8).data)
    return packed, b"".join((body[: begin - 1], MARK, body[begin + size :]))


def token_list(text: bytes | memoryview) -> array[int] | None:
    """text: valid JSON. None where it is no flat list of such numbers, or one has more digits."""
    begin = bytes(text[: MOST_DIGITS + 3])
    found = _listed(memoryview(text), b" " if b", " in begin else b"")
    if found is None and begin[:1] == b"[":
        return _listed(memoryview(bytes(text).translate(None, _BLANKS)), b"")
    return found


def _listed(text: memoryview, lead: bytes) -> array[int] | None:
    """lead: what precedes each number but the first, behind a comma. None for anything else."""
    if len(text) < 2 or text[0] != _BEGIN or text[-1] != _END:
        return None
    found = array("i")
    begin, last = 1, len(text) - 1
    while begin < last:
        block = bytes(text[begin : min(begin + BLOCK_BYTES, last)])
        is_last = begin + len(block) == last
        size = len(block) if is_last else block.rfind(b",")
        words = _digits(_BEFORE + lead + block[:size] + b",", len(lead)) if size > 0 else None
        begin += size + 1 + len(lead)
        if words is None or (not is_last and text[begin - len(lead) : begin] != lead):
            return None
        found.frombytes(_values(words).astype(np.int32).tobytes())
    return found or None


def _digits(block: bytes, num_blanks: int) -> Words | None:
    """The digits of each number of a block behind _BEFORE: the last digit in the highest byte, zeros before the first.
    None unless each number has exactly so many blanks before it and a comma behind it.
    """
    codes = np.frombuffer(block, np.uint8)
    commas = (codes == _COMMA).nonzero()[0]
    befores, ends = commas[:-1], commas[1:] - MOST_DIGITS
    num_digits = ends - befores
    num_digits += MOST_DIGITS - 1 - num_blanks
    if _least(num_digits) < 1 or _largest(num_digits) > MOST_DIGITS:
        return None
    if np.count_nonzero(codes - _ZERO < 10) != len(block) - len(_BEFORE) - (1 + num_blanks) * len(ends):
        return None
    if num_blanks and np.count_nonzero(codes[befores + 1] == _BLANK) != len(ends):
        return None
    words: Words = np.ndarray(len(block) - MOST_DIGITS + 1, _EIGHT, block, strides=(1,))[ends].view(np.uint64)
    blanked = ((MOST_DIGITS - num_digits) << 3).view(np.uint64)
    words >>= blanked
    words <<= blanked
    words &= 0x0F0F0F0F0F0F0F0F
    return words


def _values(words: Words) -> Words:
    for factor, shift, kept in (
        (10 << 8 | 1, 8, 0x00FF00FF00FF00FF),
        (100 << 16 | 1, 16, 0x0000FFFF0000FFFF),
        (10_000 << 32 | 1, 32, 0xFFFFFFFF),
    ):
        words *= factor
        words >>= shift
        words &= kept
    return words

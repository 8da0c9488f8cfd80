"""One pass over the JSON text of a list of token ids, for numba to compile. Without numba, `token_list` is faster. No
objects and no errors: a number reports a malformed list.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

# More than ids of any vocabulary have. Such numbers fit into 32 bits.
MOST_DIGITS = 8

# Characters are compared by their distance from it, so that the compiler knows that digits are small.
ZERO = 48
COMMA, END, BLANK = 44 - ZERO, 93 - ZERO, 32 - ZERO


def scan_ids(text: Sequence[int], found: MutableSequence[int]) -> tuple[int, int]:
    """Scan a list of token ids.

    text: bytes, from behind the opening bracket.
    found: int32, with room for one number per two bytes, and one more.

    Returns the number of ids written and the offset behind the closing bracket. Returns (-1, 0) for an empty list, and
    for anything but whole numbers from 0 on, of at most MOST_DIGITS digits, with commas between and optional blanks
    before each.
    """
    num = value = num_digits = 0
    for at in range(len(text)):
        letter = text[at] - ZERO
        is_end = letter == END
        if 0 <= letter <= 9:
            value = value * 10 + letter
            num_digits += 1
        elif is_end or letter == COMMA:
            if not 0 < num_digits <= MOST_DIGITS or (num_digits > 1 and text[at - num_digits] == ZERO):
                return -1, 0
            found[num] = value
            num += 1
            if is_end:
                return num, at + 1
            value = num_digits = 0
        elif letter != BLANK or num_digits > 0:
            return -1, 0
    return -1, 0

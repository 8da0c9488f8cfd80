"""One pass over the JSON text of a list of token ids, written so that numba compiles it as it stands; a process that
does not have that compiled is better off with `token_list`. No objects, no errors: what is no such list is told by a
number."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

# More than ids of any vocabulary have, and such numbers fit into 32 bits.
MOST_DIGITS = 8

# Other letters are told by how far they are from it: what is compiled knows then that digits are small numbers.
ZERO = 48
COMMA, END, BLANK = 44 - ZERO, 93 - ZERO, 32 - ZERO


def scan_ids(text: Sequence[int], found: MutableSequence[int]) -> tuple[int, int]:
    """text: bytes, from behind the bracket that opens the list; found: int32, with room for a number of every two
    bytes, and one more.

    How many numbers were put there, and the place behind the bracket that closes the list. (-1, 0) for an empty list,
    and for all but whole numbers from 0 on, of at most MOST_DIGITS digits and as JSON writes them, with commas between
    and maybe blanks before each.
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

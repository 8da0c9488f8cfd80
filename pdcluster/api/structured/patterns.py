r"""Regular expressions of clients, as the library's dialect (that of Rust) reads what they mean in ECMAScript and in
Python. What those dialects read otherwise is refused by name.

Classes are as narrow as the narrowest reading: \w has ASCII only, and \W none of any script's letters.
"""

from __future__ import annotations

import re

from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

MAX_PATTERN = 64 << 10

PIECES = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|.)|\[\^?(?:\\(?:x00|u0000)-)?\]?|&&|--|~~|\]|.",
    re.DOTALL,
)
# Letters behind a backslash that mean the same everywhere, or that the library refuses itself.
ESCAPES = frozenset("dDwWsStnrfvxuUpPbBck")
NARROW = {
    "\\W": r"[^\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}]",
    "\\D": r"\P{Nd}",
    "\\s": r"[ \t\n\r\f\v]",
    "\\S": r"[^\p{White_Space}\x1c-\x1f\x{feff}]",
}
# In a class of what is not listed the widest reading makes the narrowest class.
WIDE = {"\\d": r"\p{Nd}", "\\w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}", "\\S": r"[^ \t\n\r\f\v]",
        "\\s": r"\p{White_Space}\x1c-\x1f\x{feff}"}  # fmt: skip
# In a class all of whose control characters are taken, the library also takes escaped quotes and backslashes.
NO_NUL = r"\x00"


def rewritten(pattern: str, path: str) -> str:
    """Raises BadRequest naming path."""
    if len(pattern) > MAX_PATTERN:
        what = f"{path} has {len(pattern)} characters, at most {MAX_PATTERN} are allowed"
        raise BadRequest(f"{what}; send a shorter one", path)
    made, is_in_class, is_negated = list[str](), False, False
    for found in PIECES.finditer(pattern):
        piece = found[0]
        if piece[0] == "\\":
            piece = _escape(piece, pattern, path)
            piece = (WIDE if is_in_class and is_negated else NARROW).get(piece, piece)
        elif is_in_class:
            if piece[0] == "[" or piece in ("&&", "--", "~~"):
                raise _unkept(pattern, path, f"{piece} in a class, which dialects read differently; write \\{piece[0]}")
            is_in_class = piece != "]"
        elif piece[0] == "[":
            if piece[-1] == "]":
                raise _unkept(pattern, path, f"{piece}, which dialects read differently; write \\] for a bracket")
            is_in_class, is_negated = True, piece.startswith("[^")
            piece = piece.replace("u0000", "x00").replace(NO_NUL + "-", r"\x01-")
            piece = piece.replace("[^", "[^" + NO_NUL)
        made.append(piece)
    return "".join(made)


def _escape(piece: str, pattern: str, path: str) -> str:
    if len(piece) > 2:  # a pair of surrogates
        high, low = int(piece[2:6], 16), int(piece[8:], 16)
        return f"\\u{{{0x10000 + ((high & 0x3FF) << 10 | low & 0x3FF):x}}}"
    if len(piece) == 1:
        raise _unkept(pattern, path, "a backslash at its end; write two, or none")
    if len(piece) == 2 and piece[1].isalpha() and piece[1] not in ESCAPES:
        raise _unkept(pattern, path, f"the escape {piece}, which dialects read differently; write what it stands for")
    return piece


def _unkept(pattern: str, path: str, what: str) -> BadRequest:
    return BadRequest(f"{path} is {shown(pattern)}, which has {what}", path)

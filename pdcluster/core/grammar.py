"""What a request's output must look like, as part of a message. The router makes it, a node compiles it. Plain values,
and bounds that keep a compiler safe.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# The field that a node names in a refusal. The router knows which of the client's fields it was made from.
PARAM = "grammar"

# As 128 tools need it.
MAX_CHARS = 512 << 10
# Of nested brackets. Compilers recurse, and an exhausted stack ends the process.
MAX_DEPTH = 64


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """source: as llguidance takes it: one grammar in Lark, or JSON with a list of them."""

    source: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]


def depth_of(source: str) -> int:
    """The most brackets open at a time, in JSON or in the expressions in its strings. Never less than what a parser
    recurses over. Brackets in text count too, while nothing closes them.
    """
    depth = deepest = 0
    for character in source:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest

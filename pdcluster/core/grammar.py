"""What a request's output must look like: part of a message, made by the router (`api.structured.constraints`),
compiled by `engine.sampling.grammar` on a node. Plain values, and the bounds that keep a compiler safe."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# How a node names it in what it refuses. Which of the client's fields it was made from is known where the request was
# read.
PARAM = "grammar"

# As 128 tools need it.
MAX_CHARS = 512 << 10
# Of brackets within each other: compilers recurse, and a stack that is exhausted ends the process.
MAX_DEPTH = 64


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """source: a `format` of xgrammar's structural tags, as JSON: json_schema, regex, grammar (EBNF), const_string, or,
    sequence, tag, …"""

    source: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]


def depth_of(source: str) -> int:
    """The most brackets open at a time, in JSON, in the expressions in its strings, or in both: never less than what a
    parser recurses over. Those that are only text count, too, while nothing closes them."""
    depth = deepest = 0
    for character in source:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest

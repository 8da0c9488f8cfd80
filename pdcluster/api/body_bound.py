"""How much a JSON body may be made of, told before it is decoded. Decoding holds the interpreter's lock from its first
byte to its last, in whichever thread it runs, so what it may take must be bounded: 8 MiB of text take 5 ms, of token
ids 80 ms, but of tiny lists 1.5 s.

Counted from above, by what every string, list and object begins with, since counting exactly is as slow as decoding;
only where the bytes of strings could make the difference they are left out. Bodies below SMALL_BYTES cannot be made of
too much. Sizes of bodies are the HTTP server's to bound.
"""

from __future__ import annotations

import re

import numpy as np

from pdcluster.core.errors import BadRequest

SMALL_BYTES = 128 * 1024
# Keys included. As many take 0.15 s.
MOST_STRINGS = 100_000
# Lists and objects. As many take 0.15 s.
MOST_CONTAINERS = 200_000

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def check_bulk(body: bytes, what: str = "the body") -> None:
    """what: how it is called in errors."""
    if len(body) <= SMALL_BYTES:
        return
    num_quotes = _count(body, b'"')
    if num_quotes >= 2 * MOST_STRINGS and (num_strings := (num_quotes - body.count(b'\\"') + 1) // 2) > MOST_STRINGS:
        raise BadRequest(
            f"{what} has some {num_strings} strings and keys, at most {MOST_STRINGS} are taken; send several requests"
        )
    if _num_containers(body) <= MOST_CONTAINERS:
        return
    num_containers = _num_containers(_STRING.sub(b"", body))
    if num_containers > MOST_CONTAINERS:
        raise BadRequest(
            f"{what} has {num_containers} lists and objects, at most {MOST_CONTAINERS} are taken; send several requests"
        )


def _num_containers(text: bytes) -> int:
    return _count(text, b"[") + _count(text, b"{")


def _count(text: bytes, letter: bytes) -> int:
    """As bytes.count, which takes ten times as long."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(letter)))

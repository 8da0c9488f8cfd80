"""Heads of requests that were parsed before. A client says the same with each of its requests, but for the length of the body: what its first ones
came to holds for all that are equal byte by byte, digits of that length aside.

Only plain ones are kept, whose body has a length and came in the same read; everything else is parsed (`http_connection`). Knows no connection.
"""

from __future__ import annotations

import re

from pdcluster_router.http_exchange import Asked

MAX_HEADS = 256
MAX_BYTES = 2048
"""Of a head that is kept."""
KEPT_S = 600.0
"""What a client proves itself by is in its head, and is not to be found in this process long after the client left."""

NOT_PLAIN = (b"transfer-encoding", b"expect", b"upgrade", b"connection")
"""Who says one of these means something beyond the request, and is parsed each time."""

_length = re.compile(rb"\r\ncontent-length: ?([0-9]{1,12})\r\n", re.IGNORECASE)

Form = tuple[bytes, bytes]
"""A head without the digits of its length: what stands before and after them."""


def taken_apart(data: bytes) -> tuple[Form, bytes] | None:
    """A head's form and the body, where this is exactly one request whose body has a length."""
    end = data.find(b"\r\n\r\n", 0, MAX_BYTES)
    found = _length.search(data, 0, end + 2) if end > 0 else None
    if found is None:
        return None
    start, stop = found.span(1)
    body = end + 4
    return ((data[:start], data[stop:end]), data[body:]) if len(data) - body == int(data[start:stop]) else None


class Heads(dict[Form, Asked]):
    """What forms came to. Headers are without the length, which belongs to one request. Shared by connections of one loop."""

    def __init__(self) -> None:
        super().__init__()
        self._until = 0.0

    def forget(self, now: float) -> None:
        """All of them, each KEPT_S; those that are still said are learned again."""
        if now >= self._until:
            self.clear()
            self._until = now + KEPT_S

    def learn(self, form: Form, asked: Asked, body_bytes: int) -> None:
        """What was parsed, of a request with such a body."""
        if asked.headers.get(b"content-length", b"").lstrip(b"0") != b"%d" % body_bytes:
            return  # there is no body, or the parser found its length somewhere else
        if asked.method != "POST" or asked.is_http_1_0 or not asked.keeps_alive or any(name in asked.headers for name in NOT_PLAIN):
            return
        if len(self) >= MAX_HEADS:
            self.clear()  # so many clients at a time are parsed
        headers = {name: value for name, value in asked.headers.items() if name != b"content-length"}
        self[form] = asked._replace(headers=headers)

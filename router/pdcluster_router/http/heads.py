"""Heads of requests that were parsed before. A client says the same with each of its requests, but for the length of
the body: what its first ones came to holds for all that are equal byte by byte, digits of that length aside. The one
that a connection said last is looked for first (`Known`). Also here: what a request target names.

Only plain ones are kept, whose body has a length and came in the same read; everything else is parsed
(`http_connection`). Knows no connection.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote

import httptools
from msgspec.structs import replace

from pdcluster_router.http.exchange import ParsedHead

MAX_HEADS = 256
# Of a head that is kept.
MAX_BYTES = 2048
# What a client proves itself by is in its head, and is not to be found in this process long after the client left.
KEPT_S = 600.0

# Who says one of these means something beyond the request, and is parsed each time.
NOT_PLAIN = (b"transfer-encoding", b"expect", b"upgrade", b"connection")

USUAL_URL_BYTES = 64
MAX_DIGITS = 12
_length = re.compile(rb"\r\ncontent-length: ?([0-9]{1,%d})\r\n" % MAX_DIGITS, re.IGNORECASE)

# A head without the digits of its length: what stands before and after them.
Form = tuple[bytes, bytes]


def taken_apart(data: bytes) -> tuple[Form, bytes] | None:
    """A head's form and the body, where this is exactly one request whose body has a length."""
    end = data.find(b"\r\n\r\n", 0, MAX_BYTES)
    found = _length.search(data, 0, end + 2) if end > 0 else None
    if found is None:
        return None
    start, stop = found.span(1)
    body = end + 4
    return ((data[:start], data[stop:end]), data[body:]) if len(data) - body == int(data[start:stop]) else None


class Known:
    """One form, and what it came to: headers are without the length, which belongs to one request. is_kept: False once
    it is forgotten."""

    __slots__ = ("_before", "_rest", "_rest_bytes", "_start", "asked", "is_kept")

    def __init__(self, form: Form, asked: ParsedHead) -> None:
        self.asked, self.is_kept = asked, True
        self._before, self._rest = form[0], form[1] + b"\r\n\r\n"
        self._start, self._rest_bytes = len(self._before), len(self._rest)

    def body_of(self, data: bytes) -> bytes | None:
        """The body, where this is exactly one request of this form: what `taken_apart` says, told from what is known of
        the form."""
        if not data.startswith(self._before):
            return None
        start = self._start
        stop = data.find(b"\r", start, start + MAX_DIGITS + 1)
        if stop < 0 or not data.startswith(self._rest, stop):
            return None
        digits, body = data[start:stop], data[stop + self._rest_bytes :]
        return body if digits.isdigit() and int(digits) == len(body) else None


class Heads(dict[Form, Known]):
    """What is known. Shared by connections of one loop."""

    def __init__(self) -> None:
        super().__init__()
        self._until = 0.0

    def forget(self, now: float) -> None:
        """All of them, each KEPT_S; those that are still said are learned again."""
        if now >= self._until:
            self._forget_all()
            self._until = now + KEPT_S

    def _forget_all(self) -> None:
        for known in self.values():
            known.is_kept = False
        self.clear()

    def learn(self, form: Form, asked: ParsedHead, body_bytes: int) -> None:
        """What was parsed, of a request with such a body."""
        if asked.headers.get(b"content-length", b"").lstrip(b"0") != b"%d" % body_bytes:
            return  # there is no body, or the parser found its length somewhere else
        if (
            asked.method != "POST"
            or asked.is_http_1_0
            or not asked.keeps_alive
            or any(name in asked.headers for name in NOT_PLAIN)
        ):
            return
        if len(self) >= MAX_HEADS:
            self._forget_all()  # so many clients at a time are parsed
        headers = {name: value for name, value in asked.headers.items() if name != b"content-length"}
        self[form] = Known(form, replace(asked, headers=headers, tenant=None))


def path_of(url: bytes) -> str:
    """Of a request target; what no parser understands names no endpoint."""
    return _usual_path(url) if len(url) <= USUAL_URL_BYTES else _path(url)


def _path(url: bytes) -> str:
    if not url.startswith(b"/"):
        try:
            url = httptools.parse_url(url).path or b"/"
        except httptools.HttpParserInvalidURLError:
            return url.decode("latin-1")
    path = url.partition(b"?")[0].partition(b"#")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


# There are few that are asked for.
_usual_path = lru_cache(maxsize=256)(_path)

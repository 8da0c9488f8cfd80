"""What a request's head must be before anybody acts on it, beside what the parser checks.

Two programs that read the same bytes as different requests are how requests are smuggled. So what a proxy in front may
read in another way is refused, and the connection ends:

1. HTTP/1.1 has exactly one Host, HTTP/1.0 at most one. A target that names a host names the same one.
2. Headers of ONCE come at most once.
3. The only transfer coding is `chunked`, and HTTP/1.0 has none.
4. A head has at most MAX_HEAD_BYTES and MAX_HEADERS different names.
5. A path is compared as it came: nothing in it is decoded, and no slash is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
# Who asks, and of whom, and where the body ends.
ONCE = frozenset((b"host", b"authorization", b"x-admin-token", b"x-api-key", b"content-length", b"transfer-encoding"))
HOST, TRANSFER_ENCODING = b"host", b"transfer-encoding"
VERSIONS = ("1.1", "1.0")
# Targets up to this length have their paths cached.
USUAL_URL_BYTES = 64
MAX_HOST_BYTES = 300
# A name, an address or an address in brackets, and a port (RFC 3986). It may be empty.
HOST_SHAPE = re.compile(rb"(?:\[[0-9A-Za-z:.%]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(?::[0-9]{0,5})?")


class RefusedHead(Exception):
    """A head that is not acted on.

    status: of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_head(version: str, url: bytes, headers: Mapping[bytes, bytes], read_bytes: int) -> None:
    """Raises RefusedHead.

    read_bytes: since the request began; at least the head.
    """
    host = headers.get(HOST)
    if version != "1.1" or host is None or not url.startswith(b"/"):
        _check_unusual(version, url, host)
    if host is not None and (len(host) > MAX_HOST_BYTES or not _is_host(host)):
        raise RefusedHead(400, "the Host header is no host and port")
    if TRANSFER_ENCODING in headers:
        if version == "1.0":
            raise RefusedHead(400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length")
        if headers[TRANSFER_ENCODING].lower() != b"chunked":
            raise RefusedHead(501, "the only Transfer-Encoding taken is chunked; send that, or Content-Length")
    if read_bytes > MAX_HEAD_BYTES:
        size = len(url) + sum(len(name) + len(value) for name, value in headers.items())
        if size > MAX_HEAD_BYTES:
            raise RefusedHead(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")


def _check_unusual(version: str, url: bytes, host: bytes | None) -> None:
    """Of a head that is no HTTP/1.1 with a host and a path."""
    if version not in VERSIONS:
        raise RefusedHead(400, f"HTTP/{version} is not spoken here; use HTTP/1.1")
    if host is None:
        if version == "1.1":
            raise RefusedHead(400, "the request has no Host header, which HTTP/1.1 asks for")
    elif (named := _absolute(url)) is not None and named[0].lower() != host.lower():
        raise RefusedHead(400, "the request's target names another host than its Host header")


def _absolute(url: bytes) -> tuple[bytes, bytes] | None:
    """Host and path of a target that names both; None for another one."""
    scheme, _, rest = url.partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        return None
    host = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    return host, path if path.startswith(b"/") else b"/" + path


@lru_cache(maxsize=256)
def _is_host(host: bytes) -> bool:
    return HOST_SHAPE.fullmatch(host) is not None


def path_of(url: bytes) -> str:
    """The path of a request target, as it came. A target without one names no endpoint."""
    return _usual_path(url) if len(url) <= USUAL_URL_BYTES else _path(url)


def _path(url: bytes) -> str:
    if not url.startswith(b"/"):
        named = _absolute(url)
        url = url if named is None else named[1]
    return url.partition(b"?")[0].decode("latin-1")


# Clients ask for few paths.
_usual_path = lru_cache(maxsize=256)(_path)

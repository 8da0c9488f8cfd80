"""Which web pages may use the API (CORS): header lines for the origins of `router.cors_origins`.

Keys come in a header, so pages need no cookies and get none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

ANY = "*"
# How long a browser need not ask again.
MAX_AGE_S = 600
MAX_ASKED_BYTES = 2048
EXPOSED = (
    b"x-request-id, retry-after, x-pdcluster-mode, x-pdcluster-prefill, x-pdcluster-decode, x-pdcluster-transfer, "
    b"x-pdcluster-predicted-wait-s, x-should-retry, request-id"
)
ORIGIN, ASKED_METHOD, ASKED_HEADERS = b"origin", b"access-control-request-method", b"access-control-request-headers"


class Cors:
    """Immutable. Without origins it adds no lines."""

    def __init__(self, origins: Collection[str]) -> None:
        self._is_any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self.is_on = bool(origins)
        self.lines = lru_cache(maxsize=256)(self._lines)

    def _lines(self, origin: bytes | None) -> bytes:
        """Lines of every answer to that origin; None for no page."""
        vary = b"" if self._is_any or not self.is_on else b"vary: Origin\r\n"
        allowed = self._allowed(origin)
        if not allowed:
            return vary
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n%b" % (allowed, EXPOSED, vary)

    def preflight(self, headers: Mapping[bytes, bytes], methods: Sequence[str]) -> bytes:
        """Lines of an answer to OPTIONS: what the page may send. Empty unless it asks and is allowed to."""
        if ASKED_METHOD not in headers or not self._allowed(headers.get(ORIGIN)):
            return b""
        asked = headers.get(ASKED_HEADERS, b"authorization, content-type")
        if len(asked) > MAX_ASKED_BYTES:
            return b""
        allowed = b"access-control-allow-methods: %b\r\naccess-control-allow-headers: %b\r\n"
        return allowed % (", ".join(methods).encode(), asked) + b"access-control-max-age: %d\r\n" % MAX_AGE_S

    def _allowed(self, origin: bytes | None) -> bytes:
        if origin is None:
            return b""
        return b"*" if self._is_any else origin if origin in self._origins else b""

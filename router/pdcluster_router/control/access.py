"""Who may call: whoever has the admin token; without one, programs of this machine, and no page in a browser.

A page of somebody else can send forms and plain POSTs to this machine, but its browser names where they come from. It
can also make its own name point here (`http.hosts`).
"""

from __future__ import annotations

import hmac

from pdcluster.core.errors import Unauthorized
from pdcluster_router.http.exchange import Exchange
from pdcluster_router.http.head import HOST
from pdcluster_router.http.hosts import Forbidden, HostRule

OF_BROWSERS = (b"origin", b"sec-fetch-site")


class ControlAccess:
    """token: None: nobody is asked for one. hosts: names that callers without a token may use; None: all."""

    def __init__(self, token: str | None, hosts: HostRule | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._hosts = hosts

    def check(self, exchange: Exchange) -> None:
        """Raises Unauthorized, or Forbidden for pages and for names that are not ours."""
        if any(name in exchange.headers for name in OF_BROWSERS):
            raise Forbidden("calls of trainers are not for pages in browsers; send them from a program")
        if self._expected is None:
            if self._hosts is not None:
                self._hosts.check(exchange.header(HOST))
            return
        if not hmac.compare_digest(exchange.headers.get(b"authorization", b""), self._expected):
            raise Unauthorized("the admin token is missing or wrong; send Authorization: Bearer TOKEN")

"""Who may use the console: pages of its own only, changes with the admin token only.

A browser sends a page's origin with what the page asks for, and the name that the user typed as the host. So a page of
somebody else is refused by its origin, and a name that was made to point here (`http.hosts`) by the host.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from pdcluster.core.errors import Unauthorized
from pdcluster_router.http.exchange import Exchange
from pdcluster_router.http.head import HOST
from pdcluster_router.http.hosts import Forbidden, HostRule

ORIGIN, SITE, TOKEN = b"origin", b"sec-fetch-site", b"x-admin-token"
# No header can be set on a form or by a link from elsewhere, so one that is asked for proves a script of this page.
SAME_SITE = ("same-origin", "none")


class ConsoleAccess:
    """Rules for one listening address.

    hosts: names by which browsers may reach it.
    token: None: nothing can be changed.
    is_open: reading needs no token.
    """

    def __init__(self, hosts: HostRule, token: str | None, *, is_open: bool) -> None:
        self._hosts = hosts
        self._token = None if token is None else token.encode()
        self._is_open = is_open

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def check_page(self, exchange: Exchange) -> None:
        """Raises Forbidden where somebody else's page asks, or the host is not ours."""
        host = exchange.header(HOST)
        self._hosts.check(host)
        origin, site = exchange.header(ORIGIN), exchange.header(SITE)
        is_foreign = origin is not None and urlsplit(origin).netloc.lower() != (host or "").lower()
        if is_foreign or site not in (None, *SAME_SITE):
            raise Forbidden("the console answers its own page only")

    def check_reading(self, exchange: Exchange) -> None:
        """Raises Unauthorized."""
        if not self._is_open and not self.may_change(exchange):
            raise Unauthorized("the console of this address wants the admin token; enter it in the page's head")

    def check_changing(self, exchange: Exchange) -> None:
        """Raises Forbidden, or Unauthorized for a wrong token."""
        if self._token is None:
            raise Forbidden(
                "this console is read-only, for no admin token is set; set router.admin_token_file, or use pdctl"
            )
        if not self.may_change(exchange):
            raise Unauthorized("changes want the admin token; enter it in the page's head")

    def may_change(self, exchange: Exchange) -> bool:
        given = exchange.header(TOKEN) or ""
        return self._token is not None and hmac.compare_digest(given.encode(), self._token)

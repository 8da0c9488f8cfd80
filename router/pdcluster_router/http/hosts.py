"""Which names a listener answers to.

A page of somebody else can make its own name point to this machine (DNS rebinding). Its browser then sends that name as
the host, and reads the answers as the page's own. So a listener that asks for no key takes only names that are ours.
Without a Host header the client is no browser.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

from pdcluster.core.address import is_loopback
from pdcluster.core.errors import BadRequest

LOCALHOST = "localhost"


class Forbidden(BadRequest):
    code = "forbidden"
    http_status = 403


class HostRule:
    """Of one listening address. Immutable.

    It takes localhost, loopback addresses, the host that it listens on, and names. A listener beyond loopback takes any
    address: nobody made a name point to it.
    """

    def __init__(self, listens: str, names: Collection[str], *, what: str, setting: str) -> None:
        """listens: the host. what, setting: for the error, the service and what adds a name."""
        self._names = {name.lower() for name in names} | {listens.lower(), LOCALHOST}
        self._takes_addresses = not is_loopback(listens)
        self._what, self._setting = what, setting
        self._takes = lru_cache(maxsize=64)(self._is_taken)

    def check(self, host: str | None) -> None:
        """Raises Forbidden. host: the header, None where there is none."""
        if host is not None and not self._takes(host):
            raise Forbidden(
                f"{self._what} is not reached as {host[:100]!r}; use localhost or its address, or add the name to "
                f"{self._setting}"
            )

    def _is_taken(self, host: str) -> bool:
        name = _name_of(host)
        if name in self._names or is_loopback(name):
            return True
        return self._takes_addresses and _is_address(name)


def _name_of(host: str) -> str:
    """Without a port, in lower case; "" where there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

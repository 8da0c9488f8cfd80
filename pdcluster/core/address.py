"""HOST:PORT as text: `127.0.0.1:8000`, `node-3.cluster:9000`, `[::1]:9000`. An IPv6 host stands in brackets.

The one place that reads and writes it. Nothing is resolved here. A host by itself has no brackets.
"""

from __future__ import annotations

import ipaddress
import re

# No label is empty; a dot may end the name.
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
_ADDRESS = re.compile(r"(\[[^\[\]]*\]|[^:]*):([0-9]{1,5})")
_WILDCARDS = frozenset({"0.0.0.0", "::"})


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. Port 0 means any free port. Raises ValueError that says what it must be."""
    found = _ADDRESS.fullmatch(text)
    if found is not None and int(found[2]) <= 65535:
        host = found[1].strip("[]")
        if is_ipv6(host) if found[1].startswith("[") else _NAME.fullmatch(host):
            return host, int(found[2])
    raise ValueError("must be HOST:PORT with a port up to 65535, such as 127.0.0.1:8000 or [::1]:8000")


def format_address(host: str, port: int) -> str:
    """Inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_host(text: str) -> str:
    """A host that stands alone, in brackets or not. Raises ValueError."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not (is_ipv6(host) if ":" in host or host is not text else _NAME.fullmatch(host)):
        raise ValueError("must be a host's name or address without a port, such as 10.0.0.1, fd00::1 or node-3.cluster")
    return host


def is_ipv6(host: str) -> bool:
    if not _IPV6.fullmatch(host):
        return False
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine gets there. A name that is not resolved counts as one that others know."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether one can listen on this host but not connect to it."""
    return host in _WILDCARDS


def loopback_like(host: str) -> str:
    """The loopback address of the family that a host's address has; IPv4 for a name."""
    return "::1" if ":" in host else "127.0.0.1"

"""host:port addresses as peers write them: `127.0.0.1:8000`, `node-3.cluster:9000`, `[::1]:9000`. Nothing is resolved
here."""

from __future__ import annotations

import re

from pdcluster.core.errors import ProtocolError

MAX_ADDRESS_CHARS = 300
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
_WILDCARDS = frozenset({"0.0.0.0", "::"})


def parse_address(address: str, *, allow_port_0: bool = False) -> tuple[str, int]:
    """(host, port) of "host:port"; raises ProtocolError for anything else. An IPv6 host stands in brackets."""
    if len(address) > MAX_ADDRESS_CHARS:
        raise ProtocolError(f"address of {len(address)} characters; write HOST:PORT")
    host, _, port_text = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    pattern = _IPV6 if bracketed else _HOST
    if not pattern.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", port_text):
        raise ProtocolError(f"address {address!r} is not HOST:PORT (an IPv6 host stands in brackets, as in [::1]:8000)")
    port = int(port_text)
    if port > 65535 or (port == 0 and not allow_port_0):
        raise ProtocolError(f"address {address!r} has port {port}, allowed are 1 to 65535")
    return host, port


def format_address(host: str, port: int) -> str:
    """Inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine gets there. A name that is not resolved counts as one that others know."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def is_wildcard(host: str) -> bool:
    """Whether one can listen on this host but not connect to it."""
    return host in _WILDCARDS

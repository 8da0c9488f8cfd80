"""Addresses that peers write into messages: checked, and never resolved here."""

from __future__ import annotations

from pdcluster.core import address as text
from pdcluster.core.errors import ProtocolError

MAX_ADDRESS_CHARS = 300


def peer_address(address: str) -> tuple[str, int]:
    """(host, port) of a place to connect to. Raises ProtocolError."""
    if len(address) > MAX_ADDRESS_CHARS:
        raise ProtocolError(f"address of {len(address)} characters; write HOST:PORT")
    try:
        host, port = text.parse_address(address)
    except ValueError as error:
        raise ProtocolError(f"address {address!r} {error}") from error
    if port == 0:
        raise ProtocolError(f"address {address!r} has port 0, to which nobody can connect")
    return host, port

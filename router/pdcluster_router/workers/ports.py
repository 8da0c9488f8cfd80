"""Ports that several workers listen on (SO_REUSEPORT). The kernel spreads new connections over them.

A worker that dies takes only its own connections along. The supervisor holds each port with a socket that is bound but
does not listen, so the port stays ours. It first checks that no one else listens there: another process of the same
user could take half of the connections.
"""

from __future__ import annotations

import socket

from pdcluster.core.address import format_address, parse_address
from pdcluster.core.errors import ConfigError
from pdcluster.processes.listening import listening_place


def hold(address: str, flag: str) -> tuple[socket.socket, str]:
    """The socket that holds the port until it is closed, and HOST:PORT with the real port. Raises ConfigError that
    names the flag.
    """
    option = getattr(socket, "SO_REUSEPORT", None)  # missing where the system has no such option
    if option is None:
        raise ConfigError(
            f"several workers on {address} need SO_REUSEPORT, which this system does not have; use --workers 1"
        )
    host, port = parse_address(address)
    try:
        family, where = listening_place(host, port)
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(where)
            alone.listen(1)
            where = alone.getsockname()
        held = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; choose another address with {flag}"
        ) from error
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind(where)
    except OSError as error:
        held.close()
        raise ConfigError(
            f"several workers cannot share {address}: {error.strerror}; use --workers 1, or another address with {flag}"
        ) from error
    return held, format_address(host, held.getsockname()[1])

"""Where a process of this machine can listen, in both families of addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The address is what `bind` takes, whose form depends on the family.
Place = tuple[socket.AddressFamily, Any]


def listening_place(host: str, port: int) -> Place:
    """(family, address) to bind to. Of a name's addresses the first of IPv4, else of IPv6. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, where


@contextmanager
def reserved_port(host: str, port: int = 0) -> Iterator[int]:
    """A port that nobody is given while the block runs; 0: any free one. Raises OSError where somebody listens there or
    has reserved it.

    A library that is told the port can listen there, also within the block: on Linux that takes SO_REUSEADDR on both
    sockets, and this one does not listen. Two of these would not exclude each other, so a name does.
    """
    family, place = listening_place(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as holder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(place)
        found = holder.getsockname()
        name.bind(f"\0pdcluster-port-{found[0]}-{found[1]}")
        yield int(found[1])


def loopback() -> str:
    """This machine's loopback address: 127.0.0.1 where it has one, else ::1."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"

"""How many client connections there may be, and what the ones beyond that are told.

Links to nodes, the Admin service, gRPC and files need descriptors, too. So a part of what the process may open is kept
for them, whatever clients do.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from asyncio import BaseTransport, Protocol, Transport
from collections.abc import Callable
from typing import NamedTuple, cast

from pdcluster.api.openai.replies import error_body
from pdcluster.core.errors import Unavailable

logger = logging.getLogger(__name__)

# Of the descriptors that the process may open, those that clients do not get.
RESERVED_SHARE = 0.25
# Taken for a process without a limit; the kernel's own is about this.
UNLIMITED = 1 << 20
MOST_RESERVED = 4096
# How long a refused client may read that it is.
TOLD_S = 1.0


class DoorLimits(NamedTuple):
    """connections: of clients. refusals: clients that are told at the same time that there are too many; they take of
    the reserve.
    """

    connections: int
    refusals: int = 64


def limits_of_process() -> DoorLimits:
    """By the descriptors that the process may open. The soft limit is raised to the hard one first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reserve = min(int(hard * RESERVED_SHARE), MOST_RESERVED)
    return DoorLimits(hard - reserve, reserve // 4)


class Door:
    """Makes the protocol of each accepted connection.

    num_open: connections now.
    on_refused: called for each one that is refused.
    """

    def __init__(
        self,
        make: Callable[[], Protocol],
        num_open: Callable[[], int],
        limits: DoorLimits,
        on_refused: Callable[[], None],
    ) -> None:
        self._make, self._num_open, self._limits, self._on_refused = make, num_open, limits, on_refused
        self._refused: set[Refusal] = set()
        # Whether the refusals since there was room last were logged.
        self._is_noted = False

    def __call__(self) -> Protocol:
        if self._num_open() < self._limits.connections:
            self._is_noted = False
            return self._make()
        self._on_refused()
        error = Unavailable(
            f"{self._limits.connections} clients are connected, as many as this router's limit of open files allows; "
            "retry later"
        )
        if not self._is_noted:
            self._is_noted = True
            logger.warning("%s (an operator can raise the limit: ulimit -n, LimitNOFILE)", error)
        return Refusal(self._refused, _answer(error) if len(self._refused) < self._limits.refusals else b"")


class Refusal(Protocol):
    """Answers 503 to whatever comes, and ends the connection."""

    def __init__(self, open_ones: set[Refusal], answer: bytes) -> None:
        self._open_ones, self._answer = open_ones, answer

    def connection_made(self, transport: BaseTransport) -> None:
        transport = cast(Transport, transport)
        if not self._answer:
            transport.abort()
            return
        self._open_ones.add(self)
        transport.write(self._answer)
        # What the client still sends is read: a reset would overtake the answer.
        transport.write_eof()
        asyncio.get_running_loop().call_later(TOLD_S, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._open_ones.discard(self)


def _answer(error: Unavailable) -> bytes:
    body = error_body(error)
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    )

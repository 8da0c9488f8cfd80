"""Accepts client connections, and answers those beyond the limit of open files.

Links to nodes, the Admin service, gRPC and files need descriptors, too. So the highest numbers that the process may
open are kept for them. The system gives the lowest free number, so a client's own number tells how many are in use.

1. A client whose number is one of those kept gets 503. It may read that for LINGER_S. Where many such clients come, the
   one that was answered first is closed first.
2. Where no number at all is left, a spare one is given up for an answer, and taken again.
3. With TLS an alert is the answer: another would need a handshake, and the descriptor for that long.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from asyncio import Protocol, Task, TimerHandle
from collections.abc import Callable
from typing import NamedTuple

from pdcluster.api.openai.replies import error_body
from pdcluster.core.errors import ConfigError, Unavailable
from pdcluster.processes.tasks import watched
from pdcluster_router.http.tls import ALERT, Handshakes, ServerTls

logger = logging.getLogger(__name__)

# Of the descriptors that the process may open, those that clients do not get.
RESERVED_SHARE = 0.25
# Taken for a process without a limit; the kernel's own is about this.
UNLIMITED = 1 << 20
MOST_RESERVED = 4096
# Of the reserve, for refused clients that still read.
REFUSED_SHARE = 0.25
# How long a refused client may read its answer.
LINGER_S = 1.0
# In one turn of the loop.
MOST_ACCEPTED = 32
# After the system had no room for another connection.
PAUSE_S = 0.1
READ_BYTES = 64 * 1024

TOO_MANY = "as many clients are connected as this router's limit of open files allows; retry later"


class AcceptLimits(NamedTuple):
    """descriptors: clients get lower numbers only. refused: refused clients that may read at the same time."""

    descriptors: int
    refused: int = 64


def limits_of_process() -> AcceptLimits:
    """By the descriptors that the process may open. The soft limit is raised to the hard one first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reserve = min(int(hard * RESERVED_SHARE), MOST_RESERVED)
    return AcceptLimits(hard - reserve, max(int(reserve * REFUSED_SHARE), 1))


class Acceptor:
    """Owned by the server's loop."""

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], Protocol],
        limits: AcceptLimits,
        on_refused: Callable[[], None],
        tls: ServerTls | None = None,
    ) -> None:
        """bound: listens; `close` closes it.
        make: the protocol of a connection.
        on_refused: called for each client that is refused.
        tls: None: connections are plain.

        Raises ConfigError where no client would get in.
        """
        self._bound, self._make, self._limits, self._on_refused = bound, make, limits, on_refused
        self._loop = asyncio.get_running_loop()
        self._handshakes = None if tls is None else Handshakes(tls, make)
        self._answer = _answer() if tls is None else ALERT
        # Refused clients that may still read, the first one first.
        self._refused: dict[socket.socket, TimerHandle] = {}
        self._starting: set[Task[None]] = set()
        self._pause: TimerHandle | None = None
        # Whether the lack of descriptors was logged since a client got in.
        self._is_noted = False
        self._spare: int | None = os.dup(bound.fileno())
        if self._spare >= limits.descriptors:
            num_open = self._spare
            self._give_up_spare()
            bound.close()
            raise ConfigError(
                f"this process has {num_open} open files, and its limit leaves {limits.descriptors} for them and its "
                "clients; raise it: ulimit -n, LimitNOFILE"
            )
        self._loop.add_reader(bound, self._accept_some)

    async def close(self) -> None:
        """Stop listening. Clients that were accepted have their connection then."""
        self._loop.remove_reader(self._bound)
        self._bound.close()
        if self._pause is not None:
            self._pause.cancel()
        for client in list(self._refused):
            self._drop(client)
        self._give_up_spare()
        if self._starting:
            await asyncio.wait(self._starting)
        if self._handshakes is not None:
            await self._handshakes.close()

    def _accept_some(self) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                client, address = self._bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # it left while it waited
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._spare is not None:
                    self._refuse_by_spare()
                else:
                    self._wait(error)
                return
            client.setblocking(False)
            if client.fileno() < self._limits.descriptors:
                self._start(client, address[0])
            else:
                self._refuse(client)

    def _start(self, client: socket.socket, host: str) -> None:
        self._is_noted = False
        if self._handshakes is not None:
            self._handshakes.start(client, host)
            return

        async def connect() -> None:
            await self._loop.connect_accepted_socket(self._make, client)

        task = watched(connect(), "http connection", lambda _: client.close())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _wait(self, error: OSError) -> None:
        """The system has no room. Clients wait in the kernel's queue meanwhile."""
        self._note(f"no client is accepted: {error}; tried again every {PAUSE_S:g} s")
        self._loop.remove_reader(self._bound)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._take_spare():
            self._loop.add_reader(self._bound, self._accept_some)

    # ------------------------------------------------------------ clients that are too many

    def _refuse(self, client: socket.socket) -> None:
        """Answer, and read what the client still sends: a reset would overtake the answer."""
        if not self._send_answer(client):
            client.close()
            return
        if len(self._refused) >= self._limits.refused:
            self._drop(next(iter(self._refused)))
        self._refused[client] = self._loop.call_later(LINGER_S, self._drop, client)
        self._loop.add_reader(client, self._read_off, client)

    def _refuse_by_spare(self) -> None:
        """Answer one client with the number that is kept for that."""
        self._give_up_spare()
        try:
            client, _ = self._bound.accept()
        except OSError as error:  # it left, or another thread took the number
            logger.debug("no client was told that there are too many: %s", error)
        else:
            client.setblocking(False)
            self._send_answer(client)
            client.close()
        self._take_spare()

    def _take_spare(self) -> bool:
        """Whether there is one. Where not, accepting waits."""
        try:
            if self._spare is None:
                self._spare = os.dup(self._bound.fileno())
        except OSError as error:
            self._wait(error)
        return self._spare is not None

    def _give_up_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _send_answer(self, client: socket.socket) -> bool:
        """False when the client left."""
        self._on_refused()
        self._note(TOO_MANY)
        try:
            client.send(self._answer)
            client.shutdown(socket.SHUT_WR)
            client.recv(READ_BYTES)
        except BlockingIOError:
            return True  # it asked nothing yet
        except OSError:
            return False
        return True

    def _note(self, lack: str) -> None:
        if not self._is_noted:
            self._is_noted = True
            logger.warning("%s (an operator can raise the limit: ulimit -n, LimitNOFILE)", lack)

    def _read_off(self, client: socket.socket) -> None:
        try:
            has_more = bool(client.recv(READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            has_more = False
        if not has_more:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._refused.pop(client).cancel()
        self._loop.remove_reader(client)
        client.close()


def _answer() -> bytes:
    body = error_body(Unavailable(TOO_MANY))
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    )

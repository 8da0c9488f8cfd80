"""TLS of a process's listeners: the certificate they show, read again when its files change, and their handshakes.

1. A handshake has HANDSHAKE_S. At most MOST_HANDSHAKES are open at a listener of HTTP. Of more, the oldest ends of
   the address that has most: one that is honest is over after two trips of its packets.
2. TLS has no half-close: what a client sends behind its goodbye is not read, as with plain connections.
   `connection.py` says how long one that this end closed goes on. CLOSING_S is for clients that read nothing.
3. A connection keeps the certificate that it began with.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import Protocol, Task
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdcluster.processes.tasks import watched
from pdcluster.settings.changed_files import ChangedFiles
from pdcluster.settings.tls_files import TlsCertificate, read_certificate
from pdcluster.telemetry.metrics import TlsMetrics

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MOST_HANDSHAKES = 256
CLOSING_S = 60.0
# Open handshakes of a listener that closes.
LAST_HANDSHAKES_S = 1.0
# Of output that a client does not read. The loops' own is eight times that of plain connections.
WRITE_BUFFER_BYTES = 64 * 1024
# A fatal alert, internal_error, in place of an answer that nobody encrypted.
ALERT = bytes((21, 3, 3, 0, 2, 2, 80))


class ServerTls:
    """The certificate of this process's listeners. Threads may read it."""

    def __init__(self, cert: Path, key: Path, metrics: TlsMetrics | None = None) -> None:
        """metrics: None: nobody asks this process. Raises ConfigError."""
        self.files = ChangedFiles([cert, key], partial(read_certificate, cert, key))
        self.metrics = metrics
        self.use(self.files.first)

    def use(self, certificate: TlsCertificate) -> None:
        """For connections from now on."""
        self.certificate = certificate
        if self.metrics is not None:
            self.metrics.not_after.set(certificate.not_after.timestamp())
        if certificate.is_over:
            log.warning("the TLS certificate ended on %s, so clients refuse it; renew it", certificate.not_after)

    def count(self, listener: str, outcome: str) -> None:
        """A handshake at `listener`. Any thread may."""
        if self.metrics is not None:
            self.metrics.handshakes.labels(listener, outcome).inc()


def server_tls(files: tuple[Path, Path] | None, metrics: TlsMetrics | None = None) -> ServerTls | None:
    """None without files. Raises ConfigError."""
    return None if files is None else ServerTls(*files, metrics)


class Handshakes:
    """Handshakes of one listener of HTTP. Owned by its loop."""

    def __init__(self, tls: ServerTls, make: Callable[[], Protocol]) -> None:
        """make: the protocol above TLS of a connection."""
        self._tls, self._make = tls, make
        # The client's address of each, the oldest one first.
        self._open: dict[Task[None], str] = {}

    def start(self, client: socket.socket, host: str) -> None:
        """host: the client's address."""
        if len(self._open) >= MOST_HANDSHAKES:
            counts = Counter(self._open.values())
            most = max(counts.values())
            self._end(next(task for task, each in self._open.items() if counts[each] == most), "displaced")
        task = watched(self._connect(client), "tls handshake", lambda _: client.close())
        self._open[task] = host
        task.add_done_callback(lambda _: self._open.pop(task, None))

    async def close(self) -> None:
        """Those that take long end."""
        if self._open:
            await asyncio.wait(self._open, timeout=LAST_HANDSHAKES_S)
        ending = list(self._open)
        for task in ending:
            self._end(task, "displaced")
        if ending:
            await asyncio.wait(ending)

    def _end(self, task: Task[None], outcome: str) -> None:
        self._open.pop(task, None)
        task.cancel()
        self._tls.count("http", outcome)

    async def _connect(self, client: socket.socket) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                client,
                ssl=self._tls.certificate.context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=CLOSING_S,
            )
        except ConnectionAbortedError:  # what loops raise where time is up
            self._tls.count("http", "late")
        except OSError as error:  # the client left, or speaks no TLS, or another one
            log.debug("a handshake failed: %s", error)
            self._tls.count("http", "failed")
        else:
            transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
            self._tls.count("http", "done")

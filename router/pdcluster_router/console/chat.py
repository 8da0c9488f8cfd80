"""Passes a chat of the page on to a router's HTTP API, and the stream back: the page may speak to its origin only."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdcluster.core.address import parse_address
from pdcluster.core.errors import BadRequest, PdclusterError, Unavailable
from pdcluster.processes.http_client import http_connection
from pdcluster.settings.tls_trust import TlsTrust

PATH = "/v1/chat/completions"
# For the router to begin its answer, and between two of its lines.
SILENCE_S = 660.0
# For the page to read on.
READ_S = 60.0
LOOK_S = 0.02
MAX_ERROR_BYTES = 1 << 16


class ChatRefused(PdclusterError):
    """The router's own refusal: its status and its body, JSON."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the router answered {status}")
        self.status, self.body = status, body


@dataclass(slots=True)
class ChatRelay:
    """One chat, relayed in a thread. Other threads may cancel it.

    emit: gets parts of the stream, each with whole lines.
    is_paused: whether the page does not read.
    trust: None: the router's API is plain HTTP.
    """

    api: str
    emit: Callable[[bytes], None]
    is_paused: Callable[[], bool]
    trust: TlsTrust | None = None
    is_cancelled: bool = False
    _socket: socket.socket | None = None

    def cancel(self) -> None:
        """Nobody reads it any more. The router sees that its client left, whatever it computes."""
        self.is_cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended
                # Below TLS, where there is: its own shutdown would take the state that another thread reads by.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def run(self, body: dict[str, Any], api_key: str | None) -> None:
        """Raises ChatRefused or Unavailable before the first part."""
        host, port = parse_address(self.api)
        connection = http_connection(host, port, SILENCE_S, self.trust)
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        try:
            connection.connect()
            self._socket = connection.sock
            connection.request("POST", PATH, msgspec.json.encode(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise ChatRefused(reply.status, reply.read(MAX_ERROR_BYTES))
            while not self.is_cancelled and (line := reply.readline()):
                self._wait_for_reader()
                self.emit(line)
        except (OSError, http.client.HTTPException) as error:
            if self.is_cancelled:
                return
            raise Unavailable(f"the router's API at {self.api} does not answer: {error}; see pdctl status") from error
        finally:
            connection.close()

    def _wait_for_reader(self) -> None:
        until = time.monotonic() + READ_S
        while self.is_paused() and not self.is_cancelled and time.monotonic() < until:
            time.sleep(LOOK_S)


def streaming(body: bytes) -> dict[str, Any]:
    """The page's request as one that streams and tells its route. Raises BadRequest."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"the chat is no JSON object: {error}") from error
    return {**found, "stream": True, "stream_options": {"include_usage": True}}

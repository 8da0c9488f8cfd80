"""Admission to encrypted links: answers libzmq's authentication questions (ZAP, RFC 27). Holders of a cluster key get
in, others do not.

One per ZMQ context, in a thread of its own, so that a node that is computing still lets peers in.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from pdcluster.core.errors import ConfigError
from pdcluster.wire.sockets import ZAP_DOMAIN, KeyPair

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_numbers = itertools.count()
log = logging.getLogger(__name__)


class Gatekeeper:
    """Owns the context's ZAP endpoint from construction to `close`. `refused` counts the handshakes it turned down."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Iterable[KeyPair]) -> None:
        self._allowed = frozenset(z85.decode(pair.public) for pair in keys)
        self.refused = 0
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._stopper, self._stop = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        try:
            self._questions.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            for socket in (self._questions, self._stopper, self._stop):
                socket.close(0)
            raise ConfigError(
                "this ZMQ context already has an authenticator; give each hub with a cluster key a context of its own"
            ) from error
        stop_address = f"inproc://pdcluster-gatekeeper-{next(_numbers)}"
        self._stop.bind(stop_address)
        self._stopper.connect(stop_address)
        self._thread = threading.Thread(target=self._run, name="wire-gatekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._stopper.send(b"")
            self._thread.join()
        self._stopper.close(0)

    def _run(self) -> None:
        try:
            while True:
                ready, _, _ = zmq.select([self._questions, self._stop], [], [])
                if self._stop in ready:
                    self._questions.unbind(
                        _ZAP_ENDPOINT
                    )  # now; closing gives the name back a moment later, from a thread of ZMQ
                    return
                self._questions.send_multipart(self._answer(self._questions.recv_multipart()))
        except zmq.ContextTerminated:
            log.warning("the ZMQ context ended before its gatekeeper was closed")
        finally:
            self._questions.close(0)
            self._stop.close(0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, domain, *rest = question
        allowed = domain == ZAP_DOMAIN and len(rest) == 4 and rest[2] == b"CURVE" and rest[3] in self._allowed
        if not allowed:
            self.refused += 1
        status = [b"200", b"OK"] if allowed else [b"400", b"not a member of this cluster"]
        return [version, request_id, *status, b"", b""]

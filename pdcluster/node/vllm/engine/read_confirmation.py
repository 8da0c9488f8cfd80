"""Whether a peer's read of parked KV ended while the KV was held: the books, the question and the answer.

vLLM reads without a check: KV whose blocks were taken by another prompt gives wrong tokens. So the reader asks after
its read, and uses nothing before it has a yes. Knows no vllm.

Rules:
1. A worker's books name what it holds. It leaves the books before its blocks can be freed. So a yes, given after the
   read ended, proves that the blocks were untouched during the read.
2. The first reader with the right fence is the only one. Every other one gets a no, also if it asks in time.
3. The reader's name is drawn anew for each read, so a second read by the same node is another reader.
4. No answer in time is a no.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import zmq
from msgspec import Meta

from pdcluster.core.bounds import DECODE_ERRORS
from pdcluster.core.errors import ProtocolError

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 2.0
# A step of the engine polls for answers. One in the same data centre takes less than this; waiting for it saves a step.
FIRST_WAIT_S: Final = 0.001
MAX_READERS: Final = 1 << 16
MAX_PEERS: Final = 256
MAX_QUESTION_BYTES: Final = 1024
_POLL_MS: Final = 200
_RELEASED: Final = ""

_Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]


class ReadQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Was this request's KV still held for this reader, and is it the KV that the fence names?"""

    request: _Word
    reader: _Word
    fence: _Word


class ReadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of the reader's question."""

    reader: _Word
    is_good: bool


_question_decoder = msgspec.msgpack.Decoder(ReadQuestion)
_answer_decoder = msgspec.msgpack.Decoder(ReadAnswer)


def decode_question(data: bytes) -> ReadQuestion:
    """Raises ProtocolError."""
    try:
        return _question_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"a question about parked KV that cannot be read: {error}") from error


def decode_answer(data: bytes) -> ReadAnswer:
    """Raises ProtocolError."""
    try:
        return _answer_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"an answer about parked KV that cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class ReadNotice:
    """What a reader tells the holder through the transfer library, in the place of vLLM's plain request id."""

    request: str
    reader: str
    fence: str
    # Ranks that read from this rank.
    consumers: int = 1

    @property
    def name(self) -> str:
        """Goes in the place of the request id; vLLM adds the number of consumers."""
        return f"{self.request}|{self.reader}|{self.fence}"


def parse_notice(text: str) -> ReadNotice | None:
    """None for anything but a name and a number of consumers."""
    name, _, consumers = text.rpartition(":")
    parts = name.split("|")
    if len(parts) != 3 or not consumers.isascii() or not consumers.isdigit() or not 1 <= len(consumers) <= 4:
        return None
    request, reader, fence = parts
    return ReadNotice(request, reader, fence, int(consumers)) if int(consumers) else None


class ReadBook:
    """What this worker holds, under which fence, and who read it. Any thread may ask."""

    def __init__(self, max_readers: int = MAX_READERS) -> None:
        self._lock = threading.Lock()
        self._max_readers = max_readers
        self._fences: dict[str, str] = {}
        self._readers: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fences)

    def hold(self, request: str, fence: str) -> None:
        with self._lock:
            self._fences[request] = fence

    def forget(self, request: str) -> None:
        """Its blocks may be freed from now on."""
        with self._lock:
            self._fences.pop(request, None)

    def release(self, request: str) -> bool:
        """Nobody may read it any more. False if it is not held."""
        with self._lock:
            if request not in self._fences:
                return False
            self._note_reader(request, _RELEASED)
            return True

    def confirm(self, question: ReadQuestion) -> bool:
        """Whether this reader is the one, now or since before."""
        with self._lock:
            reader = self._readers.get(question.request)
            if reader is not None:
                return reader == question.reader
            if not question.fence or self._fences.get(question.request) != question.fence:
                return False
            self._note_reader(question.request, question.reader)
            return True

    def _note_reader(self, request: str, reader: str) -> None:
        self._readers[request] = reader
        while len(self._readers) > self._max_readers:
            self._readers.popitem(last=False)


class ConfirmationServer:
    """Answers questions from a book, on a thread of its own: the worker's own thread may be in a long step."""

    def __init__(self, book: ReadBook, host: str) -> None:
        self._book = book
        self._stopping = threading.Event()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        self._socket.setsockopt(zmq.RCVTIMEO, _POLL_MS)
        self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="read-confirmations", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                continue
            self._answer(frames)
        self._socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        try:
            question = decode_question(frames[-1])
        except ProtocolError as error:
            logger.warning("dropped a question about parked KV: %s", error)
            return
        answer = ReadAnswer(question.reader, self._book.confirm(question))
        try:
            self._socket.send_multipart([frames[0], msgspec.msgpack.encode(answer)], zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("a peer that asked about parked KV does not read its answers")


@dataclass(slots=True)
class _OpenQuestion:
    key: str
    # Addresses that have not answered.
    missing: set[str]
    deadline: float


class ConfirmationClient:
    """Asks holders about ended reads. One thread; nothing waits but `collect`, for a millisecond behind a question."""

    def __init__(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._open: dict[str, _OpenQuestion] = {}
        self._refused: set[str] = set()
        self._is_fresh = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def ask(self, key: str, question: ReadQuestion, addresses: Iterable[str]) -> None:
        """`key` comes back from `collect`. Every address must say yes."""
        missing = set(addresses)
        self._open[question.reader] = _OpenQuestion(key, missing, time.monotonic() + self._timeout_s)
        self._is_fresh = True
        data = msgspec.msgpack.encode(question)
        try:
            for address in missing:
                self._socket_to(address).send(data, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            logger.warning("cannot ask %s about a read: %s", sorted(missing), error)
            del self._open[question.reader]
            self._refused.add(key)

    def collect(self) -> tuple[set[str], set[str]]:
        """(confirmed, refused) keys since the previous call."""
        confirmed: set[str] = set()
        refused, self._refused = self._refused, set()
        until = time.monotonic() + (FIRST_WAIT_S if self._is_fresh else 0.0)
        self._is_fresh = False
        while self._open:
            for address in self._answering(until):
                self._read_answers(address, confirmed, refused)
            if time.monotonic() >= until:
                break
        now = time.monotonic()
        for reader in [reader for reader, asked in self._open.items() if now >= asked.deadline]:
            logger.warning("no answer about a read within %.1f s: its KV is not used", self._timeout_s)
            refused.add(self._open.pop(reader).key)
        return confirmed, refused

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()

    def _answering(self, until: float) -> list[str]:
        poller = zmq.Poller()
        addresses = {address for asked in self._open.values() for address in asked.missing}
        by_socket = {self._sockets[address]: address for address in addresses if address in self._sockets}
        for socket in by_socket:
            poller.register(socket, zmq.POLLIN)
        ready = poller.poll(math.ceil(max(0.0, until - time.monotonic()) * 1000))
        return [by_socket[socket] for socket, _ in ready]

    def _read_answers(self, address: str, confirmed: set[str], refused: set[str]) -> None:
        while True:
            try:
                answer = decode_answer(self._sockets[address].recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            except ProtocolError as error:
                logger.warning("dropped an answer of %s about a read: %s", address, error)
                continue
            self._note_answer(address, answer, confirmed, refused)

    def _note_answer(self, address: str, answer: ReadAnswer, confirmed: set[str], refused: set[str]) -> None:
        asked = self._open.get(answer.reader)
        if asked is None or address not in asked.missing:
            return
        asked.missing.discard(address)
        if not answer.is_good:
            refused.add(self._open.pop(answer.reader).key)
        elif not asked.missing:
            confirmed.add(self._open.pop(answer.reader).key)

    def _socket_to(self, address: str) -> zmq.Socket[bytes]:
        socket = self._sockets.get(address)
        if socket is None:
            self._drop_idle_sockets()
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                socket.close()
                raise
            self._sockets[address] = socket
        self._sockets.move_to_end(address)
        return socket

    def _drop_idle_sockets(self) -> None:
        busy = {address for asked in self._open.values() for address in asked.missing}
        for address in [address for address in self._sockets if address not in busy]:
            if len(self._sockets) < MAX_PEERS:
                return
            self._sockets.pop(address).close()

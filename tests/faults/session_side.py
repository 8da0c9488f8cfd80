"""One end of a KV transfer over a real medium: a Reader or a Writer with memory of its own, in this process or in one
that can be stopped and killed.

    python session_side.py reader|writer BACKEND    speaks JSON lines on stdin and stdout Control messages are the
product's own, handed from end to end by whoever holds both (`Side` here, `RemoteSide` for a process).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from pdcluster.core.errors import TransferError
from pdcluster.core.messages import Abort, AbortAck, Commit, CommitAck, Endpoint, Ticket
from pdcluster.transfer.backends.base import Peer, Region
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import LocalPages, Send, Settings
from pdcluster.transfer.protocol.writer import Writer

READER, WRITER = Peer("r", "r1"), Peer("w", "w1")
PAGE_TOKENS, PAGE_BYTES, NUM_PAGES = 16, 64 << 10, 1024
SETTINGS = Settings(chunk_bytes=2 << 20, window_bytes=16 << 20, commit_s=2.0, arrival_s=0.5)
POLL_S = 0.01

Control = Commit | CommitAck | Abort | AbortAck
_control = msgspec.msgpack.Decoder(Control)
_ticket = msgspec.msgpack.Decoder(Ticket)


class AnySide(Protocol):
    """Where it runs makes no difference."""

    def take(self) -> tuple[list[tuple[str, int]], list[Control]]: ...

    def handle(self, message: Control) -> None: ...

    def call(self, name: str, *arguments: Any) -> Any: ...

    def end(self) -> None: ...


class Side:
    """role: reader or writer. Commands are the methods that start with `do_`."""

    def __init__(self, role: str, backend: str) -> None:
        self.me = READER if role == "reader" else WRITER
        self.other = WRITER if role == "reader" else READER
        self._fd = os.memfd_create("pdcluster-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, NUM_PAGES * PAGE_BYTES)
        self.bytes = np.frombuffer(mmap.mmap(self._fd, NUM_PAGES * PAGE_BYTES), dtype=np.uint8)
        self.backend = create_backends(backend, self.me, host="127.0.0.1", staging_bytes=8 << 20)[backend]
        self.backend.register(Region(0, self.bytes.ctypes.data, self.bytes.nbytes, self._fd))
        local = LocalPages(0, PageShape.plain(PAGE_TOKENS, PAGE_BYTES), [memoryview(self.bytes)])
        common = {"local": local, "clock": time.monotonic, "settings": SETTINGS}
        media, self._tickets = {backend: self.backend}, {}
        if role == "reader":
            self.half: Reader | Writer = Reader(Endpoint("r", "r1", "127.0.0.1:1"), media, [backend], **common)
        else:
            self.half = Writer(self.me, media, [backend], **common)
            rng = np.random.default_rng(5)
            self.bytes[:] = rng.integers(0, 256, self.bytes.nbytes, dtype=np.uint8)

    def take(self) -> tuple[list[tuple[str, int]], list[Control]]:
        """What happened, as (event, nonce), and what it has to say to the other end."""
        if isinstance(self.half, Writer):
            self.backend.arrivals()  # clears the doorbell
        reports = self.half.poll()
        events = [(type(report).__name__, report.nonce) for report in reports if not isinstance(report, Send)]
        return events, [report.message for report in reports if isinstance(report, Send)]

    def handle(self, message: Control) -> None:
        self.half.handle(self.other, message)  # type: ignore[arg-type]

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, f"do_{name}")(*arguments)

    def do_open(self, pages: list[int], deadline_s: float) -> str:
        assert isinstance(self.half, Reader)
        writer = Endpoint(self.other.node, self.other.incarnation, "127.0.0.1:2")
        return msgspec.msgpack.encode(
            self.half.open("q", 0, writer, pages, len(pages) * PAGE_TOKENS, 0, deadline_s)
        ).hex()

    def do_accept(self, ticket: str) -> bool:
        """False: the ticket is refused."""
        assert isinstance(self.half, Writer)
        decoded = _ticket.decode(bytes.fromhex(ticket))
        try:
            self.half.open(decoded)
        except TransferError:
            return False
        return True

    def do_push(self, nonce: int, pages: list[int], first_page: int, is_last: bool) -> None:
        assert isinstance(self.half, Writer)
        self.half.push(nonce, pages, first_page * PAGE_TOKENS, len(pages) * PAGE_TOKENS)
        if is_last:
            self.half.finish(nonce, 42, None)

    def do_abort(self, nonce: int) -> None:
        self.half.abort(nonce, "the test ends it")

    def do_gone(self) -> None:
        self.half.peer_gone(self.other)

    def do_fill(self, pages: list[int], value: int) -> None:
        for page in pages:
            self.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = value

    def do_hash(self, pages: list[int]) -> str:
        state = hashlib.blake2b(digest_size=16)
        for page in pages:
            state.update(self.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        return state.hexdigest()

    def do_status(self) -> dict[str, Any]:
        quarantined = self.half.quarantined_pages if isinstance(self.half, Reader) else 0
        return {"idle": self.half.is_idle(), "quarantined": quarantined}

    def end(self) -> None:
        self.backend.shutdown()
        os.close(self._fd)


class RemoteSide:
    """A Side in a process of its own."""

    def __init__(self, role: str, backend: str) -> None:
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        argv = [sys.executable, __file__, role, backend]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=environment, text=True
        )
        self._replies: deque[Any] = deque()
        self._events: deque[tuple[str, int]] = deque()
        self._messages: deque[Control] = deque()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._wait_reply() == "ready"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            with self._news:
                self._events.extend((kind, nonce) for kind, nonce in said.get("events", ()))
                self._messages.extend(_control.decode(bytes.fromhex(data)) for data in said.get("messages", ()))
                if "reply" in said:
                    self._replies.append(said["reply"])
                self._news.notify_all()

    def _wait_reply(self) -> Any:
        with self._news:
            assert self._news.wait_for(lambda: self._replies, timeout=80), f"no reply; exit code {self.process.poll()}"
            return self._replies.popleft()

    def _say(self, **words: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it was killed on purpose

    def take(self) -> tuple[list[tuple[str, int]], list[Control]]:
        with self._news:
            events, messages = list(self._events), list(self._messages)
            self._events.clear()
            self._messages.clear()
        return events, messages

    def handle(self, message: Control) -> None:
        self._say(message=msgspec.msgpack.encode(message).hex())

    def call(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self._wait_reply()

    def tell(self, name: str, *arguments: Any) -> None:
        """Without waiting for the reply, which `_wait_reply` gets."""
        self._say(call=name, arguments=arguments)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._thread.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was said to the dead is lost


def serve(side: Side) -> None:
    """Answer commands on stdin until it closes; say what happened on stdout."""
    unread = b""
    say(reply="ready")
    while True:
        ready, _, _ = select.select([0, side.backend.wakeup_fd], [], [], POLL_S)
        if 0 in ready:
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                obey(side, json.loads(line))
        events, messages = side.take()
        if events or messages:
            say(events=events, messages=[msgspec.msgpack.encode(message).hex() for message in messages])


def obey(side: Side, order: dict[str, Any]) -> None:
    if "message" in order:
        side.handle(_control.decode(bytes.fromhex(order["message"])))
    else:
        say(reply=side.call(order["call"], *order["arguments"]))


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    serve(Side(sys.argv[1], sys.argv[2]))

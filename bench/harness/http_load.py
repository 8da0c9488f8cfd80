"""A raw HTTP/1.1 load client on uvloop, cheap enough to share a core with the servers it measures against: closed loop
or paced, whole or streamed.

Not a general client: one request body, keep-alive, answers framed by content-length or chunked.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import uvloop

HEAD_END = b"\r\n\r\n"
STREAM_END = b"\r\n0\r\n\r\n"
# Bytes of an answer that says its end itself.
UNKNOWN = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked over and over. token_mark: bytes that stand once in each token's event."""

    path: str
    body: bytes
    is_stream: bool = False
    token_mark: bytes = b'"text":'

    def request(self) -> bytes:
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
            f"{len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


@dataclass(slots=True)
class Outcome:
    """latencies: seconds of each answered request; num_tokens: events of streams; num_failed: answers that were not
    200, or did not come. all_answers, all_tokens: those too that came before the time that counts, and after it, of
    requests that were under way at its end: who divides by what the whole run cost counts all of it."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_failed: int = 0
    failure: bytes = b""
    all_answers: int = 0
    all_tokens: int = 0

    @property
    def requests_s(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.seconds

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class _Connection(asyncio.Protocol):
    """Sends the next request as soon as the last is answered, or when it is due; a request that was due before is late
    since then."""

    def __init__(self, ask: Ask, outcome: Outcome, gap_s: Callable[[], float] | None) -> None:
        self._ask, self._request, self._outcome, self._gap_s = ask, ask.request(), outcome, gap_s
        self._buffer = b""
        self._needed = 0
        self._began = self._due = 0.0
        self.is_stopping = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses
        self._due = time.perf_counter()
        self._send(self._due)

    def _send(self, began: float) -> None:
        self._buffer, self._needed, self._began = b"", 0, began
        self._transport.write(self._request)

    def _send_when_due(self) -> None:
        self._send(
            time.perf_counter()
        )  # timers of this loop keep to milliseconds: what they are late is no one's latency

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._needed:
            end = self._buffer.find(HEAD_END)
            if end < 0:
                return
            if not self._buffer.startswith(b"HTTP/1.1 200"):
                self._fail()
                return
            length = _content_length(self._buffer[:end])
            self._needed = UNKNOWN if length is None else end + len(HEAD_END) + length
        if self._needed == UNKNOWN:
            if self._buffer.endswith(STREAM_END):
                num_tokens = self._buffer.count(self._ask.token_mark) if self._ask.is_stream else 0
                self._outcome.num_tokens += num_tokens
                self._outcome.all_tokens += num_tokens
                self._answered()
        elif len(self._buffer) >= self._needed:
            self._answered()

    def _answered(self) -> None:
        now = time.perf_counter()
        self._outcome.latencies.append(now - self._began)
        self._outcome.all_answers += 1
        if self.is_stopping:
            self._end()
        elif self._gap_s is None:
            self._send(now)
        else:
            self._due += self._gap_s()
            if self._due > now:
                asyncio.get_running_loop().call_later(self._due - now, self._send_when_due)
            else:
                self._send(self._due)

    def _fail(self) -> None:
        self._outcome.num_failed += 1
        self._outcome.failure = self._buffer[:500]
        self._end()

    def _end(self) -> None:
        self._transport.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._buffer = b"the connection was closed behind: " + self._buffer
            self._fail()


def _content_length(head: bytes) -> int | None:
    """None: the answer is chunked."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding" and value.strip() == b"chunked":
            return None
    raise ValueError(f"the answer has neither a content-length nor chunks: {head[:200]!r}")


def load(address: str, ask: Ask, *, connections: int, seconds: float, interval_s: float = 0.0) -> Outcome:
    """interval_s 0: closed loop. Else requests of each connection are due at random times that far apart in the mean,
    whenever answers come.

    They are a Poisson process, the same in every run. Gaps counted from answers bring all connections into one beat,
    and the load into bursts.
    """
    return uvloop.run(_load(address, ask, connections, seconds, interval_s))


async def _load(address: str, ask: Ask, connections: int, seconds: float, interval_s: float) -> Outcome:
    host, _, port = address.rpartition(":")
    loop, outcome = asyncio.get_running_loop(), Outcome()
    opened: list[_Connection] = []
    gaps = random.Random(connections)
    gap_s = (lambda: gaps.expovariate(1 / interval_s)) if interval_s else None
    for _ in range(connections):
        _, protocol = await loop.create_connection(lambda: _Connection(ask, outcome, gap_s), host, int(port))
        opened.append(protocol)
        await asyncio.sleep(interval_s / connections)
    outcome.latencies.clear()
    outcome.num_tokens = 0
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    outcome.seconds = time.perf_counter() - began
    measured = Outcome(
        outcome.seconds, list(outcome.latencies), outcome.num_tokens, outcome.num_failed, outcome.failure
    )
    for connection in opened:
        connection.is_stopping = True
    async with asyncio.timeout(8):
        await asyncio.gather(*(connection.ended for connection in opened))
    measured.all_answers, measured.all_tokens = outcome.all_answers, outcome.all_tokens
    return measured

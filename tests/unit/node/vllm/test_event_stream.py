"""The socket of vLLM's KV events: order, gaps that vLLM fills, and gaps that it cannot fill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from pdcluster.core.errors import ProtocolError
from pdcluster.node.vllm.event_stream import EventStream
from pdcluster.node.vllm.events import BlockRemoved, CacheEvents

END = b"\xff" * 8


def payload(number: int) -> bytes:
    return msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}], 0])


class Publisher:
    """As vLLM's: numbered batches, and a replay of those that it kept."""

    def __init__(self, directory: Path) -> None:
        context = zmq.Context.instance()
        self.publisher, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.publisher.bind(f"ipc://{directory / 'kv'}")
        self.replay.bind(f"ipc://{directory / 'kv-replay'}")

    def send(self, number: int) -> None:
        self.publisher.send_multipart((b"", number.to_bytes(8, "big"), payload(number)))

    def answer(self, kept: list[int]) -> int:
        assert self.replay.poll(5000)
        client, empty, first = self.replay.recv_multipart()
        for number in kept:
            self.replay.send_multipart((client, empty, b"", number.to_bytes(8, "big"), payload(number)))
        self.replay.send_multipart((client, empty, b"", END, b""))
        return int.from_bytes(first, "big")

    def close(self) -> None:
        self.publisher.close(linger=0)
        self.replay.close(linger=0)


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def pair(tmp_path: Path, now: list[float]) -> Iterator[tuple[Publisher, EventStream]]:
    publisher = Publisher(tmp_path)
    stream = EventStream(tmp_path, lambda: now[0])
    deadline = time.monotonic() + 10
    while not stream.take():  # until the subscription is there
        assert time.monotonic() < deadline
        publisher.send(0)
        time.sleep(0.01)
    yield publisher, stream
    stream.close()
    publisher.close()


def numbers(batches: list[CacheEvents]) -> list[tuple[int | bytes, bool]]:
    found: list[tuple[int | bytes, bool]] = []
    for batch in batches:
        assert isinstance(batch.events[0], BlockRemoved)
        found.append((batch.events[0].block_hashes[0], batch.is_gap))
    return found


def wait_for(stream: EventStream, count: int) -> list[tuple[int | bytes, bool]]:
    found: list[CacheEvents] = []
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += stream.take()
        time.sleep(0.005)
    return numbers(found)


def test_batches_come_in_order_and_once(pair: tuple[Publisher, EventStream]) -> None:
    publisher, stream = pair
    for number in (1, 2, 2, 1, 3):
        publisher.send(number)
    assert wait_for(stream, 3) == [(1, False), (2, False), (3, False)]
    assert stream.next_deadline() is None


def test_a_gap_is_filled_while_later_batches_wait(pair: tuple[Publisher, EventStream]) -> None:
    publisher, stream = pair
    publisher.send(3)
    deadline = time.monotonic() + 10
    while stream.next_deadline() is None and time.monotonic() < deadline:
        assert stream.take() == []
    publisher.send(4)
    assert publisher.answer([1, 2, 3]) == 1
    assert wait_for(stream, 4) == [(1, False), (2, False), (3, False), (4, False)]
    assert stream.next_deadline() is None


def test_what_vllm_no_longer_has_is_marked(pair: tuple[Publisher, EventStream]) -> None:
    publisher, stream = pair
    publisher.send(5)
    while stream.next_deadline() is None:
        assert stream.take() == []
    publisher.answer([3, 4, 5])
    assert wait_for(stream, 3) == [(3, True), (4, False), (5, False)]


def test_a_replay_that_does_not_come_is_given_up(pair: tuple[Publisher, EventStream], now: list[float]) -> None:
    publisher, stream = pair
    publisher.send(5)
    while stream.next_deadline() is None:
        assert stream.take() == []
    now[0] += 1.9
    assert stream.take() == []
    now[0] += 0.2
    assert wait_for(stream, 1) == [(5, True)]


def test_other_frames_are_refused(pair: tuple[Publisher, EventStream]) -> None:
    publisher, stream = pair
    publisher.publisher.send_multipart((b"", b"x"))
    with pytest.raises(ProtocolError, match="2 frames"):
        for _ in range(1000):
            stream.take()
            time.sleep(0.005)

"""What ranks say to each other, where the other end is slow, gone, or was cut off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pdcluster.core.errors import ProtocolError
from pdcluster.node.native.tensor_parallel.channel import LENGTH, MAX_BYTES, RankChannel, frame
from pdcluster.node.native.tensor_parallel.endpoint import RankEndpoint
from pdcluster.node.native.tensor_parallel.messages import Digest, Mark

MESSAGE = Digest(7, bytes(range(200)))


@pytest.fixture
def ends() -> Iterator[tuple[RankChannel, RankChannel]]:
    near, far = socket.socketpair()
    with near, far:
        yield RankChannel(near, send_s=0.1), RankChannel(far, send_s=0.1)


def test_messages_come_whole_and_in_order_however_they_are_cut(ends: tuple[RankChannel, RankChannel]) -> None:
    near, far = ends
    for byte in frame(MESSAGE) + frame(Mark(8)):
        near.send(bytes([byte]))
    assert [far.receive(1.0), far.receive(1.0)] == [MESSAGE, Mark(8)]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, len(frame(MESSAGE)) - 1])
def test_the_end_of_the_other_end_within_a_message_is_its_end(
    ends: tuple[RankChannel, RankChannel], length: int
) -> None:
    near, far = ends
    near.send(frame(MESSAGE)[:length])
    near.shutdown()
    assert far.receive(1.0) is None


def test_an_endpoint_whose_node_died_while_it_said_something_ends_quietly(
    ends: tuple[RankChannel, RankChannel],
) -> None:
    near, far = ends
    endpoint = RankEndpoint(far, {}, memoryview(bytearray(8)))
    near.send(frame(MESSAGE)[:50])
    near.shutdown()
    endpoint.run()
    assert far.receive(1.0) is None, "it read to the end"


def test_what_is_no_message_is_told_from_an_end(ends: tuple[RankChannel, RankChannel]) -> None:
    near, far = ends
    near.send(LENGTH.pack(1) + b"\xc1")
    with pytest.raises(ProtocolError, match="not readable"):
        far.receive(1.0)
    near.send(LENGTH.pack(MAX_BYTES + 1))
    with pytest.raises(ProtocolError, match="different versions"):
        far.receive(1.0)


def test_who_takes_nothing_and_who_says_nothing_is_not_waited_for_for_ever(
    ends: tuple[RankChannel, RankChannel],
) -> None:
    near, far = ends
    with pytest.raises(TimeoutError):
        near.send(bytes(8 << 20))
    assert near.offer(memoryview(b"more")) == b"more"
    with pytest.raises(TimeoutError):
        near.receive(0.05)
    far.shutdown()
    with pytest.raises(BrokenPipeError):
        near.offer(memoryview(b"more"))


def test_what_is_offered_goes_on_where_it_stopped(ends: tuple[RankChannel, RankChannel]) -> None:
    near, far = ends
    large = Digest(1, bytes(4 << 20))
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(far.receive(10.0)))
    rest = near.offer(memoryview(frame(large)))
    assert 0 < len(rest) < len(frame(large))
    reading.start()
    while rest:
        rest = near.offer(rest)
    reading.join(10.0)
    assert found == [large]


def test_an_endpoint_whose_node_ends_before_it_has_its_answer_ends_quietly(
    ends: tuple[RankChannel, RankChannel],
) -> None:
    near, far = ends
    near.send(frame(Mark(8)))
    near.shutdown()  # the answer breaks the pipe
    RankEndpoint(far, {}, memoryview(bytearray(8))).run()
    assert far.receive(1.0) is None, "it read to the end"

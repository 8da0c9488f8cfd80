"""The socket of a calling link, with libzmq at the other end, or a peer that misbehaves. `test_links` has the rules of a
link."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from pdcluster.wire.curve import Gatekeeper
from pdcluster.wire.link_socket import LARGE_BYTES, MAX_WAITING_BYTES, LinkSocket
from pdcluster.wire.sockets import CLUSTER_KEY_BYTES, ConnectionEvent, WireSettings, derive_keys, open_router

Context = zmq.Context[zmq.Socket[bytes]]
SETTINGS = WireSettings(lease_s=20.0)
LOCKED = dataclasses.replace(SETTINGS, cluster_keys=(bytes(CLUSTER_KEY_BYTES),))
OTHER = dataclasses.replace(SETTINGS, cluster_keys=(b"1" * CLUSTER_KEY_BYTES,))


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


class Far:
    """A node's end: a bound ROUTER socket."""

    def __init__(self, context: Context, settings: WireSettings, listen: str = "127.0.0.1:0") -> None:
        keys = settings.cluster_keys
        self.gatekeeper = Gatekeeper(context, map(derive_keys, keys)) if keys else None
        self.socket, self.address = open_router(context, listen, settings)
        self.identity = b""

    def received(self) -> list[bytes]:
        frames = []
        while self.socket.poll(0):
            self.identity, frame = self.socket.recv_multipart()
            frames.append(frame)
        return frames

    def close(self) -> None:
        self.socket.close(0)
        if self.gatekeeper is not None:
            self.gatekeeper.close()


@pytest.fixture(params=[SETTINGS, LOCKED], ids=["plain", "curve"])
def settings(request: pytest.FixtureRequest) -> WireSettings:
    return request.param


@pytest.fixture
def far(other_context: Context, settings: WireSettings) -> Iterator[Far]:
    far = Far(other_context, settings)
    yield far
    far.close()


@pytest.fixture
def near(context: Context, far: Far, settings: WireSettings) -> Iterator[LinkSocket]:
    near = LinkSocket(context, far.address, settings)
    yield near
    near.close()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """It accepts connections and never sends a byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return address_of(server)


@pytest.mark.parametrize("size", [0, 1, 255, 256, LARGE_BYTES - 1, LARGE_BYTES, 5 << 20])
def test_frames_of_any_size_go_both_ways(far: Far, near: LinkSocket, size: int) -> None:
    sent = [(bytes(range(251)) * (size // 251 + 1))[:size], b"next"]
    assert all(near.send(frame) for frame in sent)  # before there is a connection
    received: list[bytes] = []
    until(lambda: received.extend(far.received()) or len(received) == 2)
    assert all(near.send(frame) for frame in sent)
    until(lambda: received.extend(far.received()) or len(received) == 4)
    assert received == sent * 2
    for frame in sent:
        far.socket.send_multipart((far.identity, frame))
    answers: list[bytes] = []
    until(lambda: ((frame := near.take()) is not None and answers.append(frame)) or len(answers) == 2)
    assert answers == sent and near.events() == [] and near.why == ""


def test_it_connects_again_until_somebody_listens(
    context: Context, other_context: Context, settings: WireSettings
) -> None:
    address = unused_address()
    near = LinkSocket(context, address, settings)
    near.send(b"sent before")
    events: list[ConnectionEvent] = []
    until(lambda: events.extend(near.events()) or events)
    assert set(events) == {ConnectionEvent.REFUSED} and "nobody accepts connections" in near.why
    far = Far(other_context, settings, address)
    received: list[bytes] = []
    until(lambda: received.extend(far.received()) or received)
    assert received == [b"sent before"]
    until(lambda: near.events() == [] and near.why == "")
    near.close()
    far.close()


def test_the_end_of_the_connection_is_an_event(near: LinkSocket, far: Far) -> None:
    near.send(b"hello")
    until(far.received)
    far.close()
    events: list[ConnectionEvent] = []
    until(lambda: events.extend(near.events()) or events)
    assert events[0] is ConnectionEvent.DOWN


def test_what_was_sent_last_arrives_after_close(near: LinkSocket, far: Far) -> None:
    """It is more than the kernel takes at once."""
    near.send(b"hello")
    received: list[bytes] = []
    until(lambda: received.extend(far.received()) or received)
    until(lambda: near.events() == [] and near._was_up)
    near.send(bytes(20 << 20))
    near.close()
    until(lambda: received.extend(far.received()) or len(received) == 2)
    assert len(received[1]) == 20 << 20


def test_a_peer_that_never_was_there_does_not_hold_up_the_end_of_the_process(settings: WireSettings) -> None:
    context: Context = zmq.Context()
    near = LinkSocket(context, unused_address(), settings)
    near.send(b"for nobody")
    near.close()
    began = time.monotonic()
    context.term()
    assert time.monotonic() - began < 10.0


def test_a_peer_that_does_not_read_gets_no_more_than_a_bound(
    context: Context, silent: socket.socket, settings: WireSettings
) -> None:
    near = LinkSocket(context, address_of(silent), settings)
    frame, num_sent = bytes(4 << 20), 0
    while near.send(frame):
        num_sent += 1
        assert num_sent < 100
    assert num_sent == MAX_WAITING_BYTES // len(frame)
    assert near.send(b"small frames are counted apart")
    near.close()


def test_there_is_room_again_once_the_peer_has_read(near: LinkSocket, far: Far) -> None:
    near.send(b"hello")
    until(far.received)
    num_sent = 0
    while near.send(bytes(1 << 20)):
        num_sent += 1
        assert num_sent < 1000
    received: list[bytes] = []
    until(lambda: received.extend(far.received()) or near.send(b"x" * LARGE_BYTES))
    until(lambda: received.extend(far.received()) or len(received) == num_sent + 1)


def test_small_frames_wait_up_to_the_high_water_mark(context: Context, silent: socket.socket) -> None:
    near = LinkSocket(context, address_of(silent), dataclasses.replace(SETTINGS, high_water=8))
    assert [near.send(b"small") for _ in range(20)].count(True) == 8
    near.close()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(SETTINGS, LOCKED), (LOCKED, SETTINGS), (LOCKED, OTHER)], ids=["none", "only ours", "another"]
)
def test_a_peer_with_another_cluster_key_is_named_as_such(
    context: Context, other_context: Context, ours: WireSettings, theirs: WireSettings
) -> None:
    far = Far(other_context, theirs)
    near = LinkSocket(context, far.address, ours)
    events: list[ConnectionEvent] = []
    until(lambda: events.extend(near.events()) or ConnectionEvent.DOWN in events)
    near.close()
    far.close()
    assert "cluster" in near.why and "key" in near.why


@pytest.mark.parametrize("ours", [SETTINGS, LOCKED], ids=["no key", "a key"])
def test_a_starved_peer_is_not_taken_for_one_with_another_cluster_key(
    context: Context, silent: socket.socket, ours: WireSettings
) -> None:
    """The kernel takes the connection, and the process does not get to say a word."""
    near = LinkSocket(context, address_of(silent), dataclasses.replace(ours, heartbeat_s=0.05, lease_s=0.2))
    events: list[ConnectionEvent] = []
    until(lambda: events.extend(near.events()) or ConnectionEvent.DOWN in events)
    assert "cluster key" not in near.why and "said nothing" in near.why
    near.close()


def test_a_connection_that_ends_early_did_not_fail_for_its_key_where_there_is_none(
    context: Context, silent: socket.socket
) -> None:
    near = LinkSocket(context, address_of(silent), SETTINGS)
    connection, _ = silent.accept()
    connection.close()
    events: list[ConnectionEvent] = []
    until(lambda: events.extend(near.events()) or ConnectionEvent.DOWN in events)
    assert "handshake failed" not in near.why and "ended before a word" in near.why
    near.close()


def test_a_peer_that_speaks_something_else_is_down(context: Context, silent: socket.socket) -> None:
    near = LinkSocket(context, address_of(silent), SETTINGS)
    connection, _ = silent.accept()
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
    connection.close()
    events: list[ConnectionEvent] = []
    until(lambda: events.extend(near.events()) or ConnectionEvent.DOWN in events)
    assert "handshake failed" in near.why and near.take() is None
    near.close()

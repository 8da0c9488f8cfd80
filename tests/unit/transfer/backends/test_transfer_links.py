"""Cursor over memory views, adverts, and the hello of links."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import PeerUnreachable, ProtocolError
from pdcluster.transfer.backends import tcp_links
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.backends.lane_hello import HELLO, MAGIC, PROOF_BYTES, REPLY
from pdcluster.transfer.backends.ledger import Counts
from pdcluster.transfer.backends.tcp_links import (
    BURST_BYTES,
    GATHER_BYTES,
    MAX_HALF_OPEN,
    MAX_VECTOR,
    UNPACED,
    Cursor,
    Link,
    Listener,
    TcpAdvert,
    connect,
    decode_advert,
    is_same_host,
    send_unpaced,
)
from pdcluster.transfer.layout.runs import span_table

ME, OTHER = Peer("p0", "a"), Peer("d0", "b")


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=100),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_a_cursor_hands_out_all_bytes_in_order(
    lengths_and_gaps: list[tuple[int, int]], most_bytes: int, choose: Random
) -> None:
    spans, end = [], 0
    for length, gap in lengths_and_gaps:
        spans.append((end + gap, length))
        end += gap + length
    choose.shuffle(spans)
    memory = memoryview(choose.randbytes(end))
    cursor, out = Cursor(memory, span_table(spans)), b""
    while not cursor.is_done:
        assert cursor.started == bool(out)
        head = b"".join(cursor.head(most_bytes))
        assert 0 < len(head) <= most_bytes
        assert cursor.head(most_bytes) == cursor.head(most_bytes)
        count = choose.randint(1, len(head))
        out += head[:count]
        cursor.advance(count)
    assert out == b"".join(memory[offset : offset + length] for offset, length in spans)


def test_a_cursor_fills_its_spans_and_nothing_beside_them() -> None:
    memory, spans = bytearray(1000), [(600, 300), (10, 90), (100, 50), (400, 1)]
    cursor, data = Cursor(memoryview(memory), span_table(spans)), bytes(range(1, 256)) * 2
    while not cursor.is_done:
        view = cursor.head(70)[0]
        view[:] = data[: len(view)]
        data = data[len(view) :]
        cursor.advance(len(view))
    wanted = bytearray(1000)
    data = bytes(range(1, 256)) * 2
    for offset, length in spans:
        wanted[offset : offset + length], data = data[:length], data[length:]
    assert memory == wanted


def test_a_cursor_of_no_spans_has_all_of_its_memory() -> None:
    cursor = Cursor(memoryview(b"header"))
    assert cursor.head() == [b"header"]
    cursor.advance(6)
    assert cursor.is_done
    assert Cursor(memoryview(b"")).is_done


def test_one_system_call_moves_a_bounded_number_of_bytes() -> None:
    big = memoryview(bytearray(3 * BURST_BYTES))
    assert (
        sum(len(piece) for piece in Cursor(big, span_table([(1, 100), (200, 2 * BURST_BYTES)])).head()) == BURST_BYTES
    )
    assert len(Cursor(big, span_table([(2 * at, 1) for at in range(500)])).head()) == MAX_VECTOR


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["host", 0, bytes(32)]),
        msgspec.msgpack.encode(["host", 70000, bytes(32)]),
        msgspec.msgpack.encode(["host", 80, bytes(31)]),
        msgspec.msgpack.encode({"host": 1}),
    ],
)
def test_a_bad_advert_is_refused(data: bytes) -> None:
    with pytest.raises(PeerUnreachable):
        decode_advert(data)


class Echo:
    """A listener that sends back four bytes."""

    def __init__(self, *, is_sealed: bool = False) -> None:
        self.counts = Counts()
        self.peers: list[Peer] = []
        self.listener = Listener(("127.0.0.1", 0), self.serve, self.counts, progress_s=5.0, is_sealed=is_sealed)
        self.advert = decode_advert(self.listener.advert())

    def serve(self, link: Link) -> None:
        self.peers.append(link.peer)
        while True:
            link.send(bytes(link.receive(4, idle=True)))


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_hello_with_the_token_gets_in_and_names_its_boot(is_sealed: bool) -> None:
    echo = Echo(is_sealed=is_sealed)
    link = connect(ME, OTHER, echo.advert, connect_s=5, progress_s=5, is_sealed=is_sealed)
    assert link.is_sealed is is_sealed
    link.send(b"ping")
    assert bytes(link.receive(4)) == b"ping" and echo.peers == [ME]
    assert echo.listener.is_serving()
    assert echo.listener.end_peer(ME)
    with pytest.raises(ConnectionResetError):
        link.receive(1)
    link.sock.close()
    echo.listener.close()
    echo.listener.close()


def test_a_wrong_token_stays_out_and_is_counted() -> None:
    echo = Echo()
    with pytest.raises(ProtocolError, match="does not know the token"):
        connect(ME, OTHER, TcpAdvert(echo.advert.host, echo.advert.port, bytes(32)), connect_s=5, progress_s=5)
    with socket.create_connection((echo.advert.host, echo.advert.port)) as sock:
        sock.sendall(HELLO.pack(MAGIC, bytes(32), False, 1, 1) + b"xy")
        assert len(sock.recv(REPLY.size)) == REPLY.size
        sock.sendall(bytes(PROOF_BYTES))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    echo.listener.close()
    assert echo.counts.by_reason["bad_frame"] == echo.counts.by_reason["link_ended"] == 1 and echo.peers == []


def test_a_reader_that_trickles_its_hello_holds_no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_links, "HELLO_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            near, _ = server.accept()
            with near, contextlib.suppress(OSError):
                while True:
                    near.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            connect(ME, OTHER, TcpAdvert(*server.getsockname(), bytes(32)), connect_s=5, progress_s=5)
        assert time.monotonic() - began < 15.0
        thread.join(15.0)


def test_a_hello_that_fails_in_an_unknown_way_costs_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    echo, make, left = Echo(), tcp_links.link_of, [1]

    def link_of(*arguments: object, **more: object) -> Link:
        if more["is_reader"] and left:
            left.pop()
            raise MemoryError
        return make(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(tcp_links, "link_of", link_of)
    lost = connect(ME, OTHER, echo.advert, connect_s=5, progress_s=5)
    with lost.sock, pytest.raises(OSError):
        lost.receive(1)
    link = connect(ME, OTHER, echo.advert, connect_s=5, progress_s=5)
    link.send(b"ping")
    assert bytes(link.receive(4)) == b"ping" and echo.counts.by_reason["failed_hello"] == 1
    link.sock.close()
    echo.listener.close()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_both_ends_want_the_same_seal(is_sealed: bool) -> None:
    echo = Echo(is_sealed=is_sealed)
    with pytest.raises(OSError):
        connect(ME, OTHER, echo.advert, connect_s=5, progress_s=5, is_sealed=not is_sealed)
    echo.listener.close()
    assert echo.counts.by_reason["bad_frame"] == 1 and echo.peers == []


def test_hellos_that_do_not_end_hold_neither_threads_nor_others() -> None:
    echo = Echo()
    before = threading.active_count()
    slow = [socket.create_connection((echo.advert.host, echo.advert.port)) for _ in range(3 * MAX_HALF_OPEN)]
    for sock in slow:
        sock.sendall(HELLO.pack(MAGIC, bytes(32), False, 1, 1))
    link = connect(ME, OTHER, echo.advert, connect_s=5, progress_s=5)
    link.send(b"ping")
    assert bytes(link.receive(4)) == b"ping"
    assert threading.active_count() == before + 1
    assert echo.counts.by_reason["too_many_hellos"] >= 2 * MAX_HALF_OPEN
    for sock in (link.sock, *slow):
        sock.close()
    echo.listener.close()


def test_hellos_of_a_stranger_end_before_one_of_another_address() -> None:
    """A member in the middle of its hello, and then many connections of a stranger, who has an address of its own."""
    echo = Echo()
    at = (echo.advert.host, echo.advert.port)
    member = socket.create_connection(at, source_address=("127.0.0.2", 0))
    member.sendall(HELLO.pack(MAGIC, bytes(32), False, 1, 1))
    strangers = [socket.create_connection(at, source_address=("127.0.0.3", 0)) for _ in range(3 * MAX_HALF_OPEN)]
    deadline = time.monotonic() + 10
    while echo.counts.by_reason["too_many_hellos"] <= 2 * MAX_HALF_OPEN and time.monotonic() < deadline:
        time.sleep(0.01)
    member.sendall(b"xy")
    member.settimeout(10)
    assert len(member.recv(REPLY.size)) == REPLY.size
    assert echo.counts.by_reason["too_many_hellos"] == 2 * MAX_HALF_OPEN + 1
    for sock in (member, *strangers):
        sock.close()
    echo.listener.close()


def test_a_hello_has_one_deadline_however_its_bytes_trickle_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_links, "HELLO_S", 0.3)
    echo = Echo()
    hello = HELLO.pack(MAGIC, bytes(32), False, 1, 1)
    with socket.create_connection((echo.advert.host, echo.advert.port)) as sock, pytest.raises(OSError):
        for byte in hello:
            sock.sendall(bytes([byte]))
            time.sleep(0.05)
    echo.listener.close()
    assert echo.counts.by_reason["late_hello"] == 1


def test_a_name_that_is_no_text_stays_out() -> None:
    echo = Echo()
    with socket.create_connection((echo.advert.host, echo.advert.port)) as sock:
        sock.sendall(HELLO.pack(MAGIC, bytes(32), False, 2, 1) + b"\xff\xfex")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    echo.listener.close()
    assert echo.counts.by_reason["bad_frame"] == 1


def test_a_name_too_long_for_the_hello_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ProtocolError, match="longer than 255"):
        advert = TcpAdvert(*server.getsockname(), bytes(32))
        connect(Peer("n" * 300, "a"), OTHER, advert, connect_s=1, progress_s=1)


def test_a_peer_that_is_silent_in_the_middle_times_out() -> None:
    accepted = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(accepted.getsockname())
    server, _ = accepted.accept()
    link = Link(server, OTHER, progress_s=0.05)
    client.send(b"ab")
    with pytest.raises(TimeoutError, match="no progress with d0"):
        link.receive(4)
    for sock in (accepted, client, server):
        sock.close()


def test_a_barrier_waits_for_the_thread_that_is_in_its_check() -> None:
    accepted = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(accepted.getsockname())
    link = Link(client, OTHER, progress_s=1.0)
    order: list[str] = []

    def mover() -> None:
        with link.lock:
            entered.set()
            time.sleep(0.05)
            order.append("moved")

    entered = threading.Event()
    thread = threading.Thread(target=mover)
    thread.start()
    entered.wait()
    link.barrier()
    order.append("fenced")
    thread.join()
    assert order == ["moved", "fenced"]
    client.close()
    accepted.close()


def test_few_bytes_are_taken_when_the_others_take_their_time_and_silence_ends_in_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        link = Link(near, Peer("p", "1"), 5.0)
        with near:
            far.sendall(b"few")
            link.gather(1 << 20, 5.0)
            assert near.recv(1 << 20) == b"few" and near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            with pytest.raises(TimeoutError):
                link.gather(1 << 20, 0.01)
            far.close()
            link.gather(1 << 20, 5.0)
            assert near.recv(1) == b"", "an end is news, too"


def test_after_a_payload_that_was_gathered_the_next_byte_is_news_to_every_poller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A medium that polls the socket by itself, as `staged` does, would otherwise wait for as many bytes as were last
    gathered."""
    monkeypatch.setattr(tcp_links, "GATHER_S", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        link = Link(near, Peer("p", "1"), 5.0)
        poller = select.poll()
        poller.register(near, select.POLLIN)
        for nbytes in (100, GATHER_BYTES):  # that come late, and those that are many
            sender = threading.Timer(0.05, far.sendall, [bytes(nbytes)])
            sender.start()
            assert link.receive(nbytes) == bytes(nbytes)
            sender.join()
            far.sendall(b"n")
            assert poller.poll(5000) and link.receive(1) == b"n"
        far.sendall(bytes(GATHER_BYTES))
        link.gather(GATHER_BYTES, 5.0)  # and read by the medium, as `tcp` does
        assert len(near.recv(GATHER_BYTES)) == GATHER_BYTES
        threading.Timer(0.05, far.sendall, [b"next"]).start()
        assert link.receive(4, idle=True) == b"next"
        near.close()


def test_a_connection_inside_of_a_host_is_not_paced() -> None:
    reader = Listener(("127.0.0.1", 0), lambda link: link.wait(select.POLLIN, 5.0), Counts(), progress_s=1.0)
    link = connect(ME, OTHER, decode_advert(reader.advert()), connect_s=1.0, progress_s=1.0)
    assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == UNPACED
    link.sock.close()
    reader.close()


@pytest.mark.parametrize(
    ("own", "peer", "same"),
    [
        ("127.0.0.1", "127.0.0.2", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("::1", "::1", True),
        ("10.0.0.5", "10.0.0.6", False),
    ],
)
def test_a_network_between_two_hosts_keeps_its_congestion_control(own: str, peer: str, same: bool) -> None:
    assert is_same_host(own, peer) is same


@pytest.mark.parametrize(
    "error", [PermissionError("not allowed here"), FileNotFoundError("not built"), OSError("no such option")]
)
def test_a_host_that_has_no_other_congestion_control_is_served_all_the_same(
    error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(socket.socket):
        def setsockopt(self, *options: object) -> None:
            raise error

    with Refusing() as sock, caplog.at_level("INFO"):
        send_unpaced(sock)
    assert "reno" in caplog.text and str(error) in caplog.text

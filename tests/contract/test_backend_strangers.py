"""What every transfer backend does with bytes of strangers, and with damaged frames: they are dropped and counted, and
others go on."""

from __future__ import annotations

import random
import socket
import threading

import msgspec
import pytest
from backend_ends import REAL, SEALED_NOTICES, Ends, eventually
from transfer_peer import READER, SEALED, WRITER

from pdcluster.transfer.backends import tcp_links
from pdcluster.transfer.backends.base import Backend, Peer, WriteStatus
from pdcluster.transfer.backends.tcp_links import Link
from pdcluster.transfer.layout.runs import span_table
from pdcluster.transfer.layout.spans import CopyRun


def address_of(backend: Backend) -> tuple[str, int]:
    host, port, _ = msgspec.msgpack.decode(backend.advert())
    return host, port


def stranger(backend: Backend, data: bytes) -> bytes:
    """Connect, send the data, and wait until the reader hangs up."""
    if backend.name == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(b"\0" + msgspec.msgpack.decode(backend.advert())[0])
    else:
        sock = socket.create_connection(address_of(backend))
    with sock:
        sock.settimeout(20)
        try:
            sock.send(data)
            return sock.recv(4096)
        except (ConnectionResetError, BrokenPipeError):
            return b""


def dial(ends: Ends, writer: Peer) -> Link:
    """A link after a good hello."""
    advert = tcp_links.decode_advert(ends.reader.advert())
    return tcp_links.connect(writer, READER, advert, connect_s=2, progress_s=20, is_sealed=ends.name == SEALED)


@pytest.mark.parametrize("name", REAL)
def test_garbage_on_the_socket_is_dropped_and_counted_and_others_go_on(name: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit()
    generator = random.Random(2)
    for size in (43, 44, 100, 1000):
        assert stranger(ends.reader, generator.randbytes(size)) == b""
    eventually(lambda: ends.reader.counters["bad_frame"] >= 4, "four bad hellos counted")
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    assert ends.target.bytes[:64].any()
    ends.close()


@pytest.mark.parametrize("name", REAL)
def test_a_connection_for_which_there_is_no_thread_is_dropped_and_counted_and_others_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when strangers have used up the threads that a process may have."""
    ends, start, left = Ends(name), threading.Thread.start, [1, 1]

    def start_but_two(thread: threading.Thread) -> None:
        if thread.name.startswith(("kv-receive", "kv-notices")) and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_two)
    for _ in range(2):
        if name == "shm":
            assert stranger(ends.reader, b"x" * 26) == b""
            continue
        link = dial(ends, Peer("x", "x1"))
        with link.sock, pytest.raises(OSError):
            link.receive(1)
    assert ends.reader.counters["accept_failed"] == 2
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.close()


def test_the_notices_of_staged_media_are_sealed_with_a_key() -> None:
    ends = Ends("mooncake" + SEALED_NOTICES)
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    with pytest.raises(OSError):
        dial(ends, Peer("x", "x1"))
    ends.close()


@pytest.mark.parametrize("name", REAL[1:])
@pytest.mark.parametrize("frame", ["random", "huge", "many runs", "not adding up"])
def test_a_bad_frame_after_a_good_hello_ends_that_connection_only(name: str, frame: str) -> None:
    from pdcluster.transfer.backends import tcp
    from pdcluster.transfer.backends.staged import staging

    ends = Ends(name)
    ends.connect()
    ends.permit()
    link = dial(ends, Peer("x", "x1"))
    if name not in ("tcp", SEALED):
        staging.read_grant(link)
    frames = {
        "tcp": {
            "random": random.Random(3).randbytes(200),
            "huge": tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 1 << 60),
            "many runs": tcp.FRAME.pack(tcp.WRITE_MAGIC, 1 << 31, 7, 0, 1, 0, 64),
            "not adding up": tcp_links.sealed(
                tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 64) + span_table([(0, 65)]).pack()
            ),
        },
        "staged": {
            "random": random.Random(3).randbytes(200),
            "huge": staging.NOTICE.pack(staging.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 1 << 60),
            "many runs": staging.NOTICE.pack(staging.NOTICE_MAGIC, 0, 1 << 31, 7, 0, 1, 0, 64, 64),
            "not adding up": tcp_links.sealed(
                staging.NOTICE.pack(staging.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 64) + span_table([(0, 65)]).pack()
            ),
        },
    }
    link.send(frames["tcp" if name in ("tcp", SEALED) else "staged"][frame])
    eventually(lambda: ends.reader.counters["bad_frame"] == 1, "the bad frame is counted")
    link.sock.close()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.close()


@pytest.mark.parametrize("name", REAL[1:])
def test_whichever_byte_of_a_frame_is_damaged_nothing_comes_of_it(name: str) -> None:
    """One that names another place under the same permit would spoil what landed there before."""
    from pdcluster.transfer.backends import tcp
    from pdcluster.transfer.backends.staged import staging

    ends = Ends(name)
    ends.connect()
    ends.permit()
    ends.target.bytes[:] = 7
    table = span_table([(128, 64)]).pack()
    if name in ("tcp", SEALED):
        good = tcp_links.sealed(tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 64) + table)
    else:
        good = tcp_links.sealed(staging.NOTICE.pack(staging.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 64) + table)
    for number in range(len(good)):
        link = dial(ends, WRITER)
        if name not in ("tcp", SEALED):
            staging.read_grant(link)
        link.send(good[:number] + bytes([good[number] ^ 1 << number % 8]) + good[number + 1 :] + bytes(64))
        with pytest.raises(OSError):  # it hung up, perhaps already
            link.sock.shutdown(socket.SHUT_WR)
            link.receive(1)
        link.sock.close()
    assert (ends.target.bytes == 7).all() and not ends.reader.arrivals()
    assert ends.reader.counters["bad_frame"] + ends.reader.counters["link_ended"] == len(good)
    ends.close()

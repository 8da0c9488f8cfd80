"""How transfers over every backend end: closes, restarts, and the other process killed or stopped where death
matters."""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from backend_ends import ENGINES, NBYTES, REAL, Ends, eventually, start
from standstill import stop_child
from transfer_memory import Memory
from transfer_peer import READER, WRITER

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import Fence, Peer, Permit, Stamp, WriteStatus
from pdcluster.transfer.backends.lane_hello import TOKEN_BYTES
from pdcluster.transfer.backends.shm import ShmBackend, ShmSettings
from pdcluster.transfer.backends.shm_frames import TOKEN_BYTES as SHM_TOKEN_BYTES
from pdcluster.transfer.backends.shm_frames import ShmAdvert as ShmAdvert
from pdcluster.transfer.backends.shm_frames import decode_advert as decode_shm_advert
from pdcluster.transfer.backends.tcp_links import TcpAdvert
from pdcluster.transfer.layout.spans import CopyRun

PEER_SCRIPT = Path(__file__).with_name("transfer_peer.py")


def test_close_ends_the_peers_writes(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    fence = ends.reader.close(WRITER)
    assert fence is (Fence.CANNOT_FENCE if ends.name == "shm" else Fence.FENCED), (
        "both ends are this process: it has not exited"
    )
    ends.target.bytes[:] = 0
    try:
        status = ends.result(ends.write(CopyRun(0, 0, 64)))
    except PeerUnreachable:
        status = WriteStatus.FAILED
    assert status in (WriteStatus.FAILED, WriteStatus.REFUSED, WriteStatus.LOST) or ends.name == "shm"
    assert ends.name == "shm" or not ends.target.bytes.any()


def test_a_boot_that_shut_down_is_fenced_while_its_process_lives_on(ends: Ends) -> None:
    """A node that loads other weights goes on as another boot, in one process."""
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.reader.close(WRITER)
    ends.writer.shutdown()
    eventually(lambda: ends.reader.close(WRITER) is Fence.FENCED, "the fence")


def test_a_writer_that_never_connected_is_fenced_by_refusing_what_it_holds() -> None:
    """It may only be late: with an advert of a newer ticket it is let in again."""
    ends = Ends("shm")
    old = ends.reader.advert()
    assert ends.reader.close(WRITER) is Fence.FENCED
    ends.permit()
    ends.writer.connect(READER, old)
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.FAILED
    assert not ends.target.bytes.any()
    eventually(lambda: writes_again(ends), "a newer advert lets it in")
    with pytest.raises(PeerUnreachable, match="older than its connection"):
        ends.writer.connect(READER, old)
    ends.close()


@pytest.mark.parametrize("closes", ["writer", "reader"])
def test_a_pair_connects_again_after_a_close_and_writes_as_before(ends: Ends, closes: str) -> None:
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.arrivals(
        1
    )  # the reader may hear later than the writer, and must not take it for the next write, of the same nonce
    if closes == "writer":
        ends.writer.close(READER)
    else:
        ends.reader.close(WRITER)
    ends.target.bytes[:] = 0
    ends.permit()  # a new ticket
    eventually(lambda: writes_again(ends), "writing works again")
    assert (ends.target.bytes == ends.source.bytes).all() and ends.arrivals(1)[-1].nbytes == NBYTES


def test_a_writer_closing_settles_its_unfinished_writes(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    handles = [ends.write(CopyRun(0, 0, NBYTES), chunk=chunk) for chunk in range(64)]
    ends.writer.close(READER)
    assert all(ends.result(handle) in (WriteStatus.DONE, WriteStatus.FAILED, WriteStatus.LOST) for handle in handles)


@pytest.mark.parametrize("name", REAL)
def test_a_reader_that_restarts_is_reached_by_its_new_advert(name: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    old = ends.reader.advert()
    ends.restart_reader()
    ends.permit()
    assert ends.reader.advert() != old
    eventually(lambda: writes_again(ends), "the new boot is reached")
    assert (ends.target.bytes == ends.source.bytes).all()
    ends.close()


def writes_again(ends: Ends) -> bool:
    try:
        ends.connect()
        return ends.result(ends.write(CopyRun(0, 0, NBYTES))) is WriteStatus.DONE
    except PeerUnreachable:
        return False


def descriptors() -> Counter[str]:
    """Open descriptors by kind, without those that an idle library of an earlier test may open or close meanwhile."""
    targets = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return Counter(target.split(":")[0].split("[")[0] for target in targets if not ENGINES or "socket" not in target)


@pytest.mark.parametrize("name", ["shm", "tcp"])  # Mooncake's own threads open and close sockets when they like
def test_shutdown_can_be_repeated_and_leaves_no_descriptor(name: str) -> None:
    use_once(name)
    gc.collect()
    before = descriptors()
    use_once(name)
    gc.collect()
    assert {kind: count for kind, count in descriptors().items() if count > before[kind]} == {}


def use_once(name: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.close()
    ends.writer.shutdown()
    ends.reader.shutdown()


# ---------------------------------------------------------------- deaths


class Other:
    """The other end in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER_SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
        )
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("name", REAL)
def test_a_writer_killed_in_the_middle_is_fenced_and_nothing_lands_afterwards(name: str) -> None:
    nbytes = 64 << 20
    memory, reader = Memory(nbytes), start(name, READER)
    reader.register(memory.region)
    reader.permit(Permit(7, WRITER, 0, ((0, nbytes),)))
    other = Other("writer", name, str(nbytes), reader.advert().hex())
    eventually(lambda: memory.bytes[0] == 0xAB, "the writer writes")
    if name == "shm":
        assert reader.close(WRITER) is Fence.CANNOT_FENCE, "the process is alive"
    other.end()
    eventually(lambda: reader.close(WRITER) is Fence.FENCED, "the fence")
    memory.bytes[:] = 0
    time.sleep(0.3)
    assert not memory.bytes.any()
    reader.shutdown()
    memory.drop()


@pytest.mark.parametrize("name", REAL)
def test_a_paused_writer_lands_nothing_after_the_fence(name: str) -> None:
    """SIGSTOP in the middle, fence, reuse of the memory, SIGCONT: the reused memory does not change."""
    nbytes = 64 << 20
    memory, reader = Memory(nbytes), start(name, READER)
    reader.register(memory.region)
    reader.permit(Permit(7, WRITER, 0, ((0, nbytes),)))
    other = Other("writer", name, str(nbytes), reader.advert().hex())
    eventually(lambda: memory.bytes[0] == 0xAB, "the writer writes")
    stop_child(other.process.pid)
    fence = reader.revoke(7)
    if fence is Fence.FENCED:
        memory.bytes[:] = 0
        other.signal(signal.SIGCONT)
        time.sleep(0.3)
        assert not memory.bytes.any()
    else:
        assert name == "shm" and reader.close(WRITER) is Fence.CANNOT_FENCE
        other.signal(signal.SIGCONT)
    other.end()
    reader.shutdown()
    memory.drop()


@pytest.mark.parametrize("name", REAL)
def test_a_reader_killed_in_the_middle_ends_every_write(name: str) -> None:
    nbytes = 64 << 20
    memory, writer = Memory(nbytes), start(name, WRITER)
    writer.register(memory.region)
    other = Other("reader", name, str(nbytes))
    writer.connect(READER, bytes.fromhex(other.said["advert"]))
    first = writer.write(READER, 0, 0, Stamp(7, 0, 1, 64), (CopyRun(0, 0, 64),))
    eventually(lambda: writer.poll(first) is WriteStatus.DONE, "the first write")
    stop_child(other.process.pid)
    chunk = 8 << 20
    handles = [
        writer.write(READER, 0, 0, Stamp(7, n, 1, chunk), (CopyRun(n * chunk, n * chunk, chunk),)) for n in range(8)
    ]
    time.sleep(0.05)
    other.end()
    left = set(handles)
    seen: list[WriteStatus] = []

    def all_settled() -> bool:
        for handle in list(left):
            status = writer.poll(handle)
            if status is not WriteStatus.PENDING:
                left.discard(handle)
                seen.append(status)
        return not left

    eventually(all_settled, "every write is settled")
    assert set(seen) <= {WriteStatus.DONE, WriteStatus.FAILED, WriteStatus.LOST}
    assert name == "shm" or WriteStatus.DONE not in seen
    writer.shutdown()
    memory.drop()


@pytest.mark.parametrize("name", REAL)
def test_a_reader_that_stands_still_keeps_no_write_to_another_from_its_end(name: str) -> None:
    """Its process is stopped with a window of writes on their way to it; those to the other reader all end meanwhile,
    and it is still stopped."""
    nbytes, chunk = 64 << 20, 8 << 20
    stuck, peer = Other("reader", name, str(nbytes)), Peer("living", "l1")
    source, target = Memory(nbytes), Memory(nbytes)
    source.bytes[:] = 7
    writer, reader = start(name, WRITER), start(name, READER)
    writer.register(source.region)
    reader.register(target.region)
    reader.permit(Permit(9, WRITER, 0, ((0, nbytes),)))
    writer.connect(READER, bytes.fromhex(stuck.said["advert"]))
    first = writer.write(READER, 0, 0, Stamp(7, 0, 1, 64), (CopyRun(0, 0, 64),))
    eventually(lambda: writer.poll(first) is WriteStatus.DONE, "the first write")
    stop_child(stuck.process.pid)
    held = [
        writer.write(READER, 0, 0, Stamp(7, n, 1, chunk), (CopyRun(n * chunk, n * chunk, chunk),)) for n in range(8)
    ]
    writer.connect(peer, reader.advert())
    handles = {
        writer.write(peer, 0, 0, Stamp(9, n, 1, chunk), (CopyRun(n * chunk, n * chunk, chunk),)) for n in range(8)
    }

    def all_done() -> bool:
        handles.difference_update([each for each in handles if writer.poll(each) is WriteStatus.DONE])
        return not handles

    eventually(all_done, "the writes to the living one")
    assert (target.bytes == 7).all()
    assert name == "shm" or all(writer.poll(each) is WriteStatus.PENDING for each in held[-2:]), "the others still wait"
    stuck.end()
    writer.shutdown()
    reader.shutdown()
    source.drop()
    target.drop()


def test_a_write_over_a_new_connection_goes_to_its_own_mapping_and_not_where_the_old_one_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends("shm")
    assert isinstance(ends.writer, ShmBackend)
    monkeypatch.setattr(ends.writer, "_settings", ShmSettings(retry_s=0.0))
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.reader.close(WRITER)
    (mover,) = ends.writer._movers.values()
    mover.thread.join(10.0)
    with mmap.mmap(-1, NBYTES) as foreign:  # lies where the old mapping was, if the kernel gives that place out again
        ends.permit()
        assert ends.result(ends.write(CopyRun(64, 64, 64))) is WriteStatus.DONE
        assert bytes(ends.target.bytes[64:128]) == bytes(ends.source.bytes[64:128]) and not any(foreign[:128])
    ends.close()


# ---------------------------------------------------------------- what is logged of an end


@pytest.mark.parametrize("name", ["shm", "tcp", "mooncake"])
def test_a_reader_that_goes_while_nothing_is_under_way_is_no_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pdcluster.transfer")
    ends = Ends(name)
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.reader.shutdown()
    eventually(lambda: "is over" in caplog.text, "the writer sees that the reader is gone")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    ends.close()


@pytest.mark.parametrize("name", ["shm", "tcp", "mooncake"])
def test_a_connection_that_never_came_about_is_a_warning_even_before_there_is_a_write(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A write asked for a moment later ends as FAILED and has nothing else to say why."""
    ends = Ends(name)
    if name == "shm":
        advert: TcpAdvert | ShmAdvert = ShmAdvert(
            decode_shm_advert(ends.reader.advert()).socket, bytes(SHM_TOKEN_BYTES)
        )
    else:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            advert = TcpAdvert("127.0.0.1", gone.getsockname()[1], bytes(TOKEN_BYTES))
    ends.writer.connect(READER, msgspec.msgpack.encode(advert))
    eventually(
        lambda: any(record.levelno == logging.WARNING and "is over" in record.message for record in caplog.records),
        "a warning",
    )
    ends.close()


@pytest.mark.parametrize("name", ["tcp", "mooncake"])  # shm connects before it takes writes
def test_a_write_that_an_end_costs_is_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends(name)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it answers nobody, so that the write is there when it ends
        advert = TcpAdvert("127.0.0.1", silent.getsockname()[1], bytes(TOKEN_BYTES))
        ends.writer.connect(READER, msgspec.msgpack.encode(advert))
        handle = ends.write(CopyRun(0, 0, 64))
    assert ends.result(handle) is WriteStatus.FAILED
    eventually(
        lambda: any(record.levelno == logging.WARNING and "is over" in record.message for record in caplog.records),
        "a warning",
    )
    ends.close()


@pytest.mark.parametrize("name", REAL)
def test_a_peer_for_which_there_is_no_thread_is_unreachable_and_nothing_of_the_try_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when strangers have used up the threads that this process may have; a ticket then goes by another medium, or
    is refused."""
    ends, start_thread, refused = Ends(name), threading.Thread.start, []

    def start_but_movers(thread: threading.Thread) -> None:
        if (
            thread.name in (f"kv-copy-{READER.node}", f"kv-send-{READER.node}", f"kv-{name}-{READER.node}")
            and len(refused) < 3
        ):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_movers)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(PeerUnreachable, match="thread"):
            ends.connect()
    assert len(refused) == 3
    eventually(
        lambda: len(os.listdir("/proc/self/fd")) == before, "no descriptor is left, when the reader saw them close, too"
    )
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(CopyRun(0, 0, 64))) is WriteStatus.DONE
    ends.close()

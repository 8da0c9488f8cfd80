"""What every transfer backend must do, run over all of them: real threads and sockets, and a second process where death matters."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from standstill import stop_child
from transfer_memory import Memory
from transfer_peer import READER, WRITER

from pdcluster.config import set_library_environment
from pdcluster.errors import IntegrityError, PeerUnreachable
from pdcluster.transfer.base import Backend, Fence, Handle, Peer, Permit, Run, Stamp, WriteStatus
from pdcluster.transfer.choose import create_backends
from pdcluster.transfer.fake import FakeBackend, FakeNetwork
from pdcluster.transfer.mooncake import MooncakeEngine, environment
from pdcluster.transfer.nixl import PACKAGES, NixlEngine
from pdcluster.transfer.nixl import environment as nixl_environment
from pdcluster.transfer.runs import span_table
from pdcluster.transfer.staged import StagedBackend
from pdcluster.transfer.staging import Engine, StagedSettings

NBYTES = 1 << 20
HAS_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
REAL = ("shm", "tcp", "mooncake", pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the package nixl-cu12 is not installed")))
CHECKS_PERMITS = (*REAL[1:], "fake")
PEER_SCRIPT = Path(__file__).with_name("transfer_peer.py")


def eventually(condition: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


class Ends:
    """A writer's and a reader's backend in this process, each with a region of NBYTES."""

    def __init__(self, name: str, nbytes: int = NBYTES) -> None:
        self.name = name
        network = FakeNetwork(time.monotonic)
        self._create: Callable[[Peer], Backend] = (lambda peer: FakeBackend(network, peer)) if name == "fake" else (lambda peer: start(name, peer))
        self.source, self.target = Memory(nbytes), Memory(nbytes)
        self.source.bytes[:] = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8)
        self.writer, self.reader = self._create(WRITER), self._create(READER)
        self.writer.register(self.source.region)
        self.reader.register(self.target.region)
        self.trial = itertools.count(1)

    def connect(self) -> None:
        self.writer.connect(READER, self.reader.advert())

    def permit(self, *ranges: tuple[int, int], nonce: int = 7, writer: Peer = WRITER) -> None:
        self.reader.permit(Permit(nonce, writer, 0, ranges if ranges else ((0, self.target.region.nbytes),)))

    def write(self, *runs: Run, nonce: int = 7, chunk: int = 0, region: int = 0) -> Handle:
        stamp = Stamp(nonce, chunk, next(self.trial), sum(run.nbytes for run in runs))
        return self.writer.write(READER, 0, region, stamp, runs)

    def result(self, handle: Handle) -> WriteStatus:
        status = WriteStatus.PENDING

        def is_final() -> bool:
            nonlocal status
            status = self.writer.poll(handle)
            return status not in (WriteStatus.PENDING, WriteStatus.UNKNOWN)

        eventually(is_final, "an answer to the write")
        return status

    def arrivals(self, count: int) -> list[Stamp]:
        stamps: list[Stamp] = []

        def all_here() -> bool:
            stamps.extend(arrival.stamp for arrival in self.reader.arrivals())
            return len(stamps) >= count

        eventually(all_here, f"{count} arrivals")
        return stamps

    def restart_reader(self) -> None:
        self.reader.shutdown()
        self.reader = self._create(READER)
        self.reader.register(self.target.region)

    def close(self) -> None:
        self.writer.shutdown()
        self.reader.shutdown()
        self.source.drop()
        self.target.drop()


ENGINES: dict[tuple[str, Peer], Engine] = {}
"""Libraries take seconds to start and to end; in this process each end uses the same one all the time."""


def start(name: str, peer: Peer) -> Backend:
    if name not in ("mooncake", "nixl"):
        return create_backends(name, peer, host="127.0.0.1", staging_bytes=8 << 20)[name]
    settings = StagedSettings(block_bytes=1 << 20, blocks=8)
    set_library_environment((environment if name == "mooncake" else nixl_environment)(settings))
    if (name, peer) not in ENGINES:
        ENGINES[name, peer] = MooncakeEngine(settings) if name == "mooncake" else NixlEngine(peer)
    return StagedBackend(peer, name, ENGINES[name, peer], settings, owns_engine=False)


@pytest.fixture(scope="module", autouse=True)
def _close_engines() -> Iterator[None]:
    yield
    while ENGINES:
        ENGINES.popitem()[1].close()


@pytest.fixture(params=[*REAL, "fake"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()


# ---------------------------------------------------------------- moving bytes


def test_bytes_arrive_exactly_where_they_were_sent_and_nowhere_else(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    runs = (Run(0, 4096, 100), Run(5000, 0, 1), Run(200_000, 300_001, 123_457))
    assert ends.result(ends.write(*runs)) is WriteStatus.DONE
    (stamp,) = ends.arrivals(1)
    assert (stamp.nonce, stamp.chunk, stamp.nbytes) == (7, 0, 123_558)
    expected = np.zeros(NBYTES, dtype=np.uint8)
    for run in runs:
        expected[run.target : run.target + run.nbytes] = ends.source.bytes[run.source : run.source + run.nbytes]
    assert (ends.target.bytes == expected).all()


def test_a_done_write_says_how_long_it_took(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    begin = time.monotonic()
    handle = ends.write(Run(0, 0, NBYTES))
    assert ends.result(handle) is WriteStatus.DONE
    duration = ends.writer.take_duration(handle)
    assert duration is not None and 0 < duration <= time.monotonic() - begin
    assert ends.writer.take_duration(handle) is None


def test_many_small_runs_arrive(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    order = random.Random(1).sample(range(NBYTES // 256), 1500)
    runs = tuple(Run(page * 256, (NBYTES // 256 - 1 - page) * 256, 256) for page in order)
    assert ends.result(ends.write(*runs)) is WriteStatus.DONE
    for run in runs:
        assert (ends.target.bytes[run.target : run.target + 256] == ends.source.bytes[run.source : run.source + 256]).all()


@pytest.mark.parametrize("name", [*REAL, "fake"])
def test_big_writes_arrive(name: str) -> None:
    ends = Ends(name, 96 << 20)
    ends.connect()
    ends.permit()
    half = 48 << 20
    handles = [ends.write(Run(0, half, half), chunk=0), ends.write(Run(half, 0, half), chunk=1)]
    assert [ends.result(handle) for handle in handles] == [WriteStatus.DONE] * 2
    assert sorted(stamp.chunk for stamp in ends.arrivals(2)) == [0, 1]
    assert (ends.target.bytes[half:] == ends.source.bytes[:half]).all() and (ends.target.bytes[:half] == ends.source.bytes[half:]).all()
    ends.close()


def test_many_writes_in_flight_all_arrive_once(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    handles = [ends.write(Run(page * 4096, page * 4096, 4096), chunk=page) for page in range(NBYTES // 4096)]
    assert {ends.result(handle) for handle in handles} == {WriteStatus.DONE}
    assert sorted(stamp.chunk for stamp in ends.arrivals(len(handles))) == list(range(len(handles)))
    assert (ends.target.bytes == ends.source.bytes).all()
    assert ends.reader.arrivals() == []


def test_an_arrival_is_told_only_after_its_payload(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    for value in range(40):
        ends.source.bytes[:] = value
        handle = ends.write(Run(0, 0, NBYTES))
        ends.arrivals(1)
        assert (ends.target.bytes == value).all()
        assert ends.result(handle) is WriteStatus.DONE


def test_the_doorbell_rings_for_arrivals_and_for_answers_and_stops_when_they_are_taken(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    handle = ends.write(Run(0, 0, 64))
    if ends.name != "fake":  # the fake moves only inside calls
        for backend in (ends.reader, ends.writer):
            assert select.select([backend.wakeup_fd], [], [], 30)[0]
    assert ends.result(handle) is WriteStatus.DONE
    ends.arrivals(1)
    for backend in (ends.reader, ends.writer):
        backend.arrivals()
        assert not select.select([backend.wakeup_fd], [], [], 0)[0]


# ---------------------------------------------------------------- what is not allowed


@pytest.mark.parametrize("name", CHECKS_PERMITS)
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown nonce", "unknown_nonce"),
        ("revoked nonce", "unknown_nonce"),
        ("outside its pages", "outside_permit"),
        ("another writer's nonce", "wrong_writer"),
        ("unknown region", "outside_region"),
        ("outside the region", "outside_region"),
    ],
)
def test_a_write_without_a_permit_changes_nothing_and_is_counted(name: str, case: str, reason: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit((4096, 4096), writer=Peer("other", "o1") if case == "another writer's nonce" else WRITER)
    if case == "revoked nonce":
        assert ends.reader.revoke(7) is Fence.FENCED
    run = {"outside its pages": Run(0, 4000, 4096), "outside the region": Run(0, NBYTES - 8, 4096)}.get(case, Run(0, 4096, 4096))
    handle = ends.write(run, nonce=8 if case == "unknown nonce" else 7, region=3 if case == "unknown region" else 0)
    assert ends.result(handle) is WriteStatus.REFUSED
    assert ends.reader.arrivals() == [] and not ends.target.bytes.any() and ends.reader.counters[reason] >= 1
    ends.permit()
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE, "the connection goes on"
    ends.close()


def test_shm_refuses_targets_outside_the_region_at_the_writer_and_drops_stamps_nobody_asked_for() -> None:
    ends = Ends("shm")
    ends.connect()
    assert ends.result(ends.write(Run(0, NBYTES - 8, 4096))) is WriteStatus.FAILED
    assert ends.result(ends.write(Run(0, 0, 64), region=3)) is WriteStatus.FAILED
    ends.result(ends.write(Run(0, 0, 64), nonce=8))
    eventually(lambda: ends.reader.counters["unknown_nonce"], "the drop is counted")
    assert ends.reader.arrivals() == []
    assert ends.reader.revoke(7) is Fence.CANNOT_FENCE
    ends.close()


def test_a_source_outside_the_region_is_our_own_mistake(ends: Ends) -> None:
    if ends.name == "fake":
        pytest.skip("the fake trusts its test")
    ends.connect()
    for run in (Run(NBYTES - 8, 0, 64), Run(-8, 0, 64)):
        with pytest.raises(IntegrityError):
            ends.write(run)


def test_writing_to_a_peer_that_was_not_connected_is_refused(ends: Ends) -> None:
    with pytest.raises(PeerUnreachable, match="call connect first"):
        ends.write(Run(0, 0, 64))


def test_an_advert_that_is_no_advert_is_refused(ends: Ends) -> None:
    with pytest.raises(PeerUnreachable):
        ends.writer.connect(READER, b"\xff\xfe what")


@pytest.mark.parametrize("run_bytes", [32 << 20, 4096])
def test_a_revoke_in_the_middle_of_a_stream_of_writes_stops_it_at_once(run_bytes: int) -> None:
    """FENCED means now: what is in memory when `revoke` returns stays."""
    for name in ("tcp", "mooncake", *(["nixl"] if HAS_NIXL else [])):
        ends = Ends(name, 32 << 20)
        ends.connect()
        ends.permit()
        runs = [Run(offset, offset, run_bytes) for offset in range(0, 32 << 20, run_bytes)]
        handles = [ends.write(*runs, chunk=chunk) for chunk in range(4)]
        eventually(lambda ends=ends: ends.target.bytes[:4096].any(), "the first bytes")
        assert ends.reader.revoke(7) is Fence.FENCED
        ends.target.bytes[:] = 0
        results = [ends.result(handle) for handle in handles]
        assert not ends.target.bytes.any()
        assert results[-1] is WriteStatus.REFUSED
        ends.close()


# ---------------------------------------------------------------- strangers on the socket


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


@pytest.mark.parametrize("name", REAL)
def test_garbage_on_the_socket_is_dropped_and_counted_and_others_go_on(name: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit()
    generator = random.Random(2)
    for size in (1, 26, 100, 1000):
        data = generator.randbytes(max(size, 26))
        assert stranger(ends.reader, data) == b""
    eventually(lambda: ends.reader.counters["bad_frame"] >= 4, "four bad hellos counted")
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE
    assert ends.target.bytes[:64].any()
    ends.close()


@pytest.mark.parametrize("name", REAL[1:])
@pytest.mark.parametrize("frame", ["random", "huge", "many runs", "not adding up"])
def test_a_bad_frame_after_a_good_hello_ends_that_connection_only(name: str, frame: str) -> None:
    from pdcluster.transfer import links, staged, tcp

    ends = Ends(name)
    ends.connect()
    ends.permit()
    link = links.connect(Peer("x", "x1"), READER, links.decode_advert(ends.reader.advert()), connect_s=2, progress_s=20)
    if name != "tcp":
        staged._read_grant(link)
    frames = {
        "tcp": {
            "random": random.Random(3).randbytes(200),
            "huge": tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 1 << 60),
            "many runs": tcp.FRAME.pack(tcp.WRITE_MAGIC, 1 << 31, 7, 0, 1, 0, 64),
            "not adding up": links.sealed(tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 64) + span_table([(0, 65)]).pack()),
        },
        "staged": {
            "random": random.Random(3).randbytes(200),
            "huge": staged.NOTICE.pack(staged.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 1 << 60),
            "many runs": staged.NOTICE.pack(staged.NOTICE_MAGIC, 0, 1 << 31, 7, 0, 1, 0, 64, 64),
            "not adding up": links.sealed(staged.NOTICE.pack(staged.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 64) + span_table([(0, 65)]).pack()),
        },
    }
    link.send(frames["tcp" if name == "tcp" else "staged"][frame])
    eventually(lambda: ends.reader.counters["bad_frame"] == 1, "the bad frame is counted")
    link.sock.close()
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE
    ends.close()


@pytest.mark.parametrize("name", REAL[1:])
def test_whichever_byte_of_a_frame_is_damaged_nothing_comes_of_it(name: str) -> None:
    """One that names another place under the same permit would spoil what landed there before."""
    from pdcluster.transfer import links, staged, tcp

    ends = Ends(name)
    ends.connect()
    ends.permit()
    ends.target.bytes[:] = 7
    table = span_table([(128, 64)]).pack()
    if name == "tcp":
        good = links.sealed(tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 64) + table)
    else:
        good = links.sealed(staged.NOTICE.pack(staged.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 64) + table)
    for number in range(len(good)):
        link = links.connect(WRITER, READER, links.decode_advert(ends.reader.advert()), connect_s=2, progress_s=20)
        if name != "tcp":
            staged._read_grant(link)
        link.send(good[:number] + bytes([good[number] ^ 1 << number % 8]) + good[number + 1 :] + bytes(64))
        with pytest.raises(OSError):  # it hung up, perhaps already
            link.sock.shutdown(socket.SHUT_WR)
            link.receive(1)
        link.sock.close()
    assert (ends.target.bytes == 7).all() and not ends.reader.arrivals()
    assert ends.reader.counters["bad_frame"] + ends.reader.counters["link_ended"] == len(good)
    ends.close()


# ---------------------------------------------------------------- endings


def test_close_ends_the_peers_writes(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE
    fence = ends.reader.close(WRITER)
    assert fence is (Fence.CANNOT_FENCE if ends.name == "shm" else Fence.FENCED), "both ends are this process: it has not exited"
    ends.target.bytes[:] = 0
    try:
        status = ends.result(ends.write(Run(0, 0, 64)))
    except PeerUnreachable:
        status = WriteStatus.FAILED
    assert status in (WriteStatus.FAILED, WriteStatus.REFUSED, WriteStatus.LOST) or ends.name == "shm"
    assert ends.name == "shm" or not ends.target.bytes.any()


def test_a_writer_that_never_connected_is_fenced_by_refusing_what_it_holds() -> None:
    """It may only be late: with an advert of a newer ticket it is let in again."""
    ends = Ends("shm")
    old = ends.reader.advert()
    assert ends.reader.close(WRITER) is Fence.FENCED
    ends.permit()
    ends.writer.connect(READER, old)
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.FAILED
    assert not ends.target.bytes.any()
    eventually(lambda: writes_again(ends), "a newer advert lets it in")
    with pytest.raises(PeerUnreachable, match="older than its connection"):
        ends.writer.connect(READER, old)
    ends.close()


@pytest.mark.parametrize("closes", ["writer", "reader"])
def test_a_pair_connects_again_after_a_close_and_writes_as_before(ends: Ends, closes: str) -> None:
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE
    if closes == "writer":
        ends.writer.close(READER)
    else:
        ends.reader.close(WRITER)
    ends.reader.arrivals()
    ends.target.bytes[:] = 0
    ends.permit()  # a new ticket
    eventually(lambda: writes_again(ends), "writing works again")
    assert (ends.target.bytes == ends.source.bytes).all() and ends.arrivals(1)[-1].nbytes == NBYTES


def test_a_writer_closing_settles_its_unfinished_writes(ends: Ends) -> None:
    ends.connect()
    ends.permit()
    handles = [ends.write(Run(0, 0, NBYTES), chunk=chunk) for chunk in range(64)]
    ends.writer.close(READER)
    assert all(ends.result(handle) in (WriteStatus.DONE, WriteStatus.FAILED, WriteStatus.LOST) for handle in handles)


@pytest.mark.parametrize("name", REAL)
def test_a_reader_that_restarts_is_reached_by_its_new_advert(name: str) -> None:
    ends = Ends(name)
    ends.connect()
    ends.permit()
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE
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
        return ends.result(ends.write(Run(0, 0, NBYTES))) is WriteStatus.DONE
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
    assert ends.result(ends.write(Run(0, 0, 64))) is WriteStatus.DONE
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
    first = writer.write(READER, 0, 0, Stamp(7, 0, 1, 64), (Run(0, 0, 64),))
    eventually(lambda: writer.poll(first) is WriteStatus.DONE, "the first write")
    stop_child(other.process.pid)
    chunk = 8 << 20
    handles = [writer.write(READER, 0, 0, Stamp(7, n, 1, chunk), (Run(n * chunk, n * chunk, chunk),)) for n in range(8)]
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
    """Its process is stopped with a window of writes on their way to it; those to the other reader all end meanwhile, and it is still stopped."""
    nbytes, chunk = 64 << 20, 8 << 20
    stuck, peer = Other("reader", name, str(nbytes)), Peer("living", "l1")
    source, target = Memory(nbytes), Memory(nbytes)
    source.bytes[:] = 7
    writer, reader = start(name, WRITER), start(name, READER)
    writer.register(source.region)
    reader.register(target.region)
    reader.permit(Permit(9, WRITER, 0, ((0, nbytes),)))
    writer.connect(READER, bytes.fromhex(stuck.said["advert"]))
    first = writer.write(READER, 0, 0, Stamp(7, 0, 1, 64), (Run(0, 0, 64),))
    eventually(lambda: writer.poll(first) is WriteStatus.DONE, "the first write")
    stop_child(stuck.process.pid)
    held = [writer.write(READER, 0, 0, Stamp(7, n, 1, chunk), (Run(n * chunk, n * chunk, chunk),)) for n in range(8)]
    writer.connect(peer, reader.advert())
    handles = {writer.write(peer, 0, 0, Stamp(9, n, 1, chunk), (Run(n * chunk, n * chunk, chunk),)) for n in range(8)}

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

"""The traps of Mooncake's transfer engine, each with what keeps us out of it. `Library` is the library's API with states by script, `Unreliable` an
engine of the same seam whose writes may stay unknown and land later.

Elsewhere: a real receiver is stopped until the real library answers −1, and resumes (tests/faults/test_paused.py, full suite): what it says ended
reads its source no more; bytes, deaths,
garbage on the sockets, thousands of runs in one chunk (tests/contract). Not tested here, and why: `*_on_cuda` (exits the process on failure),
copies of device memory on its I/O thread, RDMA keys that leak when a process is killed, addresses of an unreachable card: they need hardware; no
such call is made, and device memory is refused (node.server.check). The queue that stays wedged for a minute after an overflow appears in some
trials only: what is tested is that no batch can get near its limit.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.errors import ConfigError, PeerUnreachable, ProtocolError
from pdcluster.transfer import staged, staged_frames, staged_pieces
from pdcluster.transfer.base import Handle, Peer, Permit, Region, Run, Stamp, WriteStatus
from pdcluster.transfer.links import Link, sealed
from pdcluster.transfer.mooncake import ALTERING, QUEUE_LIMIT, MooncakeEngine, check_release, environment
from pdcluster.transfer.staged import StagedBackend
from pdcluster.transfer.staged_frames import MAX_BLOCKS
from pdcluster.transfer.staging import Fabric, StagedSettings

WRITER, READER = Peer("w", "w1"), Peer("r", "r1")
BLOCK, BLOCKS, FLYING = 4096, 4, 3
UNKNOWN_S = 5.0
LANE_QUEUE = 1024
"""Entries that a lane of the library takes before it fails all of them, by default."""


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)


# ---------------------------------------------------------------- the library's calls


class Library:
    """TransferEngine as far as we use it; every other call is an error. calls: their names in order."""

    states: dict[int, int]

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: tuple[str, ...] = ()
        self.states = {}

    def initialize(self, *arguments: str) -> int:
        self.asked = arguments
        return 0

    def get_rpc_port(self) -> int:
        return 15428

    def register_memory(self, address: int, nbytes: int) -> int:
        return -1 if nbytes > 1 << 40 else 0

    def transfer_submit_write(self, *arguments: object) -> int:
        self.calls.append("transfer_submit_write")
        return len(self.calls)

    def transfer_check_status(self, batch: int) -> int:
        self.calls.append("transfer_check_status")
        return self.states[batch]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=lambda: library))  # type: ignore[arg-type]
    return library


@pytest.mark.parametrize("state", [-1, -2, -7, 2, 99])
def test_a_negative_or_strange_state_never_means_failed_and_only_the_last_word_on_a_write_lets_its_source_go(library: Library, state: int) -> None:
    """-1: it ended, but may still land. Anything else: nothing is known, and it may be asked for again."""
    engine = MooncakeEngine(StagedSettings())
    library.states = {1: 1, 2: 0, 3: state}
    found = WriteStatus.LOST if state == -1 else WriteStatus.UNKNOWN
    assert [engine.check(batch) for batch in (1, 2, 3)] == [WriteStatus.DONE, WriteStatus.PENDING, found]


def test_over_rdma_sources_would_have_to_be_registered_so_they_are_gathered(library: Library) -> None:
    assert MooncakeEngine(StagedSettings()).reads_anywhere
    assert not MooncakeEngine(StagedSettings(fabric=Fabric(("mlx5_0",)))).reads_anywhere


def test_only_the_calls_that_neither_block_nor_spin_are_made(library: Library) -> None:
    engine = MooncakeEngine(StagedSettings())
    batch = engine.submit("far", 0, 0, 4096)
    assert batch is not None
    library.states = {batch: 1}
    engine.check(batch)
    assert library.calls == ["transfer_submit_write", "transfer_check_status"]


def test_the_session_is_named_by_the_rpc_port_that_the_library_took(library: Library) -> None:
    engine = MooncakeEngine(StagedSettings(host="10.0.0.5"))
    assert library.asked == ("10.0.0.5", "P2PHANDSHAKE", "tcp", "")
    assert engine.session == "10.0.0.5:15428" == engine.meet(engine.grant(0, 4096))


def test_named_devices_ask_for_rdma(library: Library) -> None:
    MooncakeEngine(StagedSettings(fabric=Fabric(("mlx5_0", "mlx5_1"))))
    assert library.asked[2:] == ("rdma", "mlx5_0,mlx5_1")


def test_memory_that_the_library_does_not_take_is_an_error(library: Library) -> None:
    with pytest.raises(OSError, match="could not register"):
        MooncakeEngine(StagedSettings()).register(0, 1 << 60)


def test_a_library_that_is_missing_or_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("0.3.12", "0.3.7.post2", "0.2"):
        with pytest.raises(ConfigError, match=f"needs release 0.3.13 or newer of .*, {release} is installed"):
            check_release(release)
    for release in ("0.3.13.post1", "0.4.0", "1.0", ""):
        check_release(release)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="install pdcluster"):
        MooncakeEngine(StagedSettings())


@pytest.mark.parametrize("name", ALTERING)
def test_a_library_whose_answers_would_mean_something_else_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name} is set; unset it"):
        MooncakeEngine(StagedSettings())


def test_two_real_engines_of_one_host_have_sessions_of_their_own_that_answer() -> None:
    engines = [MooncakeEngine(StagedSettings()) for _ in range(2)]
    assert len({engine.session for engine in engines}) == 2
    for engine in engines:
        host, port = engine.session.split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        engine.close()


@given(unknown_s=st.floats(0.1, 600), progress_s=st.floats(0.1, 600))
def test_the_source_is_let_go_before_a_write_counts_as_unknown(unknown_s: float, progress_s: float) -> None:
    """A write that made no progress ends before its transfer times out; both must be at least a second apart."""
    found = environment(StagedSettings(unknown_s=unknown_s, progress_s=progress_s))
    assert 1 <= int(found["MC_TCP_PROGRESS_TIMEOUT_SEC"]) == int(found["MC_TCP_STATUS_TIMEOUT_SEC"]) < int(found["MC_TRANSFER_TIMEOUT"])
    assert int(found["MC_TRANSFER_TIMEOUT"]) >= 5, "the library takes no less"


def test_lanes_are_kept_their_address_is_ours_and_their_queues_hold_more_than_we_can_send() -> None:
    found = environment(StagedSettings(host="10.0.0.5"))
    assert found["MC_FORCE_TCP"] == found["MC_TCP_ENABLE_CONNECTION_POOL"] == "1" and found["MC_TCP_BIND_ADDRESS"] == "10.0.0.5"
    assert int(found["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]) == QUEUE_LIMIT > LANE_QUEUE >= 2 * MAX_BLOCKS


# ---------------------------------------------------------------- writes of unknown outcome


class Unreliable:
    """An engine in this process. unknown: the writes, counted from 0, that get no definite answer; `land` copies them then, from what their source
    holds by that time. lost: those that end so. most: writes under way at once."""

    needs_calls = False
    reads_anywhere = False

    def __init__(self, unknown: Callable[[int], bool] = lambda _: False) -> None:
        self.unknown = unknown
        self.lost: Callable[[int], bool] = lambda _: False
        self.ended: set[int] = set()
        self.lock = threading.Lock()
        self.writes: list[tuple[int, int, int]] = []
        self.under_way: set[int] = set()
        self.most = 0
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def unregister(self, address: int, nbytes: int) -> None:
        self.registered.pop(address)

    def grant(self, address: int, nbytes: int) -> bytes:
        return b"here"

    def meet(self, grant: bytes) -> str:
        return grant.decode()

    def part(self, far: str) -> None:
        """Nothing is kept."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        with self.lock:
            self.writes.append((source, target, nbytes))
            self.under_way.add(len(self.writes))
            self.most = max(self.most, len(self.under_way))
            return len(self.writes)

    def check(self, batch: int) -> WriteStatus:
        assert batch not in self.ended, "the library forgot it with its last word"
        self.under_way.discard(batch)
        if self.unknown(batch - 1):
            return WriteStatus.UNKNOWN
        self.ended.add(batch)
        if self.lost(batch - 1):
            return WriteStatus.LOST
        self.land(batch - 1)
        return WriteStatus.DONE

    def land(self, number: int) -> None:
        source, target, nbytes = self.writes[number]
        ctypes.memmove(target, source, nbytes)

    def expect(self) -> None:
        """It has nothing to call."""

    def close(self) -> None:
        """It has no threads."""


class Slow(Unreliable):
    """Answers nothing before it `may_answer`. looks: how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = False
        self.looks = 0

    def check(self, batch: int) -> WriteStatus:
        self.looks += 1
        return super().check(batch) if self.may_answer else WriteStatus.PENDING


class Straight(Unreliable):
    """One that sends from the pages themselves."""

    reads_anywhere = True


class SlowStraight(Slow):
    reads_anywhere = True


class Breaking(SlowStraight):
    """Its third write is an error."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        if len(self.writes) == 2:
            raise OSError("the library is out of memory")
        return super().submit(far, source, target, nbytes)


class Ends:
    def __init__(self, engine: Unreliable) -> None:
        self.engine = engine
        settings = StagedSettings(block_bytes=BLOCK, blocks=BLOCKS, flying=FLYING, retry_s=0.01, unknown_s=UNKNOWN_S)
        self.source, self.target = (np.zeros(64 * BLOCK, dtype=np.uint8) for _ in range(2))
        self.source[:] = np.random.default_rng(1).integers(1, 256, self.source.nbytes)
        self.writer, self.reader = (StagedBackend(peer, "mooncake", engine, settings, owns_engine=False) for peer in (WRITER, READER))
        self.writer.register(Region(0, self.source.ctypes.data, self.source.nbytes))
        self.reader.register(Region(0, self.target.ctypes.data, self.target.nbytes))
        self.reader.permit(Permit(7, WRITER, 0, ((0, self.target.nbytes),)))
        self.writer.connect(READER, self.reader.advert())

    def write(self, chunk: int, first: int, blocks: int) -> WriteStatus:
        """Blocks [first, first + blocks), to where they are at the source."""
        nbytes = blocks * BLOCK
        stamp, runs = Stamp(7, chunk, 1, nbytes), (Run(first * BLOCK, first * BLOCK, nbytes),)
        return self.result(self.writer.write(READER, 0, 0, stamp, runs))

    def result(self, handle: Handle) -> WriteStatus:
        found = [WriteStatus.PENDING]

        def is_final() -> bool:
            found[0] = self.writer.poll(handle)
            return found[0] is not WriteStatus.PENDING

        eventually(is_final, "an answer")
        return found[0]

    def close(self) -> None:
        self.writer.shutdown()
        self.reader.shutdown()


@pytest.fixture
def make_ends() -> Iterator[Callable[[Unreliable], Ends]]:
    made: list[Ends] = []

    def make(engine: Unreliable) -> Ends:
        made.append(Ends(engine))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


def test_a_write_of_unknown_outcome_that_lands_late_reaches_no_page_and_its_block_is_not_used_again(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Unreliable(unknown=lambda number: number == 0)
    ends = make_ends(engine)
    assert ends.write(0, 0, 1) is WriteStatus.FAILED, "for the pages it is definite: they were not touched and can not be"
    lost = engine.writes[0]
    for chunk in range(1, 13):
        assert ends.write(chunk, chunk, 1) is WriteStatus.DONE
    assert lost[0] not in {source for source, _, _ in engine.writes[1:]}, "its source block stays as it was: the library may still read it"
    assert lost[1] not in {target for _, target, _ in engine.writes[1:]}, "its target block too: the library may still write it"
    before = ends.target.copy()
    engine.land(0)
    assert (ends.target == before).all() and not ends.target[:BLOCK].any()


def test_when_every_block_is_unknown_a_new_connection_gets_new_ones_and_the_old_memory_stays_mapped(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Unreliable(unknown=lambda number: number < BLOCKS)
    ends = make_ends(engine)
    assert [ends.write(chunk, chunk, 1) for chunk in range(BLOCKS)] == [WriteStatus.FAILED] * BLOCKS
    engine.unknown = lambda _: False

    def works() -> bool:
        try:
            return ends.write(9, 9, 1) is WriteStatus.DONE
        except PeerUnreachable:
            return False

    eventually(works, "a new connection")
    for number in range(BLOCKS):
        engine.land(number)  # would crash if the memory were gone
    assert (ends.target[9 * BLOCK : 10 * BLOCK] == ends.source[9 * BLOCK : 10 * BLOCK]).all() and not ends.target[: BLOCKS * BLOCK].any()


def test_only_staging_blocks_are_ever_registered_or_named_to_the_library(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Unreliable()
    ends = make_ends(engine)
    assert ends.write(0, 0, 16) is WriteStatus.DONE
    pools = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in (ends.source, ends.target)]
    addresses = [*engine.registered, *(address for write in engine.writes for address in write[:2])]
    assert addresses and not any(low <= address < high for address in addresses for low, high in pools)


def test_never_more_writes_are_under_way_than_a_ring_has_blocks(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Unreliable()
    ends = make_ends(engine)
    stamps = [Stamp(7, chunk, 1, 16 * BLOCK) for chunk in range(40)]
    handles = [ends.writer.write(READER, 0, 0, stamp, (Run(0, 0, stamp.nbytes),)) for stamp in stamps]
    assert {ends.result(handle) for handle in handles} == {WriteStatus.DONE}
    assert 0 < engine.most <= BLOCKS and len(engine.writes) == 40 * 16


def test_the_library_has_only_a_few_writes_at_a_time_although_blocks_are_free(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Slow()
    ends = make_ends(engine)
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 16 * BLOCK), (Run(0, 0, 16 * BLOCK),))
    eventually(lambda: len(engine.writes) == FLYING, "as many as it may have")
    looks = engine.looks
    eventually(lambda: engine.looks > looks + 20 * FLYING, "turns of the pump that could have submitted more")
    assert len(engine.writes) == FLYING
    engine.may_answer = True
    assert ends.result(handle) is WriteStatus.DONE and engine.most == FLYING
    assert (ends.target[: 16 * BLOCK] == ends.source[: 16 * BLOCK]).all()


# ---------------------------------------------------------------- writes straight from the pages


def test_straight_writes_name_only_their_own_bytes_as_sources_and_register_and_target_only_blocks(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Straight()
    ends = make_ends(engine)
    assert ends.write(0, 3, 6) is WriteStatus.DONE
    address = ends.source.ctypes.data
    assert sorted((source - address, nbytes) for source, _, nbytes in engine.writes) == [(n * BLOCK, BLOCK) for n in range(3, 9)]
    pools = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in (ends.source, ends.target)]
    assert not any(low <= at < high for at in [*engine.registered, *(target for _, target, _ in engine.writes)] for low, high in pools)
    assert (ends.target[3 * BLOCK : 9 * BLOCK] == ends.source[3 * BLOCK : 9 * BLOCK]).all()


def test_short_runs_are_gathered_and_long_ones_are_not(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Straight()
    ends = make_ends(engine)
    half = BLOCK // 2
    runs = (Run(0, 0, half), Run(4 * half, half, half), Run(8 * half, 2 * half, half), Run(9 * half, 3 * half, half))
    assert ends.result(ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 2 * BLOCK), runs)) is WriteStatus.DONE
    (gathered, _, first), (straight, _, second) = engine.writes
    low, high = ends.source.ctypes.data, ends.source.ctypes.data + ends.source.nbytes
    assert not low <= gathered < high and straight == low + 4 * BLOCK and first == second == BLOCK
    assert bytes(ends.target[: 2 * BLOCK]) == b"".join(bytes(ends.source[run.source : run.source + run.nbytes]) for run in runs)


def test_pages_of_a_write_of_unknown_outcome_stay_with_it_until_the_library_says_that_it_ended(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Straight(unknown=lambda number: number == 0)
    ends = make_ends(engine)
    ends.writer._reads._unknown_s = 0.05
    stamp = Stamp(7, 0, 1, BLOCK)
    handle = ends.writer.write(READER, 0, 0, stamp, (Run(0, 0, BLOCK),))
    assert ends.result(handle) is WriteStatus.UNKNOWN
    for chunk in range(1, 13):
        assert ends.write(chunk, chunk, 1) is WriteStatus.DONE, "others go on meanwhile"
    assert ends.writer.poll(handle) is WriteStatus.UNKNOWN, "no timer frees its pages"
    assert engine.writes[0][1] not in {target for _, target, _ in engine.writes[1:]}, "its block is not used again"
    ends.writer.close(READER)
    assert ends.writer.poll(handle) is WriteStatus.UNKNOWN, "nor does the end of the connection: the library has its own"
    before = ends.target.copy()
    ends.source[:BLOCK] = 0xEE  # as if the page had been given to another request after all
    engine.land(0)
    assert (ends.target == before).all(), "even then it reaches no page"
    engine.lost, engine.unknown = lambda _: True, lambda _: False
    assert ends.writer.poll(handle) is WriteStatus.FAILED


def test_what_ended_at_this_end_fails_at_once_although_it_may_still_land(make_ends: Callable[[Unreliable], Ends]) -> None:
    engine = Straight()
    engine.lost = lambda number: number == 0
    ends = make_ends(engine)
    assert ends.write(0, 0, 1) is WriteStatus.FAILED
    assert [ends.write(chunk, chunk, 1) for chunk in range(1, 9)] == [WriteStatus.DONE] * 8
    assert engine.writes[0][1] not in {target for _, target, _ in engine.writes[1:]}, "its block is not used again"
    before = ends.target.copy()
    engine.land(0)
    assert (ends.target == before).all() and not ends.target[:BLOCK].any()


@pytest.mark.parametrize("ends_by", ["close", "shutdown"])
def test_a_connection_that_ends_frees_no_page_that_the_library_may_still_read(make_ends: Callable[[Unreliable], Ends], ends_by: str) -> None:
    engine = SlowStraight()
    ends = make_ends(engine)
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, 16 * BLOCK), (Run(0, 0, 16 * BLOCK),))
    eventually(lambda: len(engine.writes) == FLYING, "the library has some")
    if ends_by == "close":
        ends.writer.close(READER)
    else:
        ends.writer.shutdown()
    eventually(lambda: len(ends.writer._reads) == 1, "its pump let go of it")
    assert ends.writer.poll(handle) is WriteStatus.PENDING
    engine.may_answer = True
    assert ends.result(handle) is WriteStatus.FAILED and len(engine.writes) == FLYING
    assert not ends.target.any() and not len(ends.writer._reads)


@pytest.mark.parametrize("is_last", [True, False])
def test_an_error_of_the_library_in_the_middle_of_a_piece_frees_no_page_that_it_may_still_read(
    make_ends: Callable[[Unreliable], Ends], monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """The second piece has two entries, of which the library took one. is_last: of the write's pieces, so that nothing of it waits any more."""
    half = BLOCK // 2
    monkeypatch.setattr(staged_pieces, "ENTRY_BYTES", half)
    engine = Breaking()
    ends = make_ends(engine)
    runs = [Run(0, 0, BLOCK), Run(2 * BLOCK, BLOCK, half), Run(4 * BLOCK, BLOCK + half, half)]
    runs += [] if is_last else [Run(6 * BLOCK, 2 * BLOCK, BLOCK)]
    handle = ends.writer.write(READER, 0, 0, Stamp(7, 0, 1, sum(run.nbytes for run in runs)), runs)
    eventually(lambda: len(ends.writer._reads) == 1, "its pump let go of it")
    engine.may_answer = True
    assert ends.result(handle) is WriteStatus.FAILED
    assert engine.ended == {1, 2}, "it was final before the library ended all that it had"


def test_a_reader_that_answers_nonsense_ends_the_write_all_the_same(make_ends: Callable[[Unreliable], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "ANSWER_MAGIC", b"KVx1")
    assert make_ends(Straight()).write(0, 0, 1) is WriteStatus.LOST


@contextmanager
def answered(data: bytes) -> Iterator[Link]:
    """A link of a writer to a reader that says this."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        with ours:
            theirs.sendall(data)
            yield Link(ours, READER, 1.0)


@pytest.mark.parametrize(
    ("blocks", "block_bytes"), [(0, 4096), (MAX_BLOCKS + 1, 4096), (1 << 31, 4096), (8, 1 << 40), (8, 0), (8, 1), (1 << 62, 1 << 62), (512, 64 << 20)]
)
def test_a_ring_of_an_absurd_shape_is_refused_before_anything_is_allocated(blocks: int, block_bytes: int) -> None:
    grant = msgspec.msgpack.encode(staged_frames.Grant(b"far", 0, block_bytes, blocks))
    with answered(sealed(staged_frames.LENGTH.pack(len(grant)) + grant)) as link, pytest.raises(ProtocolError, match="a ring of"):
        staged_frames.read_grant(link)


@pytest.mark.parametrize("grant", [b"", b"\xc1", b"\x94\xc4\x01a\xff\x00\x00", msgspec.msgpack.encode((b"far", -(1 << 62), "8", 8))])
def test_a_grant_that_is_none_is_refused(grant: bytes) -> None:
    with answered(sealed(staged_frames.LENGTH.pack(len(grant)) + grant)) as link, pytest.raises(ProtocolError):
        staged_frames.read_grant(link)


def test_a_grant_of_an_absurd_length_is_refused_before_it_is_read() -> None:
    with answered(staged_frames.LENGTH.pack((1 << 32) - 1)) as link, pytest.raises(ProtocolError, match="a grant of 4294967295 bytes"):
        staged_frames.read_grant(link)

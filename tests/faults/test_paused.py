"""A stopped process wakes up in the middle of what it did, minutes later perhaps: what was given to others meanwhile
must not change."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from session_pair import Pair
from session_side import NUM_PAGES, PAGE_BYTES
from standstill import stop_child

from pdcluster.settings.config import set_library_environment
from pdcluster.transfer.backends.base import WriteStatus
from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine, environment
from pdcluster.transfer.backends.staged.staging import StagedSettings
from pdcluster.transfer.backends.tcp import TcpSettings

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]

# Target pages of a transfer that is done, and of the one that is interrupted.
LIVE, TORN = list(range(100)), list(range(200, 1000))
PAUSE_S = TcpSettings().progress_s


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    backend, remote = request.param
    pair = Pair(backend, remote)
    yield pair
    pair.end()


def start_torn(pair: Pair, deadline_s: float) -> int:
    """A transfer of 50 MiB under way, beside one that is done."""
    pair.transfer(list(range(100)), LIVE)
    nonce, ticket = pair.open(TORN, deadline_s)
    assert pair.writer.call("accept", ticket)
    return nonce


@pytest.mark.parametrize("pair", [("shm", "writer")], indirect=True, ids=["shm"])
def test_a_writer_stopped_in_the_middle_of_a_copy_keeps_its_pages_until_it_says_that_it_stopped(pair: Pair) -> None:
    nonce = start_torn(pair, deadline_s=1.0)
    live = pair.local.do_hash(LIVE)
    last = pair.local.bytes[(TORN[-1] + 1) * PAGE_BYTES - 1 : (TORN[-1] + 1) * PAGE_BYTES]
    last[:] = 0
    first = pair.local.bytes[TORN[0] * PAGE_BYTES : TORN[0] * PAGE_BYTES + 64]
    first[:] = 0
    pair.remote.tell("push", nonce, list(range(len(TORN))), 0, True)
    deadline = time.monotonic() + 20
    while not first.any():
        assert time.monotonic() < deadline, "the copy never began"
    stop_child(pair.remote.process.pid)
    pair.silent = True
    time.sleep(0.1)
    changed = [bool(pair.local.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].any()) for page in TORN]
    assert changed[0] and not changed[-1], "it stopped in the middle"

    pair.until(lambda: pair.has("Failed", nonce=nonce), "the ticket's deadline")
    pair.local.do_gone()
    pair.run(1.5)
    assert pair.local.do_status()["quarantined"] == len(TORN), (
        "a stopped process may still write: no timer frees its pages"
    )
    assert not pair.has("Reclaimed", nonce=nonce)

    pair.silent = False
    pair.remote.signal(signal.SIGCONT)
    pair.until(lambda: pair.has("Reclaimed", nonce=nonce), "the writer says that it stopped")
    pair.local.do_fill(TORN, 0xDD)
    reused = pair.local.do_hash(TORN)
    pair.run(1.0)
    assert pair.local.do_hash(TORN) == reused and pair.local.do_hash(LIVE) == live, "no live page changes"
    assert pair.local.do_status() == {"idle": True, "quarantined": 0}


@pytest.mark.parametrize("pair", [("shm", "writer")], indirect=True, ids=["shm"])
def test_a_stopped_writer_that_is_killed_is_fenced_by_its_end(pair: Pair) -> None:
    nonce = start_torn(pair, deadline_s=1.0)
    pair.remote.tell("push", nonce, list(range(len(TORN))), 0, False)
    stop_child(pair.remote.process.pid)
    pair.silent = True
    pair.until(lambda: pair.has("Failed", nonce=nonce), "the ticket's deadline")
    pair.local.do_gone()
    pair.run(0.5)
    assert not pair.has("Reclaimed", nonce=nonce)
    pair.remote.signal(signal.SIGKILL)
    pair.until(lambda: pair.has("Reclaimed", nonce=nonce), "its end is the fence")
    assert pair.local.do_status() == {"idle": True, "quarantined": 0}


@pytest.mark.parametrize("pair", [("tcp", "writer"), ("mooncake", "writer")], indirect=True, ids=["tcp", "mooncake"])
def test_a_stopped_writer_is_fenced_at_once_where_the_receiver_checks(pair: Pair) -> None:
    nonce = start_torn(pair, deadline_s=1.0)
    live = pair.local.do_hash(LIVE)
    pair.remote.tell("push", nonce, list(range(len(TORN))), 0, True)
    first = pair.local.bytes[TORN[0] * PAGE_BYTES : TORN[0] * PAGE_BYTES + 64]
    deadline = time.monotonic() + 20
    while not first.any():
        assert time.monotonic() < deadline, "the transfer never began"
        pair.step()
    stop_child(pair.remote.process.pid)
    pair.silent = True
    pair.until(lambda: pair.has("Reclaimed", "Landed", nonce=nonce), "revoking the nonce is the fence")
    pair.local.do_fill(TORN, 0xDD)
    reused = pair.local.do_hash(TORN)
    pair.silent = False
    pair.remote.signal(signal.SIGCONT)
    pair.run(1.5)
    assert pair.local.do_hash(TORN) == reused and pair.local.do_hash(LIVE) == live, "no live page changes"
    assert pair.local.do_status() == {"idle": True, "quarantined": 0}


@pytest.mark.parametrize("pair", [("tcp", "reader"), ("mooncake", "reader")], indirect=True, ids=["tcp", "mooncake"])
def test_a_stopped_receiver_costs_a_timeout_and_changes_nothing_when_it_wakes(pair: Pair) -> None:
    nonce = start_torn(pair, deadline_s=3.0)
    live = pair.remote.call("hash", LIVE)
    stop_child(pair.remote.process.pid)
    pair.silent = True
    sources = list(range(len(TORN)))
    pair.local.do_push(nonce, sources, 0, True)
    pair.until(lambda: pair.has("GaveUp", nonce=nonce), "the writer's timeouts", PAUSE_S * 4)
    pair.until(lambda: pair.has("Drained", nonce=nonce), "the source pages come back", PAUSE_S * 4)
    pair.local.do_fill(sources, 0xEE)  # another request's KV; from now on these bytes must not reach the other end
    pair.silent = False
    pair.remote.signal(signal.SIGCONT)
    pair.until(
        lambda: pair.has("Failed", nonce=nonce) and pair.has("Reclaimed", nonce=nonce), "the reader's own deadline"
    )
    pair.remote.call("fill", TORN, 0xDD)
    reused = pair.remote.call("hash", TORN)
    pair.run(1.5)
    assert pair.remote.call("hash", TORN) == reused and pair.remote.call("hash", LIVE) == live, "no live page changes"
    assert pair.remote.call("status") == {"idle": True, "quarantined": 0}
    assert pair.local.do_status()["idle"]
    assert max(LIVE + TORN) < NUM_PAGES


RECEIVER = """
import mmap, sys
import numpy as np
from pdcluster.settings.config import set_library_environment
from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine, environment
from pdcluster.transfer.backends.staged.staging import StagedSettings
set_library_environment(environment(StagedSettings()))
engine, memory = MooncakeEngine(StagedSettings()), np.frombuffer(mmap.mmap(-1, 64 << 20), dtype=np.uint8)
engine.register(memory.ctypes.data, memory.size)
print(engine.session, memory.ctypes.data, flush=True)
sys.stdin.readline()
print(*(int(np.count_nonzero(memory == value)) for value in (0x11, 0xEE)), flush=True)
"""


def test_what_mooncake_says_ended_is_read_no_more_even_if_its_stopped_receiver_wakes() -> None:
    """So that a source page may be given to another request as soon as the real library says -1. Its receiver's memory
    is staging."""
    set_library_environment(environment(StagedSettings()))
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", RECEIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert child.stdin is not None and child.stdout is not None
    engine, source = MooncakeEngine(StagedSettings()), np.frombuffer(mmap.mmap(-1, 64 << 20), dtype=np.uint8)
    try:
        source[:] = 0x11
        session, address = child.stdout.readline().split()
        assert ends_of(engine, [engine.submit(session, source.ctypes.data, int(address), 4096)]) == {WriteStatus.DONE}
        stop_child(child.pid)
        step = 4 << 20
        found = ends_of(
            engine,
            [
                engine.submit(session, source.ctypes.data + at, int(address) + at, step)
                for at in range(0, source.size, step)
            ],
        )
        assert found == {WriteStatus.LOST}
        source[:] = 0xEE  # another request's KV
        child.send_signal(signal.SIGCONT)
        time.sleep(2.0)
        child.stdin.write("\n")
        child.stdin.flush()
        landed, foreign = map(int, child.stdout.readline().split())
        assert landed >= 4096 and not foreign
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        engine.close()


def ends_of(engine: MooncakeEngine, batches: list[int | None]) -> set[WriteStatus]:
    """The last words on some writes."""
    left, found, deadline = list(batches), set(), time.monotonic() + 60
    while left:
        assert time.monotonic() < deadline and None not in left, "never: an end of every write"
        for batch in list(left):
            assert batch is not None
            if (status := engine.check(batch)) not in (WriteStatus.PENDING, WriteStatus.UNKNOWN):
                left.remove(batch)
                found.add(status)
        time.sleep(0.01)
    return found

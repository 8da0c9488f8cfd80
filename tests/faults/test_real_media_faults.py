"""Each fault at each step of the protocol on shared memory, TCP, Mooncake and NIXL, between real processes: right
tokens or a clear error."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import real_media_matrix
from fault_script import STEPS
from faulty_node import SEALED, shut_all
from patient_loop import PatientLoop
from process_cluster import ProcessCluster
from real_media_matrix import FAULTS, Cell, Outcome, cells, run_cells, table

from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.backends.staged.nixl import PACKAGES

Show = Callable[[str, str], None]

HAS_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
NEEDS_NIXL = pytest.mark.skipif(not HAS_NIXL, reason="the package nixl-cu12 is not installed")
BACKENDS = [pytest.param(backend, marks=[NEEDS_NIXL] if backend == "nixl" else []) for backend in FAULTS]

SAMPLE = {
    "shm": (
        ("writer killed", "middle chunk"),
        ("reader killed", "commit"),
        ("cut", "last chunk"),
        ("duplicate connection", "first chunk"),
    ),
    "tcp": (
        ("flipped", "first chunk"),
        ("truncated", "middle chunk"),
        ("cut", "last chunk"),
        ("writer killed", "deliver"),
        ("delay", "reserve"),
    ),
    SEALED: (
        ("repeated", "middle chunk"),
        ("swapped", "first chunk"),
        ("flipped", "middle chunk"),
        ("truncated", "last chunk"),
        ("stale incarnation", "deliver"),
    ),
    "mooncake": (("cut", "middle chunk"), ("duplicate connection", "commit")),
    "nixl": (("truncated", "first chunk"), ("flipped", "last chunk")),
}


def check(outcomes: list[Outcome]) -> None:
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert not [outcome.cell for outcome in outcomes if not outcome.reached], "a step that no request came to"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_of_faults_on_real_media(backend: str, show_table: Show) -> None:
    outcomes = asyncio.run(run_cells(backend, [Cell(backend, *cell) for cell in SAMPLE[backend]]))
    show_table(f"fault matrix on {backend}, sample", table(outcomes))
    check(outcomes)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_fault_at_every_step_on_real_media(backend: str, show_table: Show) -> None:
    outcomes = asyncio.run(run_cells(backend, cells(backend, seed=1)))
    show_table(f"fault matrix on {backend}", table(outcomes))
    check(outcomes)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_reader_that_takes_any_bytes_is_seen_by_the_matrix() -> None:
    flips = [Cell("tcp", "flipped", step, seed) for seed in range(4) for step in STEPS if "chunk" in step]
    assert any(outcome.wrong for outcome in asyncio.run(run_cells("tcp", flips, orders=("blind",))))


def test_every_connection_is_cut_whatever_other_threads_close_meanwhile() -> None:
    listed = os.listdir
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone = os.eventfd(0)
    os.close(gone)
    with near, far, mock.patch("os.listdir", lambda path: [str(gone), *listed(path)]):
        shut_all(socket.SOCK_SEQPACKET)
        assert far.recv(1) == b""


async def test_a_node_of_the_matrix_that_breaks_or_hangs_says_where() -> None:
    async with ProcessCluster({"p0": "prefill"}, "shm") as cluster:
        cluster.nodes["p0"].tell("arm")
        while not cluster.nodes["p0"].broken:
            await asyncio.sleep(0.01)
        with pytest.raises(AssertionError, match="KeyError: 'step'"):
            await cluster.restart_dead()
        await asyncio.to_thread(cluster.nodes["p0"].process.wait)
        cluster.nodes["p0"].broken = ""
        await cluster.restart_dead()
        assert "listen" in await asyncio.to_thread(cluster.nodes["p0"].stacks)


class Slow:
    """A node whose first answer takes longer than all that one would wait for it to be idle, as if the machine had been
    stopped."""

    def __init__(self) -> None:
        self.me = Peer("p0", "p0-1")
        self.answers = [{"status": {"used": 1}, "problems": []}, {"status": {"used": 0}, "problems": []}]

    async def status(self) -> dict[str, object]:
        if len(self.answers) == 2:
            time.sleep(0.4)
        return self.answers.pop(0)


async def test_a_stall_of_the_machine_is_no_leak() -> None:
    cluster = ProcessCluster({}, "tcp")
    cluster.router = SimpleNamespace(ledger=SimpleNamespace(num_requests=lambda: 0))  # type: ignore[assignment]
    cluster.nodes = {"p0": Slow()}  # type: ignore[dict-item]
    assert await cluster.wait_idle(0.2) == []
    cluster.context.destroy(0)


def test_the_matrix_on_its_own_runs_by_the_clock_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped for a while, or came to little CPU, ended in a TimeoutError of nobody."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def no_cells(*_: object) -> list[Outcome]:
        loops.append(asyncio.get_running_loop())
        return []

    monkeypatch.setattr(real_media_matrix, "run_cells", no_cells)
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    try:
        assert real_media_matrix.main("tcp") == 0
    finally:
        asyncio.set_event_loop_policy(before)
    assert [type(loop) for loop in loops] == [PatientLoop]


def test_the_table_names_every_cell_and_sums_up() -> None:
    outcome = Outcome(Cell("tcp", "flipped", "ack"), reached=True, acted=True, right=2, errors=["x"], wrong=["y"])
    text = table([outcome])
    assert "flipped" in text and "truncated" not in text and all(step in text for step in STEPS)
    assert "2/1" in text and "wrong tokens 1" in text and "leaks 0" in text
    assert "·" in table([Outcome(Cell("shm", "cut", "ack"))]), (
        "a fault that did not happen is not called one that was survived"
    )
    assert set(real_media_matrix.FAULTS) == {"shm", "tcp", SEALED, "mooncake", "nixl"}

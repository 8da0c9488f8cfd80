"""Each fault at each step of the protocol on shared memory, TCP, Mooncake and NIXL, between real processes: right tokens or a clear error."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from collections.abc import Callable
from unittest import mock

import pytest
import real_media_matrix
from fault_script import STEPS
from faulty_node import shut_all
from process_cluster import ProcessCluster
from real_media_matrix import FAULTS, Cell, Outcome, cells, run_cells, table

from pdcluster.transfer.nixl import PACKAGES

Show = Callable[[str, str], None]

HAS_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
NEEDS_NIXL = pytest.mark.skipif(not HAS_NIXL, reason="the package nixl-cu12 is not installed")
BACKENDS = [pytest.param(backend, marks=[NEEDS_NIXL] if backend == "nixl" else []) for backend in FAULTS]

SAMPLE = {
    "shm": (("writer killed", "middle chunk"), ("reader killed", "commit"), ("cut", "last chunk"), ("duplicate connection", "first chunk")),
    "tcp": (("flipped", "first chunk"), ("truncated", "middle chunk"), ("cut", "last chunk"), ("writer killed", "deliver"), ("delay", "reserve")),
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


def test_the_table_names_every_cell_and_sums_up() -> None:
    outcome = Outcome(Cell("tcp", "flipped", "ack"), reached=True, acted=True, right=2, errors=["x"], wrong=["y"])
    text = table([outcome])
    assert "flipped" in text and "truncated" not in text and all(step in text for step in STEPS)
    assert "2/1" in text and "wrong tokens 1" in text and "leaks 0" in text
    assert "·" in table([Outcome(Cell("shm", "cut", "ack"))]), "a fault that did not happen is not called one that was survived"
    assert set(real_media_matrix.FAULTS) == {"shm", "tcp", "mooncake", "nixl"}

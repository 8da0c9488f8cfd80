"""Tensor-parallel nodes as a user starts them: real rank processes, one of which dies or hangs under load, and nothing
left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from driver import Driver, greedy
from processes import EXACT, Up, abandoned_memory, ask, make_prompts, running, wait_nothing_abandoned

from pdcluster.checkpoint import bundled
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.settings.config import cache_directory

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

Reference = Callable[[list[list[int]], list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def one_engine() -> Iterator[Reference]:
    engine = Engine(EngineConfig(bundled.path(), cache_directory(), dtype="float32", num_pages=2048, threads=1))

    def continue_(prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        jobs = Driver(engine).run(
            [np.array(p, np.int32) for p in prompts], [greedy(count, ignore_eos=True) for count in counts]
        )
        return [job.tokens for job in jobs]

    yield continue_
    engine.close()


def rank_pids(up: Up, node: str) -> list[int]:
    children = psutil.Process(up.pid_of(node)).children()
    return [child.pid for child in children if "pdcluster.node.native.tensor_parallel.rank" in child.cmdline()]


def ask_while_refused(up: Up, prompt: list[int], count: int) -> tuple[list[int], dict[str, object]]:
    """As `ask`, and again when the router refuses at once because the only node of a kind is starting: that request was
    not accepted."""
    deadline = time.monotonic() + 100
    while True:
        try:
            return ask(up, prompt, count)
        except AssertionError as refused:
            if "needs a prefill and a decode node" not in str(refused) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


@pytest.mark.parametrize(("victim", "number"), [("decode-0", signal.SIGKILL), ("prefill-0", signal.SIGSTOP)])
def test_a_rank_that_dies_or_hangs_under_load_costs_its_node_but_no_request(
    victim: str, number: int, one_engine: Reference
) -> None:
    prompts, counts = make_prompts(24, seed=7), [40] * 24
    expected = one_engine(prompts, counts)
    with running("--tp", "2", "--set", "node.lease_s=2", "--set", "node.heartbeat_s=0.4", *EXACT) as up:
        node, ranks = up.pid_of(victim), rank_pids(up, victim)
        assert len(ranks) == 1
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(ask_while_refused, up, prompt, count) for prompt, count in zip(prompts, counts, strict=True)
            ]
            while sum(request.done() for request in asked) < 3:
                time.sleep(0.005)
            os.kill(ranks[0], number)
            answers = [request.result(timeout=120) for request in asked]
        assert [tokens for tokens, _ in answers] == expected
        deadline = time.monotonic() + 60
        while psutil.pid_exists(node) or psutil.pid_exists(ranks[0]):
            assert time.monotonic() < deadline, f"the node outlived its rank:\n{up.output()}"
            time.sleep(0.05)
        up.wait_nodes(2)
        assert up.pid_of(victim) != node and len(rank_pids(up, victim)) == 1
        assert any("gives itself up: rank 1" in line for line in up.lines), up.output()
        up.wait_idle()
        tokens, reply = ask(up, prompts[0], counts[0])
        assert tokens == expected[0] and reply["headers"]["x-pdcluster-mode"] == "remote"


def test_nodes_of_different_ranks_serve_together_and_leave_nothing(one_engine: Reference) -> None:
    prompts, counts = make_prompts(10, seed=8), [12] * 10
    memory = abandoned_memory()
    with running("--prefill-tp", "2", "--decode-tp", "1", "--transfer", "tcp", *EXACT) as up:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda pair: ask(up, *pair), zip(prompts, counts, strict=True)))
        assert [tokens for tokens, _ in answers] == one_engine(prompts, counts)
        assert {reply["headers"]["x-pdcluster-mode"] for _, reply in answers} == {"remote"}
        up.wait_idle()
        pids = {child.pid for child in up.children()}
        assert any("pdcluster.node.native.tensor_parallel.rank" in psutil.Process(pid).cmdline() for pid in pids)
        assert up.stop() == 0, up.output()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    wait_nothing_abandoned(memory)


def test_ranks_that_cannot_share_the_heads_are_refused_with_what_can() -> None:
    argv = [sys.executable, "-m", "pdcluster.cli", "up", "--tp", "3", "--http", "127.0.0.1:0", "--grpc", "none"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        "over 3 ranks cannot deal out 4 attention heads and 2 kv heads evenly; use --tp 1 or 2 or 4"
        in done.stdout + done.stderr
    )

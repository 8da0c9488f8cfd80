"""Ranks as processes: they compute what one engine computes, move their own pools, end together, and a lost one is
noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import psutil
import pytest
from checkpoints import KERNEL_CACHE, Shape
from driver import Driver, greedy

from pdcluster.core.errors import ConfigError, IntegrityError, NodeLost, PdclusterError
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.node.native.tensor_parallel.channel import Media
from pdcluster.node.native.tensor_parallel.engine import RankedEngine, RankSettings
from pdcluster.node.native.tensor_parallel.messages import Revoke
from pdcluster.transfer.backends.base import Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.tcp import TcpBackend
from pdcluster.transfer.layout.spans import CopyRun

pytestmark = pytest.mark.timeout(120)

PAGE = 8
SHAPE = Shape(
    "qwen3", num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=32, intermediate_size=48, vocab_size=97, num_layers=3
)
READER = Peer("r", "r1")
MEDIA = Media("n", "n1", 4, "tcp", "127.0.0.1", 1 << 20)
PATIENT = RankSettings(size=2, step_s=60.0, pulse_s=0.1, silence_s=30.0, media=MEDIA)
QUICK = RankSettings(size=2, step_s=60.0, pulse_s=0.1, silence_s=1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = checkpoints.save(checkpoints.build_model(SHAPE, seed=4), tmp_path_factory.mktemp("model"))
    return EngineConfig(directory, KERNEL_CACHE, page_tokens=PAGE, num_pages=64)


class Lost:
    """What the engine said when it was lost."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._event.set()

    def wait(self) -> str:
        assert self._event.wait(30), "nobody noticed"
        return self.reasons[0]


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def engine(config: EngineConfig, lost: Lost) -> Iterator[RankedEngine]:
    engine = RankedEngine(config, PATIENT, lost)
    yield engine
    engine.close()


def plan() -> StepPlan:
    return StepPlan((Row("a", np.array([5, 6, 7], np.int32), 0, np.array([1], np.int32), greedy(1)),))


def fetched(engine: RankedEngine) -> np.ndarray:
    """The pool of rank 1, written here by the rank itself."""
    nbytes, here = engine.local.pool.nbytes, TcpBackend(READER)
    memory = np.zeros(nbytes, np.uint8)
    here.register(Region(0, memory.ctypes.data, nbytes))
    here.permit(Permit(7, Peer(MEDIA.node, MEDIA.incarnation), 0, ((0, nbytes),)))
    (link,) = engine.links
    end = link.ends["tcp"]
    end.connect(READER, here.advert())
    handle = end.write(READER, MEDIA.region + 1, 0, Stamp(7, 0, 1, nbytes), (CopyRun(0, 0, nbytes),))
    deadline = time.monotonic() + 30
    while (status := end.poll(handle)) is WriteStatus.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert status is WriteStatus.DONE
    here.shutdown()
    return memory


def test_ranks_compute_what_one_engine_computes_and_move_their_own_pools(
    config: EngineConfig, engine: RankedEngine, lost: Lost
) -> None:
    engine.warmup()
    prompts = [checkpoints.prompt(length, SHAPE.vocab_size) for length in (1, 8, 30)]
    alone = Engine(config)
    expected = [job.tokens for job in Driver(alone).run(prompts, [greedy(12)] * 3, chunk=7, stagger=1)]
    ranked = Driver(engine)
    assert [job.tokens for job in ranked.run(prompts, [greedy(12)] * 3, chunk=7, stagger=1)] == expected
    whole, shape = alone.pool.tensor.numpy(), engine.local.pool.tensor.shape
    halves = [engine.local.pool.tensor.numpy(), fetched(engine).view(np.float32).reshape(shape)]
    page = int(ranked._free[0])
    np.testing.assert_allclose(
        np.concatenate([half[page] for half in halves], axis=2)[:, :, :, :1], whole[page][:, :, :, :1], atol=1e-4
    )
    alone.close()
    pids = engine.pids
    engine.close()
    assert not any(psutil.pid_exists(pid) for pid in pids) and not lost.reasons


def test_a_step_that_goes_on_with_tokens_not_known_yet_reaches_no_rank(engine: RankedEngine, lost: Lost) -> None:
    (row,) = plan().rows
    with pytest.raises(IntegrityError, match="ranks above 0 never learn"):
        engine.launch(StepPlan((replace(row, tokens=row.tokens[:1], follows=True),)))
    assert engine.step(plan()).rows[0].token is not None and not lost.reasons, "nothing of it was under way"


def test_a_dead_rank_is_noticed_at_once_and_its_step_fails(engine: RankedEngine, lost: Lost) -> None:
    engine.warmup()
    os.kill(engine.pids[0], signal.SIGKILL)
    assert lost.wait().startswith("rank 1 ")
    with pytest.raises((NodeLost, RuntimeError)):
        engine.step(plan())


def test_a_rank_whose_transfer_endpoint_fails_ends_and_with_it_the_engine(engine: RankedEngine, lost: Lost) -> None:
    (link,) = engine.links
    link.send(Revoke("a medium that it does not have", 7, 1))
    assert lost.wait().startswith("rank 1 ")
    deadline = time.monotonic() + 30
    while psutil.pid_exists(engine.pids[0]) and psutil.Process(engine.pids[0]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it went on without its endpoint"
        time.sleep(0.02)


def test_a_rank_that_falls_silent_is_noticed(config: EngineConfig, lost: Lost) -> None:
    engine = RankedEngine(config, QUICK, lost)
    os.kill(engine.pids[0], signal.SIGSTOP)
    assert "was silent for" in lost.wait()
    engine.close()


def test_a_step_that_fails_on_a_rank_ends_the_engine(engine: RankedEngine, lost: Lost) -> None:
    bad = StepPlan((Row("a", np.array([5, 6, 7], np.int32), 0, np.array([99], np.int32), greedy(1)),))
    with pytest.raises(PdclusterError, match="page 99"):
        engine.step(bad)
    assert "a step failed" in lost.wait()


def test_signals_of_a_terminal_do_not_end_a_rank(engine: RankedEngine, lost: Lost) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pids[0], number)
    time.sleep(0.3)
    engine.step(plan())
    assert not lost.reasons


def test_heads_that_cannot_be_dealt_out_start_no_process(config: EngineConfig, lost: Lost) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="use --tp 1 or 2 or 4"):
        RankedEngine(config, RankSettings(size=3), lost)
    assert psutil.Process().children() == before


def test_a_rank_that_cannot_start_is_an_error_and_leaves_nothing(config: EngineConfig, lost: Lost) -> None:
    with pytest.raises(PdclusterError, match="rank 1 ended before it was ready"):
        RankedEngine(config, RankSettings(size=2, cores=((0,), (4095,)), step_s=3.0), lost)
    assert not psutil.Process().children()


PARENT = """
import sys, time
from pathlib import Path
from pdcluster.engine.engine import EngineConfig
from pdcluster.node.native.tensor_parallel.messages import Revoke
from pdcluster.node.native.tensor_parallel.engine import RankedEngine, RankSettings
if __name__ == "__main__":
    engine = RankedEngine(EngineConfig(Path(sys.argv[1]), Path(sys.argv[2]), page_tokens=8, num_pages=8), RankSettings(size=2), print)
    print(*engine.pids, flush=True)
    time.sleep(60)
"""


def test_ranks_die_with_rank_0_however_that_dies(config: EngineConfig) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(config.model_dir), str(Path(KERNEL_CACHE))], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the rank outlived its node"
        time.sleep(0.05)

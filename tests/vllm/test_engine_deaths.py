"""Whichever process of an engine is killed, none of the others is left after five seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_kit import model_directory

from pdcluster.core.errors import ConfigError
from pdcluster.node.vllm.engine.arguments import EngineOptions, parse_engine_arguments
from pdcluster.node.vllm.engine.parent_death import MARK_VARIABLE, kill_marked, marked_processes

LEFT_S = 5.0
# Until vLLM starts its first process.
START_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts an engine, and prints the engine's mark when that is ready."""
    script = Path(__file__).parent / "engine_process.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(model)], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def node(started: subprocess.Popen[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    assert started.stdout is not None
    line = next((line for line in started.stdout if line.startswith("mark ")), "")
    assert line, (tmp_path / "log").read_text()[-3000:]
    mark = line.split()[1]
    yield started, mark
    kill_marked(mark)


def test_a_node_that_is_killed_while_its_engine_starts_leaves_nothing(started: subprocess.Popen[str]) -> None:
    """vLLM's processes wait for minutes then for a parent that is gone."""
    cores: list[psutil.Process] = []
    until = time.monotonic() + START_S
    while not cores and time.monotonic() < until:
        time.sleep(0.05)
        cores = [child for child in psutil.Process(started.pid).children() if MARK_VARIABLE in _variables(child)]
    assert cores
    time.sleep(3.0)
    tree = psutil.Process(started.pid).children(recursive=True)
    started.kill()
    started.wait()
    assert left_after(tree) == []


def _variables(child: psutil.Process) -> dict[str, str]:
    try:
        found: dict[str, str] = child.environ()
    except psutil.Error:
        return {}
    return found


def left_after(tree: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run after LEFT_S."""
    began = time.monotonic()
    while time.monotonic() - began < LEFT_S and any(map(_runs, tree)):
        time.sleep(0.05)
    return [child for child in tree if _runs(child)]


@pytest.mark.parametrize("victim", ["node", "core", "worker"])
def test_no_process_is_left(node: tuple[subprocess.Popen[str], str], victim: str) -> None:
    process, mark = node
    tree = psutil.Process(process.pid).children(recursive=True)
    core = next(child for child in tree if child.ppid() == process.pid and child.children())
    [worker] = [child for child in core.children() if child.memory_info().rss > 200 << 20]
    assert {core.pid, worker.pid} <= set(marked_processes(mark)), "a mark got lost"
    os.kill({"node": process.pid, "core": core.pid, "worker": worker.pid}[victim], signal.SIGKILL)
    assert process.wait(LEFT_S) == (-signal.SIGKILL if victim == "node" else 3)
    assert left_after(tree) == []


def _runs(child: psutil.Process) -> bool:
    try:
        return bool(child.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'), "kv-transfer-config"),
        (("--model", "other"), "give the model to the node"),
        (("--data-parallel-size=2",), "one node per replica"),
        (("--disable-log-stats",), "load report"),
        (("--no-such-thing",), "no-such-thing"),
        (("--max-num-seqs", "many"), "max-num-seqs"),
    ],
)
def test_arguments_are_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_engine_arguments(EngineOptions("model", arguments))


@pytest.mark.parametrize(
    ("change", "words"), [({"side_host": "0.0.0.0"}, "peers"), ({"side_port": 0}, "65535"), ({"lease_s": 0}, "lease_s")]
)
def test_options_out_of_range_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_engine_arguments(EngineOptions("model", **change))  # type: ignore[arg-type]

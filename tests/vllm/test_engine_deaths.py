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
from pdcluster.node.vllm.engine.parent_death import kill_marked, marked_processes

LEFT_S = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def node(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    script = Path(__file__).parent / "engine_process.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(model)], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    assert process.stdout is not None
    line = ""
    for line in process.stdout:
        if line.startswith("mark "):
            break
    assert line.startswith("mark "), (tmp_path / "log").read_text()[-3000:]
    mark = line.split()[1]
    yield process, mark
    process.kill()
    process.wait()
    kill_marked(mark)


@pytest.mark.parametrize("victim", ["node", "core", "worker"])
def test_no_process_is_left(node: tuple[subprocess.Popen[str], str], victim: str) -> None:
    process, mark = node
    tree = psutil.Process(process.pid).children(recursive=True)
    core = next(child for child in tree if child.ppid() == process.pid and child.children())
    [worker] = [child for child in core.children() if child.memory_info().rss > 200 << 20]
    assert {core.pid, worker.pid} <= set(marked_processes(mark)), "a mark got lost"
    os.kill({"node": process.pid, "core": core.pid, "worker": worker.pid}[victim], signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() - began < LEFT_S:
        if process.poll() is not None and not any(_runs(child) for child in tree):
            break
        time.sleep(0.05)
    assert process.poll() == (-signal.SIGKILL if victim == "node" else 3)
    assert [child for child in tree if _runs(child)] == []


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

"""What a node's engine spawns is tied to the node before its interpreter starts, and carries the mark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.node.vllm.engine import parent_death

MARK = "mark-of-this-test"
# With the margin of tests that share cores.
ENDS_S = 15.0
# A module that takes long to import is where a child of vLLM is when its node dies early.
NODE = """
import multiprocessing, sys, time
from pdcluster.node.vllm.engine.parent_death import mark_children

if __name__ == "__main__":
    mark_children(sys.argv[1])
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
    child.start()
    print(child.pid, flush=True)
    child.join()
else:
    time.sleep(300)
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A node, and a child that still imports."""
    script = tmp_path / "node.py"
    script.write_text(NODE)
    node = subprocess.Popen([sys.executable, str(script), MARK], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    yield node, psutil.Process(int(node.stdout.readline()))
    node.kill()
    parent_death.kill_marked(MARK)


def test_a_killed_node_leaves_no_child_that_starts(family: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    node, child = family
    node.kill()
    node.communicate(timeout=ENDS_S)
    gone, alive = psutil.wait_procs([child], ENDS_S)
    assert gone and not alive


def test_shared_memory_of_a_killed_node_is_removed() -> None:
    code = (
        "import time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from pdcluster.node.vllm.engine.parent_death import mark_children\n"
        f"mark_children({MARK!r})\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "print(memory.name, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        segment = Path("/dev/shm") / node.stdout.readline().strip()
        assert segment.is_file()
        node.kill()
    until = time.monotonic() + ENDS_S
    while segment.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not segment.exists()


def test_children_carry_the_mark(family: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    node, child = family
    assert child.pid in parent_death.marked_processes(MARK)
    assert child.pid in parent_death.kill_marked(MARK)
    node.communicate(timeout=ENDS_S)
    assert node.returncode == 0


def test_a_script_that_is_no_program_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python.sh"
    script.touch(0o644)
    monkeypatch.setattr(parent_death, "FOLLOWING_PYTHON", script)
    with pytest.raises(ConfigError, match="executable"):
        parent_death.mark_children(MARK)
    assert parent_death.MARK_VARIABLE not in os.environ

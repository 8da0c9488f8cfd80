"""What a node's engine started ends with the node, however that ends, and whatever group it is in."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from pdcluster.node.vllm.engine.reaper import MARK_VARIABLE, kill_marked, marked_processes

MARK = "mark-of-this-test"
# With the margin of tests that share cores.
ENDS_S = 15.0
NODE = """
import subprocess, sys, time
from pdcluster.node.vllm.engine.engine_processes import MarkedProcesses
processes = MarkedProcesses(sys.argv[1])
for own in (False, True):
    subprocess.Popen(["sleep", "300"], start_new_session=own)
while len(processes.ids()) < 2:
    time.sleep(0.01)
print("ready", flush=True)
getattr(processes, sys.argv[2])()
input()
"""


@contextmanager
def started(call: str) -> Iterator[subprocess.Popen[str]]:
    """call: a method of its processes that it calls."""
    command = [sys.executable, "-c", NODE, f"{MARK}-{call}", call]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None and node.stdout.readline() == "ready\n"
        try:
            yield node
        finally:
            node.kill()


def are_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, ENDS_S)
    return not alive


@pytest.mark.parametrize("way", ["kill", "exit"])
def test_children_end_with_their_node(way: str) -> None:
    with started("ids") as node:
        family = psutil.Process(node.pid).children(recursive=True)
        assert len(family) == 3, "two children and the reaper"
        if way == "kill":
            node.kill()
        else:
            node.communicate("\n", timeout=ENDS_S)
        node.wait(ENDS_S)
        assert are_gone(family)


def test_the_node_kills_them_itself_too() -> None:
    with started("kill") as node:
        family = psutil.Process(node.pid).children(recursive=True)
        sleeping = [child for child in family if child.name() == "sleep"]
        until = time.monotonic() + ENDS_S
        while any(child.status() != psutil.STATUS_ZOMBIE for child in sleeping) and time.monotonic() < until:
            time.sleep(0.02)
        assert all(child.status() == psutil.STATUS_ZOMBIE for child in sleeping)
        node.kill()
        node.wait(ENDS_S)
        assert are_gone(family)


def test_only_those_with_the_mark_are_killed() -> None:
    own, other = (
        subprocess.Popen(["sleep", "300"], env={MARK_VARIABLE: mark, "PATH": "/usr/bin:/bin"})
        for mark in (MARK, MARK + "-of-another")
    )
    try:
        until = time.monotonic() + ENDS_S
        while marked_processes(MARK) != [own.pid] and time.monotonic() < until:
            time.sleep(0.01)
        assert kill_marked(MARK) == [own.pid] and own.wait(ENDS_S) == -9
        assert kill_marked(MARK) == [] and other.poll() is None
    finally:
        for process in (own, other):
            process.kill()
            process.wait()

"""What a benchmark starts ends with it, however it ends: others measure on the same machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import time
from bench.harness.cluster import start
running = []
start(running, ["pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0"])
print(running[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_takes_its_processes_along(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as bench:
        assert bench.stdout is not None
        child = os.pidfd_open(int(bench.stdout.readline()))
        try:
            bench.send_signal(number)
            bench.wait(10)
            ended, _, _ = select.select([child], [], [], 20.0)
            assert ended, "its process is still there"
        finally:
            if not select.select([child], [], [], 0)[0]:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)

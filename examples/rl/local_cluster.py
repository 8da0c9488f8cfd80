"""One prefill node, one decode node, bootstrap and router, as `pdcluster up` starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdcluster.processes.child_process import die_with

READY = re.compile(r"ready in \S+ s: (http://\S+)/v1  .*?admin (\S+)  model (\S+)")
READY_S, STOP_S, POLL_S = 300.0, 60.0, 0.1
SHOWN_CHARS = 4000
# In the trainer's precision; every request goes through both nodes. Nodes and trainer share this machine's cores, so no
# node has some of its own, and none is given up for being slow.
FLAGS = (
    "--prefill", "1", "--decode", "1", "--dtype", "float32", "--no-pin", "--set", "node.threads=1",
    "--http", "127.0.0.1:0", "--grpc", "none", "--set", "router.console=none", "--set", "router.mode=remote",
    "--set", "node.lease_s=30", "--set", "router.lease_s=30", "--set", "bootstrap.lease_s=30", "--log-level", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Where it answers. url: of the HTTP API; admin: HOST:PORT of the router's Admin."""

    url: str
    admin: str
    model: str


@contextmanager
def local_cluster() -> Iterator[RunningCluster]:
    """Runs as long as the block. What its processes say is shown where the block fails.

    Raises RuntimeError where it ends before it is ready, TimeoutError where it is not ready in time.
    """
    with tempfile.NamedTemporaryFile() as output:
        log = Path(output.name)
        process = subprocess.Popen(
            [sys.executable, "-m", "pdcluster.cli", "up", *FLAGS],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGTERM),
        )
        try:
            yield _wait_until_ready(process, log)
        except Exception:
            print(log.read_text(errors="replace")[-SHOWN_CHARS:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> RunningCluster:
    deadline = time.monotonic() + READY_S
    while (found := READY.search(log.read_text(errors="replace"))) is None:
        if process.poll() is not None:
            raise RuntimeError(f"pdcluster up ended with {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster is not ready after {READY_S:g} s")
        time.sleep(POLL_S)
    return RunningCluster(*found.groups())

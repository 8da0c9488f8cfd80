"""A cluster of processes whose nodes run vLLM: bootstrap, nodes and router as a user starts them, on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
READY_S = 400.0
STOP_S = 40.0
ARGS = (
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    "4096",
    "--max-num-seqs",
    "16",
    "--block-size",
    "32",
)
# Libraries that make vLLM's CPU kernels fast, where they are installed.
PRELOAD = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", f"{sys.prefix}/lib/libiomp5.so")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class VllmCluster:
    def __init__(self, folder: Path, model: Path, roles: Sequence[str], *settings: str) -> None:
        self._folder = folder
        self.http, self.bootstrap = free_port(), f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.model = model
        self._spawn("bootstrap", "pdcluster.cli", "bootstrap", "--listen", self.bootstrap)
        for number, role in enumerate(roles):
            self.start_node(f"{role}-{number}", role, number)
        self._spawn(
            "router", "pdcluster_router.cli", "--bootstrap", self.bootstrap, "--http", f"127.0.0.1:{self.http}",
            "--grpc", "127.0.0.1:0", "--console", "none", *settings,
        )  # fmt: skip
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.http}", timeout=120.0)

    def start_node(self, name: str, role: str, number: int) -> None:
        self._spawn(
            name, "pdcluster.cli", "node", "--engine", "vllm", "--role", role, "--name", name,
            "--bootstrap", self.bootstrap, "--model", str(self.model), "--", *ARGS, core=number % (os.cpu_count() or 1),
        )  # fmt: skip

    def _spawn(self, name: str, module: str, *arguments: str, core: int | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'router'}", "HF_HUB_OFFLINE": "1"}
        if core is not None:
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "OMP_NUM_THREADS": "1",
                "UCX_TLS": "tcp,self,shm,cma",
                "LD_PRELOAD": os.pathsep.join(path for path in PRELOAD if Path(path).exists()),
            }
        with open(self._folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], env=environment, stdout=log, stderr=log, cwd=ROOT
            )

    def wait_ready(self) -> None:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            ended = {name: code for name, each in self.processes.items() if (code := each.poll()) is not None}
            assert not ended, f"ended: {ended}; {self.log(next(iter(ended)))}"
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/ready", timeout=2.0).status_code == 200:
                    return
            time.sleep(1.0)
        raise AssertionError(f"the cluster is not ready after {READY_S:g} s: {self.log('router')}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def complete(self, prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
        body = {"model": self.name, "prompt": prompt, "return_token_ids": True, **fields}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @property
    def name(self) -> str:
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    def stop(self) -> None:
        """Every process ends by itself, and says that it ended well."""
        self.client.close()
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait(STOP_S)
        assert not any(codes.values()), f"{codes}: {[self.log(name) for name, code in codes.items() if code]}"


@contextlib.contextmanager
def running_cluster(folder: Path, model: Path, roles: Sequence[str], *settings: str) -> Iterator[VllmCluster]:
    cluster = VllmCluster(folder, model, roles, *settings)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()

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

from tests.chaos.vllm_nodes import ARGS, ROOT
from tests.chaos.vllm_nodes import environment as chaos_environment

READY_S = 400.0
STOP_S = 40.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def node_environment(number: int) -> dict[str, str]:
    """All variables of the node of that number."""
    return {**os.environ, **chaos_environment(number)}


class VllmCluster:
    def __init__(
        self,
        folder: Path,
        model: Path,
        roles: Sequence[str],
        *settings: str,
        arguments: Sequence[str] = ARGS,
        node_settings: Sequence[str] = (),
    ) -> None:
        """settings: flags of the router.
        arguments: of each node's vLLM.
        node_settings: flags of each node.
        """
        self._folder, self._arguments, self._node_settings = folder, arguments, node_settings
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
            "--bootstrap", self.bootstrap, "--model", str(self.model), *self._node_settings, "--", *self._arguments,
            number=number,
        )  # fmt: skip

    def _spawn(self, name: str, module: str, *arguments: str, number: int | None = None) -> None:
        """number: of a node, which gets a core."""
        paths = f"{ROOT}{os.pathsep}{ROOT / 'router'}"
        environment = {**os.environ, "PYTHONPATH": paths} if number is None else node_environment(number)
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
def running_cluster(
    folder: Path,
    model: Path,
    roles: Sequence[str],
    *settings: str,
    arguments: Sequence[str] = ARGS,
    node_settings: Sequence[str] = (),
) -> Iterator[VllmCluster]:
    cluster = VllmCluster(folder, model, roles, *settings, arguments=arguments, node_settings=node_settings)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()

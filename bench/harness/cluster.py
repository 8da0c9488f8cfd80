"""A small real cluster for benchmarks: bootstrap, nodes (see `bench.harness.node`) and router as processes, and a
client that reads the timelines."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster.checkpoint import bundled
from pdcluster.processes import ready
from pdcluster.processes.child_process import die_with

READY_S = 120.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """options: of bench.harness.node; flags: of `pdcluster node`; core: the one it is pinned to."""

    name: str
    role: str
    core: int
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class Client:
    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = address
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.address = address
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self._wait_ready()
        self.model = str(self._get("/v1/models")["data"][0]["id"])

    def _get(self, path: str) -> dict[str, Any]:
        self._connection.request("GET", path, headers=self._headers)
        reply = self._connection.getresponse()
        body: dict[str, Any] = json.loads(reply.read() or b"{}")
        return body | {"status": reply.status}

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while self._get("/ready")["status"] != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster is not ready after {READY_S:g} s")
            time.sleep(0.05)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """One greedy completion; the usage's `pdcluster` part: nodes and timeline."""
        found: dict[str, Any] = self.answer(prompt, max_tokens)["usage"]["pdcluster"]
        return found

    def answer(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """One greedy completion, whole, with token ids."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), self._headers | {"content-type": "application/json"}
        )
        reply = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(reply.read())
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {answer}")
        return answer


@contextmanager
def cluster(
    model: Path, nodes: Sequence[NodePlan], transfer: str, router_flags: Sequence[str] = (), api_key: str | None = None
) -> Iterator[Client]:
    """Processes that live as long as the block; every one is stopped with SIGTERM, the router first. api_key: of a
    tenant, where there are some."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        bootstrap = start(running, ["pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0"])
        for plan in nodes:
            own = [
                "--name",
                plan.name,
                "--role",
                plan.role,
                "--bootstrap",
                bootstrap,
                "--model",
                str(model),
                "--transfer",
                transfer,
            ]
            own += ["--cores", str(plan.core), "--threads", "1", *plan.flags]
            start(running, ["bench.harness.node", *plan.options, "--", *own], ready_option="--ready-fd")
        own = [
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "none",
            "--admin",
            "none",
            "--bootstrap",
            bootstrap,
            "--tokenizer",
            str(bundled.path()),
        ]
        router = start(running, ["pdcluster_router.cli", *own, *router_flags])
        yield Client(router, api_key)
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def start(running: list[subprocess.Popen[bytes]], arguments: list[str], ready_option: str = "--ready-fd") -> str:
    """Start `python -m …`, wait for its ready line, return its address."""
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-m", *arguments, ready_option, str(write_end)]
    process = subprocess.Popen(argv, pass_fds=[write_end], stderr=subprocess.DEVNULL, preexec_fn=ends_with_us())
    running.append(process)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as announced:
        line = announced.readline()
    if not line:
        raise RuntimeError(f"{arguments[0]} ended with {process.wait()} before it was ready")
    return str(ready.parse(line)["address"])


def ends_with_us() -> Callable[[], None]:
    """For `Popen(preexec_fn=…)` on the main thread: however a benchmark ends, its processes are told to, and let go of
    their shared memory."""
    return die_with(os.getpid(), signal.SIGTERM)


def random_prompt(length: int, rng: random.Random, vocab: int = 8000) -> list[int]:
    return [rng.randrange(10, vocab) for _ in range(length)]

"""A cluster without engines for tests of whole router processes: fake nodes over real sockets in a thread of this
process, so that what they hold is known, a real bootstrap service, and a router as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import zmq

from bench.fakes.fake_node import FakeNode, Speed
from pdcluster.bootstrap.agent import NodeAgent
from pdcluster.checkpoint import bundled
from pdcluster.core.messages import Work
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.settings.tls_trust import TlsTrust, client_context, read_roots
from pdcluster_router import spare
from pdcluster_router.prefix_index.index import digest_of

STOP_S = 90.0


@dataclass(frozen=True, slots=True)
class Outputs:
    """What nodes say. model: a directory with a tokenizer; output: of each request, its end of sequence last; None:
    words until max_tokens."""

    model: Path = field(default_factory=bundled.path)
    max_len: int = 1 << 18
    vocab_size: int = 1 << 16
    output: Callable[[Work], Sequence[int]] | None = None


class FakeNodes(threading.Thread):
    """Owns the nodes once it runs; others may look at what they hold while nothing is asked of them."""

    def __init__(self, bootstrap: str, roles: list[str], speed: Speed, num_pages: int, outputs: Outputs | None) -> None:
        super().__init__(name="fake nodes")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        outputs = outputs or Outputs()
        files = ModelFiles(outputs.model)
        self.nodes = [
            FakeNode(
                f"n{number}",
                role,
                context=self._context,
                speed=speed,
                num_pages=num_pages,
                files=files,
                output=outputs.output,
            )  # type: ignore[arg-type]
            for number, role in enumerate(roles)
        ]
        self._stopped = threading.Event()
        self._agents = [NodeAgent([bootstrap]) for _ in roles]
        for agent, node in zip(self._agents, self.nodes, strict=True):
            agent.start(node.card("fake", outputs.max_len, outputs.vocab_size))
        self.start()

    def run(self) -> None:
        poller = zmq.Poller()
        while not self._stopped.is_set():
            known = set(dict(poller.sockets))
            for socket in [socket for node in self.nodes for socket in node.sockets()]:
                if socket not in known:
                    poller.register(socket, zmq.POLLIN)
            poller.poll(2)
            for node in self.nodes:
                node.turn()

    def digests(self) -> dict[str, str]:
        """By incarnation, of what each node holds now."""
        return {node.me.incarnation: digest_of(node.pages.snapshot()) for node in self.nodes}

    def close(self) -> None:
        self._stopped.set()
        self.join(STOP_S)
        for agent in self._agents:
            agent.stop()
        for node in self.nodes:
            node.close()
        self._context.destroy(0)


class RouterProcess:
    """`pdcluster-router` as a user starts it."""

    def __init__(
        self, bootstrap: str, *arguments: str, open_files: int | None = None, trust: TlsTrust | None = None
    ) -> None:
        """open_files: its limit, None for this process's own. trust: None: it speaks no TLS."""
        read_end, write_end = os.pipe()
        own = [
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--bootstrap",
            bootstrap,
            "--log-level",
            "warning",
        ]
        argv = [sys.executable, "-m", "pdcluster_router.cli", *own, *arguments, "--ready-fd", str(write_end)]
        if open_files is not None:
            argv = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(open_files), *argv]
        self.process = subprocess.Popen(argv, pass_fds=[write_end], cwd=Path(__file__).parents[3])
        os.close(write_end)
        with os.fdopen(read_end, "rb") as announced:
            line = announced.readline()
        if not line:
            raise AssertionError(f"the router ended with {self.process.wait()} before it was ready")
        facts = json.loads(line)
        self.facts: dict[str, Any] = facts
        self.url, self.grpc = f"{'http' if trust is None else 'https'}://{facts['address']}", facts["grpc"]
        self.trust = trust
        if trust is None:
            self._channel = grpc.insecure_channel(facts["admin"])
        else:
            named = (("grpc.ssl_target_name_override", trust.name),)
            self._channel = grpc.secure_channel(
                facts["admin"], grpc.ssl_channel_credentials(read_roots(trust.ca)), named
            )
        self.admin = stubs.AdminStub(self._channel)

    def worker(self, number: int) -> psutil.Process:
        """The process of a worker, waited for."""
        return self._child(lambda child: child.name().endswith(f"-{number}"))

    def spare(self) -> psutil.Process:
        """The process that becomes the next worker, waited for."""
        return self._child(lambda child: spare.__name__ in child.cmdline() and child.name().startswith("python"))

    def _child(self, is_wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
        found: list[psutil.Process] = []

        def look() -> bool:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if is_wanted(child):
                        found.append(child)
            return bool(found)

        until(look)
        return found[0]

    def get(self, path: str) -> httpx.Response:
        """What the API answers, over a connection of its own."""
        verify = True if self.trust is None else client_context(self.trust.ca)
        with httpx.Client(verify=verify, trust_env=False, timeout=60.0) as client:
            extensions = {} if self.trust is None else {"sni_hostname": self.trust.name}
            return client.get(f"{self.url}{path}", extensions=extensions)

    def metrics(self) -> dict[str, float]:
        reply = self.get("/metrics")
        assert reply.status_code == 200, reply.text
        lines = [line.rpartition(" ") for line in reply.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def views(self) -> dict[str, dict[str, str]]:
        """worker → incarnation → digest of what it knows the node to hold; of exact views only."""
        cache = self.admin.GetCache(pb.GetCacheRequest(digests=True), timeout=60)
        views = {view.worker: view.nodes for view in cache.views} or {"": cache.nodes}
        return {
            worker: {node.incarnation: node.digest for node in nodes if node.is_exact}
            for worker, nodes in views.items()
        }

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        finally:
            self._channel.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def fake_cluster(
    roles: list[str], speed: Speed, num_pages: int = 4096, outputs: Outputs | None = None
) -> Iterator[tuple[str, FakeNodes]]:
    """Gives the bootstrap's address, too."""
    read_end, write_end = os.pipe()
    argv = [
        sys.executable,
        "-m",
        "pdcluster.cli",
        "bootstrap",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "warning",
        "--ready-fd",
        str(write_end),
    ]
    bootstrap = subprocess.Popen(argv, pass_fds=[write_end], cwd=Path(__file__).parents[3])
    os.close(write_end)
    nodes = None
    try:
        with os.fdopen(read_end, "rb") as announced:
            address = str(json.loads(announced.readline())["address"])
        nodes = FakeNodes(address, roles, speed, num_pages, outputs)
        yield address, nodes
    finally:
        if nodes is not None:
            nodes.close()
        bootstrap.terminate()
        bootstrap.wait(STOP_S)


def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> float:
    """Seconds until it holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"{condition} does not hold after {timeout_s:g} s"
        time.sleep(0.01)
    return time.monotonic() - started

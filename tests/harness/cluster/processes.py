"""Real clusters for tests: `pdcluster up` as a user starts it, with real processes, sockets and memory; and what it
leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

READY = re.compile(r"ready in [\d.]+ s: (http://\S+)/v1\s+grpc (\S+)\s+admin (\S+)\s+model (\S+)")
READY_S = 120.0
IDLE_S = 60.0
# In the environment of a cluster's processes, so that they are known when nobody is left to ask who started them.
MARK = "PROCESS_OF_TEST"

# For clusters in which nobody shall be lost, whatever else the machine does.
PATIENT = [f"--set={who}.lease_s=60" for who in ("node", "router", "bootstrap")] + [
    "--set=router.stages.handshake_s=60"
]


EXACT = ("--set", "node.dtype=float32", "--set", "node.kv.memory_bytes=64MiB", "--set", "router.mode=remote")


class Up:
    """One running `pdcluster up`. Its output is kept in `lines`. python: an interpreter that has pdcluster."""

    def __init__(self, *arguments: str, python: str = sys.executable, ready_s: float = READY_S) -> None:
        argv = [
            python,
            "-m",
            "pdcluster.cli",
            "up",
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
            *(() if any("router.console" in each for each in arguments) else ("--set=router.console=none",)),
            *arguments,
        ]
        self.mark = uuid.uuid4().hex
        where, environment = Path(__file__).parents[3], {**os.environ, MARK: self.mark}
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=where, env=environment
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(ready_s)
        match = next((found for line in self.lines if (found := READY.search(line))), None)
        if match is None:
            self.stop()
            raise AssertionError("up did not become ready:\n" + self.output())
        self.url, self.grpc, self.admin, self.model = match.groups()
        self.client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if READY.search(line):
                self._ready.set()
        self._ready.set()

    @property
    def console(self) -> str:
        """Where its page is."""
        return self._url_of("console")

    @property
    def control(self) -> str:
        """Where trainers call."""
        return self._url_of("control")

    def _url_of(self, name: str) -> str:
        """It is said right behind the ready line."""
        deadline = time.monotonic() + READY_S
        while not (said := [line for line in self.lines if line.startswith(f"{name} http")]):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return said[0].removeprefix(f"{name} ")

    def output(self) -> str:
        return "\n".join(self.lines)

    # ------------------------------------------------------------ its processes

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def survivors(self) -> list[psutil.Process]:
        """Every process that belongs to this cluster, whoever is its parent by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def pid_of(self, node: str) -> int:
        """The process of a node by its name, waited for."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for child in self.children():
                with contextlib.suppress(psutil.Error):
                    argv = child.cmdline()
                    if "--name" in argv and argv[argv.index("--name") + 1] == node:
                        return child.pid
            time.sleep(0.05)
        raise AssertionError(f"no process of {node} in:\n{self.output()}")

    def kill(self, node: str) -> int:
        pid = self.pid_of(node)
        os.kill(pid, signal.SIGKILL)
        return pid

    # ------------------------------------------------------------ what it says

    def complete(self, prompt: str | list[int], max_tokens: int, **fields: object) -> dict[str, object]:
        """A greedy completion with token ids; raises on any status but 200."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        reply = self.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return {**reply.json(), "headers": dict(reply.headers)}

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name with labels."""
        samples: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def node_pages(self) -> dict[tuple[str, str], float]:
        """(node, state) → pages."""
        pattern = re.compile(r'pdcluster_node_kv_pages\{node="([^"]+)",role="[^"]+",state="([^"]+)"\}')
        return {
            (found[1], found[2]): value for name, value in self.metrics().items() if (found := pattern.fullmatch(name))
        }

    def wait_idle(self, timeout_s: float = IDLE_S) -> None:
        """Until every node reports 0 pages used, quarantined and pinned, and no slot taken."""
        deadline = time.monotonic() + timeout_s
        while True:
            busy = {
                key: value
                for key, value in self.node_pages().items()
                if key[1] in ("used", "quarantined", "pinned") and value
            }
            busy |= {
                key: value
                for key, value in self.metrics().items()
                if key.startswith("pdcluster_node_slots_used") and value
            }
            if not busy:
                return
            assert time.monotonic() < deadline, f"not idle: {busy}\n{self.output()}"
            time.sleep(0.1)

    def wait_nodes(self, count: int, timeout_s: float = 180.0) -> None:
        """A node that was killed comes back at another address, so its name is taken until its lease ends."""
        deadline = time.monotonic() + timeout_s
        while sum(name.startswith("pdcluster_node_up{") for name in self.metrics()) != count:
            assert time.monotonic() < deadline, f"there are not {count} nodes:\n{self.output()}"
            time.sleep(0.1)

    # ------------------------------------------------------------ its end

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 90.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(5)
            if self.process.stdout is not None:
                self.process.stdout.close()


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Up]:
    up = Up(*arguments)
    try:
        yield up
    finally:
        up.client.close()
        up.stop()


def abandoned_memory() -> set[str]:
    """Names in /dev/shm that no living process has mapped or open. Others may run beside this test."""
    names = set(os.listdir("/dev/shm"))
    for pid in psutil.pids():
        used = "\n".join(_used_files(pid))
        names -= {name for name in names if f"/dev/shm/{name}" in used}
    return names


def _used_files(pid: int) -> Iterator[str]:
    """What a process has mapped and open, as far as it lives."""
    with contextlib.suppress(OSError):
        yield Path(f"/proc/{pid}/maps").read_text()
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{entry}")


def wait_nothing_abandoned(before: set[str]) -> None:
    """Nobody has it for a moment between making and mapping it."""
    deadline = time.monotonic() + IDLE_S
    while left := abandoned_memory() - before:
        assert time.monotonic() < deadline, f"abandoned in /dev/shm: {left}"
        time.sleep(0.1)


def listening_ports(pids: set[int]) -> set[int]:
    """TCP ports that any of these processes listens on."""
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids}


def make_prompts(count: int, seed: int, vocab: int = 500) -> list[list[int]]:
    """Mixed lengths; some share a prefix of several pages with others."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, vocab) for _ in range(200)]
    prompts = []
    for _ in range(count):
        own = [rng.randrange(10, vocab) for _ in range(rng.choice([1, 5, 31, 32, 33, 90, 250, 400]))]
        prompts.append((shared[: rng.choice([0, 0, 40, 128, 200])]) + own)
    return prompts


def ask(up: Up, prompt: list[int], count: int, **fields: object) -> tuple[list[int], dict]:
    reply = up.complete(prompt, count, **fields)
    return reply["choices"][0]["token_ids"], reply

"""The images as Kubernetes would run them: not root, read-only, without capabilities, with limits of CPU and memory.

Needs podman and the images of `make images`. Containers share the machine's network, because none can be made here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pdcluster.core.version import VERSION

ENVIRONMENT = {"STORAGE_DRIVER": "vfs", **os.environ}
LIMITS = (
    "--read-only", "--user", "65532:65532", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "host",
    "--tmpfs", "/cache:mode=1777,exec", "--tmpfs", "/tmp:mode=1777", "--ulimit", "nofile=10000:10000", "--ulimit", "nproc=4096:4096",
)  # fmt: skip
READY_S = 240.0
NUM_STREAMED = 1500


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(
        ("podman", "--runtime", "runc", *words), capture_output=True, text=True, env=ENVIRONMENT, timeout=120.0, check=False
    )  # fmt: skip
    assert done.returncode == 0 or not check, f"podman {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def has_images() -> bool:
    if shutil.which("podman") is None:
        return False
    return all(
        subprocess.run(("podman", "image", "exists", f"localhost/pdcluster/{name}:{VERSION}"), env=ENVIRONMENT, check=False).returncode == 0
        for name in ("router", "node")
    )  # fmt: skip


pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_images(), reason="podman or the images are missing; make images"),
]


class Containers:
    """Containers of one cluster, with names of their own."""

    def __init__(self) -> None:
        self.prefix = f"pdtest-{secrets.token_hex(3)}"
        self.names: list[str] = []

    def run(self, name: str, image: str, cpus: str, memory: str, *command: str) -> None:
        full = f"{self.prefix}-{name}"
        self.names.append(full)
        podman(
            "run",
            "-d",
            "--name",
            full,
            *LIMITS,
            "--cpus",
            cpus,
            "--memory",
            memory,
            f"localhost/pdcluster/{image}:{VERSION}",
            *command,
        )

    def restart(self, name: str) -> None:
        """SIGTERM, and the same again when it has ended by itself."""
        full = f"{self.prefix}-{name}"
        podman("stop", "-t", "90", full)
        assert podman("inspect", "-f", "{{.State.ExitCode}}", full) == "0", f"{name} did not drain"
        podman("start", full)

    def kill(self, name: str) -> None:
        podman("kill", "-s", "KILL", f"{self.prefix}-{name}")

    def start(self, name: str) -> None:
        podman("start", f"{self.prefix}-{name}")

    def within(self, name: str, *command: str) -> str:
        return podman("exec", f"{self.prefix}-{name}", *command)

    def logs(self, name: str) -> str:
        done = subprocess.run(
            ("podman", "logs", f"{self.prefix}-{name}"), capture_output=True, text=True, env=ENVIRONMENT, check=False
        )
        return done.stdout + done.stderr


ROUTERS = {"router-0": "127.0.0.1:18000", "router-1": "127.0.0.1:18001"}
HEALTH = {"bootstrap": 18080, "prefill": 18081, "decode": 18082, "router-0": 18083, "router-1": 18084}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Containers]:
    containers = Containers()
    try:
        containers.run(
            "bootstrap",
            "router",
            "0.5",
            "256m",
            "pdcluster",
            "bootstrap",
            "--listen",
            "127.0.0.1:18998",
            *health("bootstrap"),
        )
        for number, role in enumerate(("prefill", "decode")):
            containers.run(
                role, "node", "1", "2g", "pdcluster", "node", "--role", role, "--name", role, "--bootstrap", "127.0.0.1:18998",
                "--listen", f"127.0.0.1:{18100 + 10 * number}", f"--set=node.transfer.port={18101 + 10 * number}",
                "--set=node.transfer.backend=tcp", "--set=node.deterministic=true", *health(role),
            )  # fmt: skip
        for number, (name, address) in enumerate(ROUTERS.items()):
            containers.run(
                name, "router", "1", "1g", "pdcluster-router", "--name", name, "--bootstrap", "127.0.0.1:18998", "--http", address,
                "--grpc", "none", "--admin", f"127.0.0.1:{18052 + number}", "--mode", "remote", *health(name),
            )  # fmt: skip
        for name in HEALTH:
            until_ready(containers, name)
        yield containers
    finally:
        for name in containers.names:
            podman("rm", "-f", "-t", "5", name, check=False)


def health(name: str) -> tuple[str, str]:
    return "--health", f"127.0.0.1:{HEALTH[name]}"


def until_ready(containers: Containers, name: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.TransportError), httpx.Client(trust_env=False, timeout=5.0) as client:
            reply = client.get(f"http://127.0.0.1:{HEALTH[name]}/readyz")
            if reply.status_code == 200 and reply.json().get("can_serve", True):
                return
        assert time.monotonic() < deadline, f"{name} is not ready:\n{containers.logs(name)[-3000:]}"
        time.sleep(0.2)


def tokens(router: str, prompt: str, num_output: int, begun: threading.Event | None = None) -> list[int]:
    """A greedy answer, streamed. begun: set with its first token."""
    body = {
        "model": "pystdlib-3m", "prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    found: list[int] = []
    url = f"http://{ROUTERS[router]}/v1/completions"
    with httpx.Client(trust_env=False, timeout=120.0) as client, client.stream("POST", url, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    found += choice.get("token_ids") or []
                if begun is not None and found:
                    begun.set()
    return found


def test_processes_run_without_rights_and_see_their_limits(cluster: Containers) -> None:
    for name in ("bootstrap", "prefill", "router-0"):
        assert cluster.within(name, "id", "-u") == "65532"
        assert cluster.within(name, "sh", "-c", "touch /file 2>/dev/null || echo refused") == "refused"
        assert "CapEff:\t0000000000000000" in cluster.within(name, "cat", "/proc/1/status")
    code = (
        "from pdcluster.processes.control_groups import usable_cores; from pdcluster.processes.free_memory import free_memory; "
        "print(usable_cores(), free_memory().num_bytes < (2 << 30))"
    )
    assert cluster.within("prefill", "python3", "-c", code) == "1 True"
    pages = int(re.findall(r"(\d+) pages", cluster.logs("decode"))[0])
    assert 4096 < pages < 16_384, "the KV pool is half of what the limit leaves, and not the usual GiB"


def test_an_answer_goes_over_both_nodes(cluster: Containers) -> None:
    assert len(tokens("router-0", "def read_lines(path):", 16)) == 16
    text = httpx.get(f"http://{ROUTERS['router-0']}/metrics", trust_env=False).text
    assert 'mode="remote"' in text


def test_a_restart_of_each_by_sigterm_loses_nothing(cluster: Containers) -> None:
    """As a rolling upgrade does. Clients use a router that is not restarted, as a Service would see to."""
    prompts = [f"def function_{number}(path):" for number in range(4)]
    twins = {prompt: tokens("router-0", prompt, 120) for prompt in prompts}
    is_over, serving, num_right = threading.Event(), ["router-0", "router-1"], [0]

    def ask_on(prompt: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            assert tokens(serving[number % len(serving)], prompt, 120) == twins[prompt]
            num_right[0] += 1

    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(ask_on, prompt) for prompt in prompts]
        try:
            for name in ("bootstrap", "prefill", "decode"):
                cluster.restart(name)
                until_ready(cluster, name)
                until_ready(cluster, "router-0")
            for name in ROUTERS:
                serving.remove(name)  # its Service sends it nothing new; what runs there ends
                cluster.restart(name)
                until_ready(cluster, name)
                serving.append(name)
        finally:
            is_over.set()
        for each in running:
            each.result(120.0)
    assert num_right[0] > len(prompts)


def test_a_killed_router_cuts_only_its_own_connections(cluster: Containers) -> None:
    with ThreadPoolExecutor(2) as pool:
        begun = {name: threading.Event() for name in ROUTERS}
        own, other = (pool.submit(tokens, name, "def a(b):", NUM_STREAMED, begun[name]) for name in ROUTERS)
        assert all(each.wait(60.0) for each in begun.values())
        cluster.kill("router-0")
        assert len(other.result(120.0)) == NUM_STREAMED
        with pytest.raises(httpx.TransportError):
            own.result(120.0)
    cluster.start("router-0")
    until_ready(cluster, "router-0")
    assert len(tokens("router-0", "def a(b):", 8)) == 8

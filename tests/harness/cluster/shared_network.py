"""A cluster as it runs on a network that others use, too: a key between all processes, tenants at the API, a token at
the Admin service, KV over tcp. Every port that it listens on has a name."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from child_cluster import Processes

from tests.chaos.cluster import ChildProcess

LIMIT_S = 60.0
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
TENANTS = f"""
[alice]
keys = ["{ALICE}"]
[bob]
keys = ["{BOB}"]
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def secret_file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


class SharedNetwork:
    """Use as `async with`. One bootstrap, nodes p0 and d0, one router."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = Processes(folder)
        self.key_file = secret_file(folder / "cluster.key", secrets.token_hex(32))
        self.token = secrets.token_hex(16)
        self.token_file = secret_file(folder / "admin.token", self.token)
        self.tenants_file = secret_file(folder / "tenants.toml", TENANTS)
        # By name: where each service listens.
        self.ports: dict[str, int] = {}
        self.children: dict[str, ChildProcess] = {}

    async def __aenter__(self) -> SharedNetwork:
        try:
            await self._start()
        except BaseException:
            self.processes.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.processes.kill()

    def key_of(self, who: str, key_file: Path | None = None) -> str:
        return f"--set={who}.security.cluster_key_file={key_file or self.key_file}"

    async def _start(self) -> None:
        root = Path(__file__).parents[3]
        bootstrap = self.processes.make(
            "bootstrap", root, "pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0", self.key_of("bootstrap")
        )
        await bootstrap.start()
        self.children["bootstrap"] = bootstrap
        self.ports["bootstrap"] = port_of(bootstrap.address)
        nodes = [self.start_node(f"{role[0]}0", role) for role in ("prefill", "decode")]
        await asyncio.gather(*nodes)
        self.children["router"] = router = self.processes.make(
            "router", root, "pdcluster_router.cli", "--name", "router", "--bootstrap", bootstrap.address,
            "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0",
            "--tenants", str(self.tenants_file), "--set=router.health=127.0.0.1:0",
            f"--set=router.admin_token_file={self.token_file}", "--set=router.mode=remote", self.key_of("router"),
        )  # fmt: skip
        await router.start()
        self.ports["http"] = port_of(router.address)
        for name in ("grpc", "admin", "health"):
            self.ports[name] = port_of(router.facts[name])
        await self.until_ready()

    async def start_node(self, name: str, role: str) -> ChildProcess:
        kv = free_port()
        node = self.processes.make(
            name, Path(__file__).parents[3], "pdcluster.cli", "node", "--role", role, "--name", name,
            "--bootstrap", f"127.0.0.1:{self.ports['bootstrap']}", "--transfer", "tcp", "--threads", "1",
            "--deterministic", "--set=node.kv.memory_bytes=64MiB", f"--set=node.transfer.port={kv}",
            "--set=node.health=127.0.0.1:0", self.key_of("node"),
        )  # fmt: skip
        self.children[name] = node
        await node.start()
        self.ports |= {f"{name} link": port_of(node.address), f"{name} kv": kv}
        self.ports[f"{name} health"] = port_of(node.facts["health"])
        return node

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    def client(self, key: str | None = ALICE) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=LIMIT_S)

    async def until_ready(self) -> None:
        async with self.client() as client, asyncio.timeout(LIMIT_S):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.1)

    async def complete(self, client: httpx.AsyncClient, prompt: str = "def f(", max_tokens: int = 8) -> dict[str, Any]:
        """A greedy completion whose KV crosses from p0 to d0. Raises AssertionError for any status but 200."""
        body = {"model": "pystdlib-3m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    # ------------------------------------------------------------ what it uses

    def memory_bytes(self) -> dict[str, int]:
        return {name: psutil.Process(child.pid).memory_info().rss for name, child in self.children.items()}

    def descriptors(self) -> dict[str, int]:
        return {name: psutil.Process(child.pid).num_fds() for name, child in self.children.items()}

    def settled_descriptors(self, before: dict[str, int], within_s: float) -> dict[str, int]:
        """What they have once none has more than before; at the latest after so long."""
        until = time.monotonic() + within_s
        while any(now > before[name] for name, now in self.descriptors().items()) and time.monotonic() < until:
            time.sleep(0.2)
        return self.descriptors()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])

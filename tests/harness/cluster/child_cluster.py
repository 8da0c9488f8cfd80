"""A cluster of single processes for tests, which may run different versions of the code and come and go one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdcluster.core.messages import Role
from tests.chaos.cluster import ROOT, ChildProcess

PORTS = ("--http", "127.0.0.1:0", "--grpc", "none", "--admin", "127.0.0.1:0")


class Processes:
    """Children of any version of the code, each started by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[ChildProcess] = []

    def make(self, name: str, source: Path, *argv: str) -> ChildProcess:
        child = ChildProcess(name, argv, self.folder / f"{name}.log", source)
        self.children.append(child)
        return child

    async def bootstrap(self, name: str, source: Path = ROOT) -> str:
        child = self.make(name, source, "pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0")
        await child.start()
        return child.address

    def node(self, name: str, bootstrap: str, source: Path = ROOT, role: Role = "mixed") -> ChildProcess:
        return self.make(
            name, source, "pdcluster.cli", "node", "--role", role, "--name", name, "--bootstrap", bootstrap,
            "--set=node.kv.memory_bytes=64MiB", "--threads", "1",
        )  # fmt: skip

    async def router(self, name: str, bootstrap: str, source: Path = ROOT, more: Sequence[str] = ()) -> ChildProcess:
        child = self.make(name, source, "pdcluster_router.cli", "--name", name, "--bootstrap", bootstrap, *more)
        await child.start(*PORTS)
        return child

    def kill(self) -> None:
        for child in self.children:
            child.signal(9)
            if child.process is not None:
                child.process.wait()

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

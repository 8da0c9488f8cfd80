"""A writer's and a reader's end of each transfer backend in this process, for the contract tests."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
import transfer_peer
from fake_backend import FakeBackend, FakeNetwork
from transfer_memory import Memory
from transfer_peer import READER, SEALED, WRITER

from pdcluster.settings.config import set_library_environment
from pdcluster.transfer.backends.base import Backend, Handle, Peer, Permit, Stamp, WriteStatus
from pdcluster.transfer.backends.staged.backend import StagedBackend
from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine, environment
from pdcluster.transfer.backends.staged.nixl import PACKAGES, NixlEngine
from pdcluster.transfer.backends.staged.nixl import environment as nixl_environment
from pdcluster.transfer.backends.staged.staging import StagedSettings, TransferLibrary
from pdcluster.transfer.layout.spans import CopyRun

NBYTES = 1 << 20
# Ends the name of a staged backend whose own sockets are sealed.
SEALED_NOTICES = "+sealed"
HAS_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
REAL = (
    "shm",
    "tcp",
    SEALED,
    "mooncake",
    pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the package nixl-cu12 is not installed")),
)


def eventually(condition: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


class Ends:
    """A writer's and a reader's backend in this process, each with a region of NBYTES."""

    def __init__(self, name: str, nbytes: int = NBYTES) -> None:
        self.name = name
        network = FakeNetwork(time.monotonic)
        self._create: Callable[[Peer], Backend] = (
            (lambda peer: FakeBackend(network, peer)) if name == "fake" else (lambda peer: start(name, peer))
        )
        self.source, self.target = Memory(nbytes), Memory(nbytes)
        self.source.bytes[:] = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8)
        self.writer, self.reader = self._create(WRITER), self._create(READER)
        self.writer.register(self.source.region)
        self.reader.register(self.target.region)
        self.trial = itertools.count(1)

    def connect(self) -> None:
        self.writer.connect(READER, self.reader.advert())

    def permit(self, *ranges: tuple[int, int], nonce: int = 7, writer: Peer = WRITER) -> None:
        self.reader.permit(Permit(nonce, writer, 0, ranges if ranges else ((0, self.target.region.nbytes),)))

    def write(self, *runs: CopyRun, nonce: int = 7, chunk: int = 0, region: int = 0) -> Handle:
        stamp = Stamp(nonce, chunk, next(self.trial), sum(run.nbytes for run in runs))
        return self.writer.write(READER, 0, region, stamp, runs)

    def result(self, handle: Handle) -> WriteStatus:
        status = WriteStatus.PENDING

        def is_final() -> bool:
            nonlocal status
            status = self.writer.poll(handle)
            return status not in (WriteStatus.PENDING, WriteStatus.UNKNOWN)

        eventually(is_final, "an answer to the write")
        return status

    def arrivals(self, count: int) -> list[Stamp]:
        stamps: list[Stamp] = []

        def all_here() -> bool:
            stamps.extend(arrival.stamp for arrival in self.reader.arrivals())
            return len(stamps) >= count

        eventually(all_here, f"{count} arrivals")
        return stamps

    def restart_reader(self) -> None:
        self.reader.shutdown()
        self.reader = self._create(READER)
        self.reader.register(self.target.region)

    def close(self) -> None:
        self.writer.shutdown()
        self.reader.shutdown()
        self.source.drop()
        self.target.drop()


# Libraries take seconds to start and to end; in this process each end uses the same one all the time.
ENGINES: dict[tuple[str, Peer], TransferLibrary] = {}


def start(name: str, peer: Peer) -> Backend:
    library = name.removesuffix(SEALED_NOTICES)
    if library not in ("mooncake", "nixl"):
        return transfer_peer.start(name, peer)
    settings = StagedSettings(block_bytes=1 << 20, blocks=8, is_sealed=library != name)
    set_library_environment((environment if library == "mooncake" else nixl_environment)(settings))
    if (library, peer) not in ENGINES:
        ENGINES[library, peer] = MooncakeEngine(settings) if library == "mooncake" else NixlEngine(peer)
    return StagedBackend(peer, library, ENGINES[library, peer], settings, owns_engine=False)

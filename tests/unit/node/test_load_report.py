"""What routers hear unasked: load when it changed, cache changes without gaps, everything at once when they come."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pdcluster.checkpoint.text_files import files_digest
from pdcluster.core.errors import ModelError
from pdcluster.core.messages import CacheDelta, FetchFile, Load, PathLoad
from pdcluster.kv.hashing import block_hashes
from pdcluster.kv.pages import PagePool
from pdcluster.node.reports.load_report import (
    CHUNK_BYTES,
    MAX_REPORTED_PEERS,
    ModelFiles,
    Reporter,
    by_reason,
    path_loads,
)
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.measure import MeasureSettings, Paths

FIRST, SECOND = Peer("router-1", "a"), Peer("router-2", "b")
IDLE = Load(0, 0, 0, 0, 8, 8, 0, 0, 0, 4, 0)


class World:
    def __init__(self) -> None:
        self.now = 10.0
        self.load = IDLE
        self.pages = PagePool(8, 4, 4)
        self.sent: list[tuple[Peer, object]] = []
        self.seen: dict[Peer, int] = {}
        self.reporter = Reporter(
            self.pages,
            lambda: self.load,
            interval_s=0.1,
            clock=lambda: self.now,
            seen=lambda router: self.seen.get(router, 0),
        )

    def send(self, to: Peer, message: object) -> None:
        self.sent.append((to, message))

    def cache(self, tokens: list[int]) -> bytes:
        hashes = block_hashes(tokens, block_tokens=4)
        (page,) = self.pages.allocate(1)
        self.pages.publish(page, hashes, None)
        self.pages.release([page])
        return hashes

    def take(self, kind: type) -> list[tuple[Peer, object]]:
        found = [each for each in self.sent if isinstance(each[1], kind)]
        self.sent.clear()
        return found


def test_a_router_that_comes_hears_everything_and_others_hear_nothing_twice() -> None:
    world = World()
    world.reporter.add(FIRST, world.send)
    known = world.cache([1, 2, 3, 4])
    world.sent.clear()
    world.reporter.add(SECOND, world.send)
    deltas = world.take(CacheDelta)
    assert deltas == [(FIRST, CacheDelta(1, False, known, b"")), (SECOND, CacheDelta(1, True, known, b""))]
    world.reporter.report(world.send)
    assert world.take(CacheDelta) == []


def test_load_is_reported_when_it_changed_and_not_more_often_than_the_interval() -> None:
    world = World()
    world.reporter.add(FIRST, world.send)
    world.reporter.report(world.send)
    world.sent.clear()
    world.now += 1.0
    world.reporter.report(world.send)
    assert world.take(Load) == []
    world.load = replace(IDLE, running=1)
    world.reporter.report(world.send)
    assert len(world.take(Load)) == 1
    world.load = replace(IDLE, running=2)
    world.reporter.report(world.send)
    assert world.take(Load) == [] and world.reporter.next_deadline() == pytest.approx(world.now + 0.1)
    world.now += 0.2
    world.reporter.report(world.send)
    assert len(world.take(Load)) == 1


def test_a_router_that_left_hears_nothing() -> None:
    world = World()
    world.reporter.add(FIRST, world.send)
    world.reporter.remove(FIRST)
    world.sent.clear()
    world.cache([1, 2, 3, 4])
    world.load = replace(IDLE, running=3)
    world.now += 1.0
    world.reporter.report(world.send)
    assert world.sent == []


def test_card_files_come_in_pieces_and_nothing_else_comes(tmp_path: Path) -> None:
    big = bytes(range(256)) * (CHUNK_BYTES // 256) + b"end"
    (tmp_path / "tokenizer.json").write_bytes(big)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files = ModelFiles(tmp_path)
    first = files.chunk(FetchFile("tokenizer.json", 0))
    rest = files.chunk(FetchFile("tokenizer.json", len(first.data)))
    assert first.data + rest.data == big and first.total_bytes == len(big)
    assert files.digest == files_digest({"tokenizer.json": big})
    for name in ("model.safetensors", "../secret", "config.json"):
        assert files.chunk(FetchFile(name, 0)).total_bytes == 0


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="give a Hugging Face model directory"):
        ModelFiles(tmp_path)


def test_the_load_says_how_fast_kv_leaves_by_which_path_for_a_bounded_number_of_peers() -> None:
    paths = Paths(["shm", "tcp"], lambda: 1.0, measure=MeasureSettings(warm_writes=0, sample_writes=1))
    for number in range(MAX_REPORTED_PEERS + 8):
        paths.meet(Peer(f"d{number}", "b"), ["shm", "tcp"])
    last = Peer(f"d{MAX_REPORTED_PEERS + 7}", "b")
    paths.succeeded(last, "tcp", paths.begin(last, "tcp"), 1 << 20, (1 << 20) / 1.2345e9)
    for _ in range(3):
        paths.failed(last, "shm", paths.begin(last, "shm"))
    loads = path_loads(paths)
    assert len({load.peer for load in loads}) == MAX_REPORTED_PEERS
    assert loads[-2:] == (
        PathLoad(last.node, "shm", 0.0, "open", False),
        PathLoad(last.node, "tcp", 1.2e9, "closed", True),
    )


def test_counters_are_reported_in_a_fixed_order() -> None:
    assert by_reason({"lost": 2, "failed": 1}) == (("failed", 1), ("lost", 2))

"""Which models a router serves: text files come from nodes; faults of a node are tried again, those of the files are
told and not tried for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level_files

from pdcluster.bootstrap.card import NodeCard
from pdcluster.checkpoint.text_files import files_digest
from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import PROTOCOL_VERSION, FileChunk
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster_router.cluster import models as module
from pdcluster_router.cluster.models import ModelRegistry

WAIT_S = 20.0
FINGERPRINT = Fingerprint("tiny", "0" * 32, PROTOCOL_VERSION, 32, KVLayout(1, 1, 32, 32, "bfloat16"))


class Nodes:
    """Nodes that serve text files, and fail as often as they are told to."""

    def __init__(self, files: dict[str, bytes], *names: str) -> None:
        self.files, self.version, self.failures, self.fetched = files, 1, 0, 0
        self._names = names
        self._changed = asyncio.Event()

    def refusal(self) -> str | None:
        return None

    def cards(self) -> Iterable[NodeCard]:
        digest = files_digest(self.files)
        return [
            NodeCard(
                name, f"{name}-boot", "mixed", f"{name}:1", "tiny", FINGERPRINT,
                max_len=64, vocab_size=420, num_pages=8, eos_ids=(), tokenizer_hash=digest, backends=(), device="cpu",
            )
            for name in self._names
        ]  # fmt: skip

    async def wait_for_change(self, seen: int) -> None:
        while self.version == seen:
            await self._changed.wait()
            self._changed.clear()

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk:
        self.fetched += 1
        if self.failures:
            self.failures -= 1
            raise NodeLost("gone for a while")
        data = self.files.get(name, b"")
        return FileChunk(name, offset, len(data), data[offset:])

    def change(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.version += 1
        self._changed.set()


async def until(condition: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_files_that_can_never_be_read_are_told_and_not_asked_for_again() -> None:
    nodes = Nodes(byte_level_files() | {"chat_template.jinja": b"{% for m in messages %}"}, "a", "b")
    models = ModelRegistry(nodes, None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.refusal)
    assert "cannot be served" in str(models.refusal()) and "template" in str(models.refusal())
    asked = nodes.fetched
    nodes.change(nodes.files)
    await asyncio.sleep(0.05)
    assert nodes.fetched == asked
    nodes.change(byte_level_files())  # nodes with other files came instead
    await until(models.models)
    assert models.refusal() is None
    loading.cancel()


async def test_a_node_that_is_lost_meanwhile_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    nodes = Nodes(byte_level_files(), "a")
    nodes.failures = 2
    models = ModelRegistry(nodes, None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.models)
    assert nodes.failures == 0 and models.refusal() is None
    loading.cancel()


async def test_a_tokenizer_of_its_own_that_is_not_there_is_told(tmp_path: Path) -> None:
    models = ModelRegistry(Nodes(byte_level_files(), "a"), tmp_path / "gone")
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.refusal)
    assert "gone holds none of tokenizer.json" in str(models.refusal())
    loading.cancel()


async def test_without_nodes_nothing_is_refused() -> None:
    assert ModelRegistry(Nodes(byte_level_files()), None).refusal() is None


async def test_named_templates_come_from_nodes() -> None:
    named = {
        "chat_template.jinja": b"default:{{ messages[0].content }}",
        "additional_chat_templates/tool_use.jinja": b"tools:{{ messages[0].content }}",
    }
    models = ModelRegistry(Nodes(byte_level_files() | named, "a"), None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.models)
    chat = [{"role": "user", "content": "hi"}]
    text = models.text("tiny")
    assert (text.render_chat(chat), text.render_chat(chat, tools=[{}])) == ("default:hi", "tools:hi")
    loading.cancel()

"""Adapters inside a fake vLLM: what is refused, how many there are, and that one leaves after its last request."""

from __future__ import annotations

import asyncio
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pdcluster.core.errors import BadRequest
from pdcluster.node.vllm.engine.adapters import EngineAdapters, adapter_files_digest


class FakeAdapterRequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str) -> None:
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


class FakeEngineDead(Exception):
    """In the place of vLLM's EngineDeadError."""


class FakeLlm:
    """fault: raised by the next load."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.fault: Exception | None = None
        self.on_load: Any = lambda: None

    async def add_lora(self, request: FakeAdapterRequest) -> bool:
        if self.fault is not None:
            raise self.fault
        self.on_load()
        self.loaded.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.loaded.discard(number)
        return True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLlm:
    request, exceptions = types.ModuleType("vllm.lora.request"), types.ModuleType("vllm.v1.engine.exceptions")
    request.LoRARequest = FakeAdapterRequest  # type: ignore[attr-defined]
    exceptions.EngineDeadError = FakeEngineDead  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, request.__name__, request)
    monkeypatch.setitem(sys.modules, exceptions.__name__, exceptions)
    return FakeLlm()


def adapter_at(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_adapter_leaves_vllm_after_its_last_request(llm: FakeLlm, tmp_path: Path) -> None:
    adapters = EngineAdapters(llm, 2)
    digest = await adapters.load(1, "sql", adapter_at(tmp_path / "a"))
    assert digest == adapter_files_digest(str(tmp_path / "a"))
    assert adapters.begin(0) is None
    for _ in range(2):
        request = adapters.begin(1)
        assert request is not None and request.lora_int_id == 1
    adapters.unload(1)
    await settled()
    assert llm.loaded == {1}
    with pytest.raises(BadRequest, match="unloaded"):
        adapters.begin(1)
    adapters.end(1)
    await settled()
    assert llm.loaded == {1}
    adapters.end(1)
    await settled()
    assert not llm.loaded
    adapters.unload(1)
    adapters.unload(9)


async def test_vllm_never_gets_more_than_it_keeps(llm: FakeLlm, tmp_path: Path) -> None:
    adapters = EngineAdapters(llm, 1)
    await adapters.load(1, "sql", adapter_at(tmp_path / "a"))
    adapters.begin(1)
    adapters.unload(1)
    with pytest.raises(BadRequest, match="max-cpu-loras"):
        await adapters.load(2, "sums", adapter_at(tmp_path / "b"))
    adapters.end(1)
    await settled()
    await adapters.load(3, "sums", adapter_at(tmp_path / "b"))
    assert llm.loaded == {3}


async def test_the_files_of_a_known_adapter_are_only_compared(llm: FakeLlm, tmp_path: Path) -> None:
    adapters, path = EngineAdapters(llm, 2), adapter_at(tmp_path / "a")
    digest = await adapters.load(1, "sql", path)
    assert await adapters.load(2, "sql", path, digest) == digest and llm.loaded == {1}
    with pytest.raises(BadRequest, match="unload it first"):
        await adapters.load(3, "sql", adapter_at(tmp_path / "b", b"others"), digest)
    assert llm.loaded == {1}


async def test_what_vllm_refuses_is_named_and_leaves_room(llm: FakeLlm, tmp_path: Path) -> None:
    adapters, path = EngineAdapters(llm, 1), adapter_at(tmp_path / "a")
    llm.fault = ValueError("LoRA rank 64 is greater than max_lora_rank 16")
    with pytest.raises(BadRequest, match=r"sql cannot be loaded: vLLM: LoRA rank 64"):
        await adapters.load(1, "sql", path)
    llm.fault = FakeEngineDead("gone")
    with pytest.raises(FakeEngineDead):
        await adapters.load(2, "sql", path)


async def test_files_that_change_while_they_are_loaded_are_refused(llm: FakeLlm, tmp_path: Path) -> None:
    adapters, path = EngineAdapters(llm, 1), adapter_at(tmp_path / "a")
    llm.on_load = lambda: adapter_at(tmp_path / "a", b"others")
    with pytest.raises(BadRequest, match="changed"):
        await adapters.load(1, "sql", path)
    assert not llm.loaded


async def test_an_engine_without_lora_refuses_by_name(llm: FakeLlm, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--enable-lora"):
        await EngineAdapters(llm, 0).load(1, "sql", adapter_at(tmp_path / "a"))


@pytest.mark.parametrize("lacks", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_without_one_of_the_files_is_no_adapter(tmp_path: Path, lacks: str) -> None:
    path = adapter_at(tmp_path / "a")
    (tmp_path / "a" / lacks).unlink()
    with pytest.raises(BadRequest, match=lacks):
        adapter_files_digest(path)


@pytest.mark.parametrize("path", ["", "relative", "/nowhere/at/all"])
def test_a_path_that_is_no_directory_is_refused(path: str) -> None:
    with pytest.raises(BadRequest, match="no absolute path"):
        adapter_files_digest(path)


@pytest.mark.parametrize("path", ["/" + "x" * 300, "/a\0b"])
def test_a_path_that_cannot_be_looked_at_is_refused(path: str) -> None:
    with pytest.raises(BadRequest):
        adapter_files_digest(path)


def test_a_pipe_is_no_file_of_an_adapter(tmp_path: Path) -> None:
    path = adapter_at(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "a" / "adapter_config.json")
    with pytest.raises(BadRequest, match="adapter_config"):
        adapter_files_digest(path)


async def test_a_load_that_takes_too_long_ends_and_leaves_room(
    llm: FakeLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdcluster.node.vllm.engine.adapters.LOAD_S", 0.05)
    adapters, path = EngineAdapters(llm, 1), adapter_at(tmp_path / "a")
    add = llm.add_lora

    async def never(request: FakeAdapterRequest) -> bool:
        await asyncio.Event().wait()
        return True

    llm.add_lora = never  # type: ignore[method-assign]
    with pytest.raises(BadRequest, match="within"):
        await adapters.load(1, "sql", path)
    await settled()
    llm.add_lora = add  # type: ignore[method-assign]
    monkeypatch.setattr("pdcluster.node.vllm.engine.adapters.LOAD_S", 60.0)
    await adapters.load(2, "sql", path)
    assert llm.loaded == {2}


def test_the_digest_covers_both_files(tmp_path: Path) -> None:
    first = adapter_files_digest(adapter_at(tmp_path / "a"))
    assert first == adapter_files_digest(adapter_at(tmp_path / "b"))
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 8}')
    assert (
        len({first, adapter_files_digest(str(tmp_path / "b")), adapter_files_digest(adapter_at(tmp_path / "c", b"w"))})
        == 3
    )

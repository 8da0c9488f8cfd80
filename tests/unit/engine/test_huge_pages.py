"""Huge pages behind mapped files: what is asked for, that a kernel which refuses changes nothing, and that bytes are the file's."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pdcluster.engine.huge_pages import HUGE_BYTES, mapped_bytes, read_in_huge_pages

needs_huge_pages = pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages to ask for")


def map_tensors(path: Path, nbytes: int) -> dict[str, torch.Tensor]:
    """Two tensors of half as many bytes each, mapped from a file of their own."""
    save_file({name: torch.full((nbytes // 4,), value, dtype=torch.bfloat16) for name, value in (("a", 1.0), ("b", 2.0))}, path)
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in ("a", "b")}


def is_asked(path: Path) -> bool:
    """Whether some mapping of the file has the kernel's flag for the advice."""
    return "hg" in lines_of(path, "VmFlags:")


def resident_kib(path: Path) -> int:
    return int(lines_of(path, "Rss:")[0])


def lines_of(path: Path, name: str) -> list[str]:
    """What the kernel says by that name of the mappings of a file."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == name and inside:
            found += rest
        elif not first.endswith(":"):
            inside = line.endswith(str(path))
    assert found, f"{path} is not mapped"
    return found


@needs_huge_pages
def test_the_mapping_of_large_weights_asks_for_huge_pages(tmp_path: Path) -> None:
    tensors = map_tensors(tmp_path / "large", 2 * HUGE_BYTES)
    assert not is_asked(tmp_path / "large")
    read_in_huge_pages(tensors.values())
    assert is_asked(tmp_path / "large")
    assert [float(tensors[name].float().mean()) for name in ("a", "b")] == [1.0, 2.0]


def test_large_weights_are_read_before_they_are_used(tmp_path: Path) -> None:
    tensors = map_tensors(tmp_path / "large", 2 * HUGE_BYTES)
    assert resident_kib(tmp_path / "large") < HUGE_BYTES >> 10  # its header was read
    read_in_huge_pages(tensors.values())
    assert resident_kib(tmp_path / "large") >= 2 * HUGE_BYTES >> 10


@needs_huge_pages
def test_weights_smaller_than_a_huge_page_ask_for_nothing(tmp_path: Path) -> None:
    tensors = map_tensors(tmp_path / "small", HUGE_BYTES // 4)
    read_in_huge_pages(tensors.values())
    assert not is_asked(tmp_path / "small")


def test_no_tensors_ask_for_nothing() -> None:
    read_in_huge_pages([])


def test_a_kernel_that_refuses_leaves_weights_and_bytes_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = map_tensors(tmp_path / "large", 2 * HUGE_BYTES)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    read_in_huge_pages(tensors.values())
    assert float(tensors["b"].float().mean()) == 2.0
    with mapped_bytes(tmp_path / "large") as data:
        assert data == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("content", [b"", b"a", bytes(range(256)) * 40])
def test_mapped_bytes_are_those_of_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with mapped_bytes(tmp_path / "file") as data:
        assert bytes(data) == content

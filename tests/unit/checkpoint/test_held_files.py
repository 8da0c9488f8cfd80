"""Copies of weight files: what becomes of the files does not matter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pdcluster.checkpoint.bundled import path as bundled
from pdcluster.checkpoint.held_files import HeldFiles, is_settled, weight_files
from pdcluster.core.errors import ModelError


def tensor_of(path: Path) -> torch.Tensor:
    with safe_open(path, framework="pt", device="cpu") as file:
        return file.get_tensor("x")


def test_mapped_tensors_outlive_the_file_and_the_copy(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.arange(200_000)}, file)
    held = HeldFiles([file])
    kept = tensor_of(held.paths[0])
    os.truncate(file, 100)
    file.write_bytes(b"other")
    assert torch.equal(tensor_of(held.paths[0]), torch.arange(200_000))
    held.close()
    held.close()
    assert torch.equal(kept, torch.arange(200_000)) and not held.paths[0].exists()


def test_a_file_that_is_missing_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match="cannot be copied"):
        HeldFiles([tmp_path / "a", tmp_path / "b"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, copy = tmp_path / "a", os.sendfile
    file.write_bytes(bytes(1000))

    def shrinking(target: int, source: int, offset: int, count: int) -> int:
        os.truncate(file, 10)
        return copy(target, source, offset, count)

    monkeypatch.setattr(os, "sendfile", shrinking)
    with pytest.raises(ModelError, match="changed while it was read"):
        HeldFiles([file])


def test_files_that_nobody_rewrites_need_no_copy(tmp_path: Path) -> None:
    blob = tmp_path / "hub" / "models--a--b" / "blobs" / "0f3c"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"x")
    link = tmp_path / "hub" / "models--a--b" / "snapshots" / "main" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert is_settled(link) and all(map(is_settled, weight_files(bundled())))
    assert not is_settled(tmp_path / "model.safetensors")

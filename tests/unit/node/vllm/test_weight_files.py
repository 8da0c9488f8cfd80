"""The digest of weight files: equal for equal files, another one for any other byte or name."""

import threading
from pathlib import Path

import pytest

from pdcluster.node.vllm.engine.weight_files import ReadingStopped, weight_files_digest


def digest_of(directory: Path) -> str:
    return weight_files_digest(directory, threading.Event())


def written(directory: Path, **files: bytes) -> Path:
    directory.mkdir()
    for name, data in files.items():
        (directory / name.replace("__", ".")).write_bytes(data)
    return directory


def test_files_of_the_same_bytes_have_one_digest(tmp_path: Path) -> None:
    files = {"a__safetensors": b"weights", "config__json": b"{}", "README__md": b"anything"}
    first = digest_of(written(tmp_path / "a", **files))
    assert first == digest_of(written(tmp_path / "b", **{**files, "README__md": b"else"}))
    assert len(first) == 32


def test_another_byte_name_or_config_has_another_digest(tmp_path: Path) -> None:
    files = {"a__safetensors": b"weights", "config__json": b"{}"}
    found = {digest_of(written(tmp_path / "0", **files))}
    for number, changed in enumerate(
        ({"a__safetensors": b"weightz"}, {"config__json": b'{"a": 1}'}, {"b__safetensors": b""}), 1
    ):
        found.add(digest_of(written(tmp_path / str(number), **{**files, **changed})))
    assert len(found) == 4


def test_reading_stops_when_nobody_wants_the_digest(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(ReadingStopped):
        weight_files_digest(written(tmp_path / "a", a__safetensors=b"weights"), stop)

"""A digest of a model's weight files, so that nodes of other weights are told apart. vLLM loads them, not we."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

READ_BYTES = 8 << 20
PATTERNS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
THREADS = 4


class ReadingStopped(Exception):
    """Nobody wants the digest any more."""


def weight_files_digest(directory: Path, stop: threading.Event) -> str:
    """32 hex digits over names and bytes of weight files and config.json. Files cut another way have another digest.

    Raises ReadingStopped soon after `stop` is set: large models take minutes to read.
    """
    files = sorted({path for pattern in PATTERNS for path in directory.glob(pattern)})
    files += [path for path in (directory / "config.json",) if path.is_file()]
    whole = xxhash.xxh3_128()
    with ThreadPoolExecutor(THREADS) as pool:
        for path, digest in zip(files, pool.map(lambda path: _file_digest(path, stop), files), strict=True):
            whole.update(path.name.encode() + b"\0" + digest)
    return whole.hexdigest()


def _file_digest(path: Path, stop: threading.Event) -> bytes:
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            found.update(block)
            if stop.is_set():
                raise ReadingStopped
    return found.digest()

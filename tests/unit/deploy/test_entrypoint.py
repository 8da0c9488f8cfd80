"""The image's entrypoint: it brings the compiled kernels where they may be written, and says where it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[3] / "deploy" / "docker" / "entrypoint.sh"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """With a folder of kernels of its own."""
    (tmp_path / "seed" / "place").mkdir(parents=True)
    (tmp_path / "seed" / "place" / "kernel").write_text("compiled")
    made = tmp_path / "entrypoint.sh"
    made.write_text(ENTRYPOINT.read_text().replace("/opt/pdcluster/kernels", str(tmp_path / "seed")))
    return made


def run(script: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PDCLUSTER_CACHE_DIR": str(cache)}
    return subprocess.run(
        ("sh", str(script), "echo", "begun"), env=environment, capture_output=True, text=True, timeout=30.0, check=False
    )


def test_kernels_are_copied_once(script: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "pdcluster"
    for _ in range(2):
        assert (done := run(script, cache)).stdout == "begun\n" and done.stderr == ""
        assert (cache / "place" / "kernel").read_text() == "compiled"


def test_a_cache_that_cannot_be_written_is_named_and_the_command_runs(script: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    done = run(script, tmp_path / "cache" / "pdcluster")
    assert done.stdout == "begun\n" and done.returncode == 0
    assert "cannot be written" in done.stderr and "mount a volume" in done.stderr

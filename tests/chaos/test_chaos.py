"""Chaos by fixed seeds: nothing is wrong, lost, hung or left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_weights_that_change_under_kills_are_never_mixed(tmp_path: Path) -> None:
    """Half a minute of what `python -m tests.chaos --weights` does. It begins with a push in a pause, by its seed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'router'}"}
    command = [
        sys.executable, "-m", "tests.chaos", "--weights", "--minutes", "0.5", "--seed", "8", "--clients", "4", "--logs",
        str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "1 push in keep" in done.stdout, done.stdout[-6000:]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_minute_of_faults_loses_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'router'}"}
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "1", "--seed", "1", "--logs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_minute_of_faults_with_keys_and_tls_loses_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'router'}"}
    command = [
        sys.executable, "-m", "tests.chaos", "--minutes", "1", "--seed", "45", "--guarded", "--transfer", "tcp",
        "--logs", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_rolling_restart_of_everything_loses_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'router'}"}
    command = [sys.executable, "-m", "tests.chaos", "--rolling", "--seed", "1", "--logs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

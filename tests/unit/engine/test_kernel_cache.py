"""Several processes that fill one cache of compiled kernels."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdcluster.engine import kernel_cache
from pdcluster.engine.kernel_cache import SOURCES, filling, place_of


def test_a_second_one_waits_until_the_first_has_filled_it(tmp_path: Path) -> None:
    said: list[str] = []

    def second() -> None:
        with filling(tmp_path, "pairs"):
            said.append("second")

    with filling(tmp_path, "pairs"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        said.append("first")
    thread.join(10.0)
    assert said == ["first", "second"]


def test_other_kernels_of_the_same_files_wait_too(tmp_path: Path) -> None:
    """Kernels for float32 and for bfloat16 are variants of one function."""
    with filling(tmp_path, "float32"):
        entered = threading.Event()
        thread = threading.Thread(target=_enter, args=(tmp_path, "bfloat16", entered))
        thread.start()
        assert not entered.wait(0.3)
    thread.join(10.0)
    assert entered.is_set()


def _enter(place: Path, what: str, entered: threading.Event) -> None:
    with filling(place, what):
        entered.set()


def test_nobody_waits_for_what_is_there(tmp_path: Path) -> None:
    with filling(tmp_path, "pairs"):
        pass
    with filling(tmp_path, "float32"), filling(tmp_path, "pairs", wait_s=0.0):
        assert (tmp_path / "pairs.filled").exists()


def test_what_failed_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), filling(tmp_path, "pairs"):
        raise RuntimeError("does not compile")
    assert not (tmp_path / "pairs.filled").exists()


def test_one_that_takes_too_long_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with filling(tmp_path, "float32"), caplog.at_level(logging.WARNING), filling(tmp_path, "pairs", wait_s=0.0):
        assert "too long" in caplog.text
    assert not (tmp_path / "pairs.filled").exists()


def test_a_place_that_can_not_be_locked_is_no_reason_to_stop(tmp_path: Path) -> None:
    was_filled = None
    with pytest.raises(FileNotFoundError, match="what the block does there"), filling(tmp_path / "missing", "pairs"):
        was_filled = (tmp_path / "missing").exists()
        raise FileNotFoundError("what the block does there is its own affair")
    assert was_filled is False and not (tmp_path / "missing").exists()


def test_machines_of_other_kinds_have_other_places(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from pdcluster.engine.kernel_cache import place_of; print(place_of(Path({str(tmp_path)!r})), end='')"
    done = subprocess.run(["env", "NUMBA_CPU_NAME=generic", sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout).parent == tmp_path
    assert Path(done.stdout) != place_of(tmp_path)


def test_other_installations_of_the_same_sources_have_other_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba keeps the kernels of each apart, so what one has filled is not there for the other."""
    here, own = tmp_path / "other" / "engine", place_of(tmp_path)
    here.mkdir(parents=True)
    for name in SOURCES:
        shutil.copy(Path(kernel_cache.__file__).parent / f"{name}.py", here)
    monkeypatch.setattr(kernel_cache, "__file__", str(here / "kernel_cache.py"))
    assert place_of(tmp_path) != own


def test_what_another_numba_filled_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = place_of(tmp_path)
    monkeypatch.setattr("numba.__version__", "0.0")
    assert place_of(tmp_path) != own

"""Several processes that fill one cache of compiled kernels."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from pdcluster.engine.kernels.loader import load_kernels
from pdcluster.node.native.tensor_parallel.engine import RankSettings
from pdcluster.processes import kernel_cache
from pdcluster.processes.kernel_cache import (
    FRESH_S,
    MOST_PLACES,
    PACKAGE,
    SOURCES,
    UNUSED_S,
    filled,
    filling,
    forget_places,
    open_place,
    place_of,
)
from pdcluster.settings.config import UpConfig


def test_who_waits_for_another_that_compiles_gives_up_before_others_give_it_up() -> None:
    """It goes on without then, more slowly; who is ended before has no use of that."""
    assert min(UpConfig().ready_s, RankSettings(2).start_s) - 60.0 >= kernel_cache.WAIT_S


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


def test_a_place_that_can_be_read_but_not_written_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a read-only file system, though it was filled before; a test that runs as root can write everywhere
    else."""

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir / "tmp1"))

    place = open_place(tmp_path)
    with filling(place, "float32"):
        pass
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OSError, match=f"not written: Read-only file system: '{place}'"):
        open_place(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(tmp_path, "float32") is None
    assert "read but not written" in caplog.text and "plain torch" in caplog.text and "XDG_CACHE_HOME" in caplog.text


def test_a_place_that_others_may_write_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = open_place(tmp_path)
    for mode in (0o775, 0o757):
        (place / "kernel.nbi").write_bytes(b"somebody's code")
        place.chmod(mode)
        with caplog.at_level(logging.WARNING):
            assert open_place(tmp_path) == place
        assert not list(place.iterdir()) and place.stat().st_mode & 0o777 == 0o700
    assert "others may write" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_place_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = open_place(tmp_path)
    os.chown(place, 12345, -1)
    with pytest.raises(OSError, match="belongs to user 12345, whose code would run here"):
        open_place(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(tmp_path, "float32") is None
    assert "whose code would run here" in caplog.text and "XDG_CACHE_HOME" in caplog.text


def test_a_place_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    cache = tmp_path / "cache"
    cache.mkdir()
    place_of(cache).symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="no directory"):
        open_place(cache)


def test_machines_of_other_kinds_have_other_places(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from pdcluster.processes.kernel_cache import place_of; "
        f"print(place_of(Path({str(tmp_path)!r})), end='')"
    )
    done = subprocess.run(
        ["env", "NUMBA_CPU_NAME=generic", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(done.stdout).parent == tmp_path
    assert Path(done.stdout) != place_of(tmp_path)


def test_other_installations_of_the_same_sources_have_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba keeps the kernels of each apart, so what one has filled is not there for the other."""
    own = place_of(tmp_path)
    monkeypatch.setattr(kernel_cache, "SOURCES", copied(tmp_path / "other"))
    assert place_of(tmp_path) != own


def copied(folder: Path) -> tuple[Path, ...]:
    return tuple(shutil.copytree(source, folder / source.name) for source in SOURCES)


def test_places_are_of_all_sources_that_kernels_are_made_of() -> None:
    """numba looks at a function's own file only: of what was built in from one that is missing, an old version would be
    loaded."""
    root = PACKAGE.parent
    texts = {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text()
        for folder in SOURCES
        for path in folder.glob("*.py")
    }
    made = {name for name, text in texts.items() if re.search(r"^@(numba\.njit|intrinsic)", text, re.MULTILINE)}
    built_in = {
        other for name in made for other in re.findall(r"^from (pdcluster[\w.]+) import", texts[name], re.MULTILINE)
    }
    assert "pdcluster.engine.kernels.fused_step" in made
    assert "pdcluster.engine.kernels.layer_arrays" in built_in
    assert made | built_in <= set(texts)


def test_every_function_that_numba_keeps_lies_in_these_sources() -> None:
    """Elsewhere numba would take another content of the same size and time for the same."""
    keeping = {path for path in PACKAGE.rglob("*.py") if re.search(r"^@numba.*cache=True", path.read_text(), re.M)}
    assert keeping and {path.parent for path in keeping} <= set(SOURCES)


@pytest.mark.parametrize("name", ["new.py", "kernels/fused_step.py", "copying/copy_kernel.py"])
def test_a_place_is_of_what_the_sources_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One letter more or less counts, whatever the times."""
    sources = copied(tmp_path / "sources")
    monkeypatch.setattr(kernel_cache, "SOURCES", sources)
    before, folder = place_of(tmp_path), tmp_path / "sources"
    file = folder / name if "/" in name else sources[0] / name
    old = file.read_bytes() if file.exists() else b""
    file.write_bytes(old[:-2] + b"#\n")
    os.utime(file, (0, 0))
    assert place_of(tmp_path) != before


def test_what_another_numba_filled_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = place_of(tmp_path)
    monkeypatch.setattr("numba.__version__", "0.0")
    assert place_of(tmp_path) != own


# ---------------------------------------------------------------- places that nobody uses


def _place(cache: Path, number: int, age_s: float, name: str = "{:016x}") -> Path:
    place = cache / name.format(number)
    (place / "engine_0").mkdir(parents=True)
    (place / "engine_0" / "kernels.nbc").write_bytes(b"code")
    used = time.time() - age_s
    os.utime(place, (used, used))
    return place


def test_a_new_place_removes_those_that_nobody_used_for_long(tmp_path: Path) -> None:
    old, older = _place(tmp_path, 1, UNUSED_S + 60), _place(tmp_path, 2, 2 * UNUSED_S, name="engine_{:040x}")
    used = _place(tmp_path, 3, UNUSED_S - 60)
    other = _place(tmp_path, 4, 2 * UNUSED_S, name="bench-engine-{}")
    place = open_place(tmp_path)
    assert place.exists() and used.exists() and other.exists(), "what is not a place of kernels is not ours to remove"
    assert not old.exists() and not older.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([place.name, used.name, other.name, "lock"])


def test_of_too_many_places_the_least_recently_used_go_but_none_of_the_last_day(tmp_path: Path) -> None:
    fresh = [_place(tmp_path, number, FRESH_S / 2 + number) for number in range(10)]
    rest = [_place(tmp_path, number, FRESH_S + 60 * number) for number in range(10, 30)]
    forget_places(tmp_path)
    assert all(place.exists() for place in [*fresh, *rest[: MOST_PLACES - 10]])
    assert not any(place.exists() for place in rest[MOST_PLACES - 10 :])
    for number in range(30, 50):
        _place(tmp_path, number, 60)
    forget_places(tmp_path)
    assert all(place.exists() for place in fresh) and not any(place.exists() for place in rest)


def test_a_place_that_is_opened_counts_as_used(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    os.utime(place, (0, 0))
    assert open_place(tmp_path) == place
    forget_places(tmp_path)
    assert place.exists()


def test_nothing_is_removed_while_another_process_opens_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the very place that looks unused."""
    monkeypatch.setattr(kernel_cache, "TURN_S", 0.0)
    place = _place(tmp_path, 1, 2 * UNUSED_S)
    with (tmp_path / "lock").open("w") as opening:
        fcntl.flock(opening, fcntl.LOCK_SH)
        forget_places(tmp_path)
        assert place.exists()
    forget_places(tmp_path)
    assert not place.exists()


def test_a_removal_that_was_cut_short_is_ended_by_the_next(tmp_path: Path) -> None:
    left = _place(tmp_path, 1, 0.0, name=kernel_cache.GONE + "{:016x}-7")
    forget_places(tmp_path)
    assert not left.exists()


def test_what_is_left_of_a_removal_by_a_process_of_the_same_number_keeps_nothing(tmp_path: Path) -> None:
    """In a container every node is process 1."""
    left = _place(tmp_path, 1, 0.0, name=f"{kernel_cache.GONE}{{:016x}}-{os.getpid()}")
    again, other = _place(tmp_path, 1, 2 * UNUSED_S), _place(tmp_path, 2, 3 * UNUSED_S)
    forget_places(tmp_path)
    assert not left.exists() and not again.exists() and not other.exists()


def test_one_that_can_not_be_removed_keeps_no_other(tmp_path: Path) -> None:
    (tmp_path / f"{kernel_cache.GONE}{0:016x}-7").write_text("no directory at all")
    left, old = _place(tmp_path, 1, 0.0, name=kernel_cache.GONE + "{:016x}-7"), _place(tmp_path, 2, 2 * UNUSED_S)
    forget_places(tmp_path)
    assert not left.exists() and not old.exists()
    assert [path.name for path in tmp_path.glob(f"{kernel_cache.GONE}*")] == [f"{kernel_cache.GONE}{0:016x}-7"]


def test_a_link_to_somebody_elses_directory_is_left_as_it_is(tmp_path: Path) -> None:
    elsewhere, cache = _place(tmp_path / "theirs", 1, 2 * UNUSED_S), tmp_path / "cache"
    cache.mkdir()
    (cache / f"{1:016x}").symlink_to(elsewhere)
    old = _place(cache, 2, 2 * UNUSED_S)
    forget_places(cache)
    assert (cache / f"{1:016x}" / "engine_0" / "kernels.nbc").exists() and not old.exists()


def test_what_was_compiled_is_used_though_its_place_is_gone(tmp_path: Path) -> None:
    """A clock that was set right meanwhile made the place look old, or somebody has cleaned up."""
    place = tmp_path / "place"
    place.mkdir()
    with filling(place, "pairs"):
        shutil.rmtree(place)
    assert not place.exists(), "it is not said to be filled"


def test_processes_that_open_and_remove_at_once_never_lose_a_place_in_use(tmp_path: Path) -> None:
    """Each turn the place looks unused for long; once somebody has opened it, it is there."""
    lost: list[int] = []

    def remove(stop: threading.Event) -> None:
        while not stop.is_set():
            forget_places(tmp_path)

    stop = threading.Event()
    thread = threading.Thread(target=remove, args=(stop,))
    thread.start()
    for turn in range(60):
        place = open_place(tmp_path)
        if not place.exists():
            lost.append(turn)
        os.utime(place, (0, 0))
    stop.set()
    thread.join(30.0)
    assert not thread.is_alive() and not lost


KERNEL = """
import sys
from pathlib import Path

import numba

from pdcluster.processes.kernel_cache import filled

place = Path(sys.argv[1])
numba.config.CACHE_DIR = str(place)


@numba.njit(cache=True)
def double(x):
    return 2 * x


print(filled(place, "test", lambda: double(21)))
"""


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_place_with_truncated_files_is_set_aside_and_filled_anew(tmp_path: Path, suffix: str) -> None:
    program, place = tmp_path / "kernel.py", tmp_path / "place"
    program.write_text(KERNEL)
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run() -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(program), str(place)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=110.0)

    assert run().stdout == "42\n"
    for file in place.rglob(f"*{suffix}"):
        file.write_bytes(file.read_bytes()[:-20])
    again = run()
    assert again.stdout == "42\n", again.stderr
    assert "are broken" in again.stderr
    assert len(list(tmp_path.glob("gone-*"))) == 1
    last = run()
    assert last.stdout == "42\n" and not last.stderr


def test_what_cannot_be_compiled_sets_nothing_aside(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def fail() -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        filled(place, "test", fail)
    assert not list(tmp_path.glob("gone-*"))

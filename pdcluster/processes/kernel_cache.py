"""Where compiled kernels are kept. One process at a time fills such a place, and unused places are removed. It compiles
nothing.

numba numbers a kernel's variants by an index that it reads, changes and writes back. Two processes at the same time may
give both variants one number. Then a kernel for other arrays, or another CPU, is loaded as if it were the right one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

# For another process that compiles: one to two minutes on two cores, longer where others use them.
WAIT_S = 240.0
LOOK_S = 0.05
# For another process that notes its use of a place, or renames old ones.
TURN_S = 5.0
MOST_PLACES = 16
# After so long without a start a place goes.
UNUSED_S = 30 * 86400.0
# A place that was used since then stays, however many there are.
FRESH_S = 86400.0
# Names of places; the longer ones are numba's own, from versions that had only one place.
PLACE = re.compile(r"[0-9a-f]{16}|(engine|transfer)_[0-9a-f]{40}")
GONE = "gone-"
# The folders of the kernels' source files.
PACKAGE = Path(__file__).parents[1]
SOURCES = (PACKAGE / "engine" / "kernels", PACKAGE / "transfer" / "copying")


def place_of(cache_dir: Path) -> Path:
    """The place for these sources, where they lie, this numba and this CPU.

    numba looks at the size and time of a function's own file only. Another content may have the same, and kernels also
    depend on other files. Machines of several kinds may share the directory. numba does not find what another
    installation or version filled.
    """
    import numba
    from numba.core.registry import cpu_target

    digest = hashlib.blake2b(repr((*map(os.path.abspath, SOURCES), numba.__version__)).encode(), digest_size=8)
    for folder in SOURCES:
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    digest.update(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    return cache_dir / digest.hexdigest()


def open_place(cache_dir: Path) -> Path:
    """`place_of`, made where it is missing and noted as used now. Raises OSError with the reason where nothing can be
    written, or where another user's code could lie.
    """
    place = place_of(cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _turn(cache_dir, fcntl.LOCK_SH):
        is_new = not place.exists()
        place.mkdir(mode=0o700, exist_ok=True)
        _note_use(place)
    if not _is_private(place):
        log.warning("others may write to the compiled kernels in %s; they are set aside and compiled again", place)
        with _turn(cache_dir, fcntl.LOCK_EX):
            if not _is_private(place):  # nor did another process do it meanwhile
                _set_aside(place)
            place.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(place):
            raise OSError(errno.EPERM, "others may write to it, and it cannot be set aside", str(place))
    _check_writable(place)
    if is_new:
        forget_places(cache_dir)
    return place


def _is_private(place: Path) -> bool:
    """Whether nobody but this user and root may write to it: numba runs what lies there. Raises OSError where it is
    another user's.
    """
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, "it is no directory", str(place))
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}, whose code would run here", str(place))
    return not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _check_writable(place: Path) -> None:
    """numba reads nothing from a place that it cannot write to, and reports that as a function without a locator."""
    try:
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        raise OSError(error.errno, f"it can be read but not written: {error.strerror}", str(place)) from error


def forget_places(cache_dir: Path) -> None:
    """Remove unused places, least recently used first. A place that a process is about to use stays, because it notes
    its use under the same lock. What cannot be removed stays, and keeps no other.
    """
    try:
        with _turn(cache_dir, fcntl.LOCK_EX) as has_turn:
            for place in _unused(cache_dir, time.time()) if has_turn else ():
                _set_aside(place)
        for gone in cache_dir.glob(f"{GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        log.debug("not all old places of kernels are removed: %s", error)


def _set_aside(place: Path) -> None:
    try:
        # Not named by the process's number: in a container that is 1 each time. A leftover would be in the way for
        # ever.
        place.rename(place.with_name(f"{GONE}{place.name}-{time.time_ns()}"))
    except OSError as error:
        log.debug("%s, which nobody uses, is not removed: %s", place, error)


def _unused(cache_dir: Path, now: float) -> list[Path]:
    places = (
        path for path in cache_dir.iterdir() if PLACE.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
    ages = sorted((now - path.stat().st_mtime, path) for path in places)
    return [path for rank, (age, path) in enumerate(ages) if age > UNUSED_S or (rank >= MOST_PLACES and age > FRESH_S)]


def _note_use(place: Path) -> None:
    try:
        os.utime(place)
    except OSError as error:
        log.debug("use of %s is not noted: %s", place, error)


@contextmanager
def _turn(cache_dir: Path, how: int) -> Iterator[bool]:
    """For a block that holds the lock of all places, LOCK_SH or LOCK_EX; says whether it does."""
    lock = _locked(cache_dir / "lock", time.monotonic() + TURN_S, how)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def filling(place: Path, what: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """For a block that loads `what` or compiles it into `place`. The first time, no other process is in such a block.
    Later nobody waits.

    A place that cannot be locked, or another that takes longer than wait_s, is no reason to stop.
    """
    filled = place / f"{what}.filled"
    lock = None if filled.exists() else _locked(place / "lock", time.monotonic() + wait_s)
    if not filled.exists():
        log.warning(
            "CPU kernels (%s) are not compiled for this installation yet; that is done now, once, and may take two "
            "minutes",
            what,
        )
    try:
        yield
        if lock is not None:
            _note_filled(filled)
    finally:
        if lock is not None:
            os.close(lock)


def filled(place: Path, what: str, load: Callable[[], T]) -> T:
    """What `load` returns, as `filling`. A place whose files are broken is set aside, and filled anew, once.

    numba reads its files with pickle, which raises anything on one that a power cut truncated. Errors of numba and of
    the system say that nothing can be compiled here.
    """
    try:
        with filling(place, what):
            return load()
    except (OSError, RuntimeError, ImportError):
        raise
    except Exception as error:
        if _is_of_numba(error):
            raise
        log.warning("the compiled kernels in %s are broken (%r); they are set aside and compiled again", place, error)
        with _turn(place.parent, fcntl.LOCK_EX):
            _set_aside(place)
            place.mkdir(mode=0o700, exist_ok=True)
    with filling(place, what):
        return load()


def _is_of_numba(error: Exception) -> bool:
    """Whether numba says that it cannot compile, and not that it cannot read."""
    from numba.core.errors import NumbaError

    return isinstance(error, NumbaError)


def _note_filled(filled: Path) -> None:
    """What was compiled is in memory anyway; who comes next compiles it again."""
    try:
        filled.touch()
    except OSError as error:
        log.debug("%s is not noted: %s", filled, error)


def _locked(path: Path, deadline: float, how: int = fcntl.LOCK_EX) -> int | None:
    """A descriptor that holds the lock until it is closed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        log.debug("%s is not locked: %s", path, error)
        return None
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(LOOK_S)
                continue
            log.warning("another process has %s for too long; this one goes on beside it", path)
        except OSError as error:
            log.debug("%s is not locked: %s", path, error)
        os.close(fd)
        return None

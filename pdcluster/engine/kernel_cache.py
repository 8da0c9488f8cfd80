"""Where compiled kernels are kept, and that one process at a time fills such a place. It compiles nothing.

numba numbers the files of a kernel's variants by an index that it reads, changes and writes back. Two processes that do so at the same time may give
both their variants one number: then a kernel made for other arrays, or for another machine's CPU, is loaded as if it were the right one.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

WAIT_S = 180.0
"""For another process that compiles; it takes some 20 s where nothing else runs."""
LOOK_S = 0.05
SOURCES = ("kernels", "pair_kernels", "chunk_kernels", "layer_kernels", "invariant_kernels", "int8_kernels", "vectors")


def place_of(cache_dir: Path) -> Path:
    """For these sources, where they lie, this numba and this CPU. numba looks at a function's own file only, but kernels are also made of what
    stands in the others; machines of several kinds may share the directory; and what another installation of the same sources, or another numba,
    filled, numba does not find, so it must not count as filled."""
    import numba
    from numba.core.registry import cpu_target

    digest = hashlib.blake2b(repr((os.path.abspath(Path(__file__).parent), numba.__version__)).encode(), digest_size=8)
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    digest.update(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    return cache_dir / digest.hexdigest()


@contextmanager
def filling(place: Path, what: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """For a block that loads `what` or compiles it into `place`: the first time no other process is in such a block. Once it is there, nobody waits.

    A place that cannot be locked, or another that takes longer than wait_s, is no reason to stop."""
    filled = place / f"{what}.filled"
    lock = None if filled.exists() else _locked(place / "lock", time.monotonic() + wait_s)
    if not filled.exists():
        log.warning("CPU kernels (%s) are not compiled for this installation yet; that is done now, once, and takes some 15 s", what)
    try:
        yield
        if lock is not None:
            filled.touch()
    finally:
        if lock is not None:
            os.close(lock)


def _locked(path: Path, deadline: float) -> int | None:
    """A descriptor that holds the lock until it is closed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        log.debug("%s is not locked: %s", path, error)
        return None
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(LOOK_S)
                continue
            log.warning("another process has %s for too long; CPU kernels are compiled beside it", path)
        except OSError as error:
            log.debug("%s is not locked: %s", path, error)
        os.close(fd)
        return None

"""Copies of weight files in this process's memory, so that it does not matter what becomes of the files.

Engines map their weights. Whoever overwrites or truncates a mapped file changes the weights that serve, or ends the
process (SIGBUS). Files that nobody rewrites need no copy: those of the hub's cache and of this package.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pdcluster.checkpoint.bundled import ROOT
from pdcluster.checkpoint.gguf import is_gguf
from pdcluster.checkpoint.inspection import INDEX, SINGLE, named_shards
from pdcluster.core.errors import ModelError

# In the hub's cache a file is a link to a blob, which is named by its content.
BLOB = re.compile(r"models--.+/blobs/[0-9a-f]+$")
PIECE_BYTES = 64 << 20


class HeldFiles:
    """Copies of files in shared memory without a name. The kernel frees them with the last mapping after `close`.

    paths: where they are opened, by this process and its children.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises ModelError for a file that cannot be read or changes meanwhile."""
        self._fds: list[int] = []
        try:
            for file in files:
                self._fds.append(os.memfd_create("pdcluster-weights", os.MFD_CLOEXEC))
                _copy(file, self._fds[-1])
        except BaseException:
            self.close()
            raise
        self.paths = tuple(Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in self._fds)

    def close(self) -> None:
        """No more can be opened; what is mapped stays. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def weight_files(model: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: those its index names, else the single one. None for GGUF, whose tensors
    are computed from the file while it is read. Raises ModelError for other formats.
    """
    if is_gguf(model):
        return ()
    index = model / INDEX
    if not index.exists():
        single = model / SINGLE
        if not single.exists():
            raise ModelError(f"{model} holds neither {SINGLE} nor {INDEX}; other formats are not supported")
        return (single,)
    names = named_shards(index)
    missing = [name for name in names if not (model / name).exists()]
    if missing:
        raise ModelError(f"{index} names {missing[0]!r}, which is not in {model}")
    return tuple(model / name for name in names)


def is_settled(file: Path) -> bool:
    """Whether nobody rewrites the file."""
    found = file.resolve()
    return ROOT in found.parents or BLOB.search(str(found)) is not None


def copy_file(source: int, target: int) -> int:
    """Copy the whole file behind a descriptor, by the kernel. Returns its size. Raises OSError."""
    size = os.fstat(source).st_size
    copied, more = 0, 1
    while more and copied < size:
        more = os.sendfile(target, source, copied, min(PIECE_BYTES, size - copied))
        copied += more
    return copied


def _copy(file: Path, target: int) -> None:
    """The same for a file that must not change meanwhile."""
    try:
        with file.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            copied = copy_file(source.fileno(), target)
            if copied < size or os.fstat(source.fileno()).st_size != size:
                raise ModelError(f"{file} changed while it was read; load it again when it is whole")
    except OSError as error:
        raise ModelError(f"{file} cannot be copied to memory: {error}") from error

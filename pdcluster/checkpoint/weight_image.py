"""Weights of one version as safetensors files that this process can map and give to others.

Weights that were pushed have one file, in shared memory without a name. Weights that were loaded from a directory have
its files, or the copies of these (`held_files`). The kernel frees the memory with the last mapping after `close`.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from pdcluster.checkpoint.held_files import copy_file
from pdcluster.checkpoint.inspection import OBSOLETE, check_stored_type
from pdcluster.core.errors import ModelError
from pdcluster.core.weights import KIND_BYTES, WeightTensor
from pdcluster.settings.sources import CACHE_VARIABLE

# Of a new image: tensors begin at a page.
ALIGN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor and where its bytes are: `offset` in a file of the image, `address` in this process."""

    tensor: WeightTensor
    file: int
    offset: int
    address: int


class WeightImage:
    """Files of one version, open and mapped. Any thread may close it; who reads it holds `reading`.

    paths: where they are opened, by this process and its children.
    digests: of its tensors by name, where somebody said them; None: nobody did.
    is_stored: its files are those of a StoredImage.
    """

    def __init__(self, fds: Sequence[int], tensors: Sequence[tuple[WeightTensor, int, int]], *, writes: bool) -> None:
        """Takes over the descriptors. tensors: with their files and offsets. writes: map them to be written."""
        self.fds = list(fds)
        self.paths = tuple(Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in self.fds)
        self.digests: dict[str, bytes] | None = None
        self.is_stored = False
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        self._maps = [mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=access) for fd in self.fds]
        self._bytes = [np.frombuffer(each, dtype=np.uint8) for each in self._maps]
        self._addresses = [each.ctypes.data for each in self._bytes]
        self.tensors = tuple(
            MappedTensor(tensor, file, offset, self._addresses[file] + offset) for tensor, file, offset in tensors
        )
        self._lock = threading.Lock()
        self._num_readers, self._is_closed = 0, False

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._bytes))

    def address(self, file: int = 0) -> int:
        return self._addresses[file]

    def memory(self, file: int = 0) -> memoryview:
        """Bytes of one file. The image stays open while they are used."""
        return self._bytes[file].data

    def hold(self) -> bool:
        """Keep it mapped for a reader. False where it is closed."""
        with self._lock:
            self._num_readers += not self._is_closed
            return not self._is_closed

    def release(self) -> None:
        """A reader is done."""
        with self._lock:
            self._num_readers -= 1
            self._let_go()

    def close(self) -> None:
        """No more can be opened, once the last reader is done. What others mapped stays. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._let_go()

    def _let_go(self) -> None:
        if self._is_closed and not self._num_readers:
            self._bytes.clear()
            self._maps.clear()  # unmapped with the last view
            while self.fds:
                os.close(self.fds.pop())


class StoredImage:
    """An image's files on disk, without names, so that its memory can be given back. The kernel frees them with the
    last mapping after `close`.
    """

    def __init__(self, image: WeightImage, directory: Path) -> None:
        """Take the room. Files that a StoredImage made are used again. Raises ModelError where there is none."""
        self._digests, self._is_filled = image.digests, image.is_stored
        self._files: list[IO[bytes]] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for fd in image.fds:
                if image.is_stored:
                    self._files.append(os.fdopen(os.dup(fd), "rb"))
                    continue
                self._files.append(tempfile.TemporaryFile(dir=directory))  # noqa: SIM115 -- `close` closes them
                os.posix_fallocate(self._files[-1].fileno(), 0, os.fstat(fd).st_size)
        except OSError as error:
            self.close()
            raise ModelError(
                f"weights of {image.nbytes} bytes cannot be kept in {directory}: {error.strerror}; make room there, or "
                f"set {CACHE_VARIABLE} to another directory"
            ) from error

    def fill(self, image: WeightImage) -> None:
        """Copy the image that the room was taken for. Raises ModelError for a disk that fails."""
        if self._is_filled:
            return
        try:
            for fd, file in zip(image.fds, self._files, strict=True):
                copy_file(fd, file.fileno())
        except OSError as error:
            raise ModelError(f"weights cannot be written to the disk: {error.strerror}") from error
        self._is_filled = True

    def open(self) -> WeightImage:
        """The image again, mapped from the disk."""
        image = open_image([Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for file in self._files])
        image.digests, image.is_stored = self._digests, True
        return image

    def close(self) -> None:
        """No more can be opened; what is mapped stays. Idempotent."""
        while self._files:
            self._files.pop().close()


def new_image(tensors: Sequence[WeightTensor]) -> WeightImage:
    """One file in shared memory, whose tensors are to be written. Raises ModelError where there is no memory for its
    header.
    """
    ordered = sorted(tensors, key=lambda tensor: -KIND_BYTES[tensor.kind])
    header, starts = _header_of(ordered)
    fd = os.memfd_create("pdcluster-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, len(header) + sum(tensor.nbytes for tensor in tensors))
        os.pwrite(fd, header, 0)
        at = {tensor.name: len(header) + start for tensor, start in zip(ordered, starts, strict=True)}
        return WeightImage([fd], [(tensor, 0, at[tensor.name]) for tensor in tensors], writes=True)
    except OSError as error:
        os.close(fd)
        raise ModelError(f"there is no memory for weights of {len(tensors)} tensors: {error.strerror}") from error


def open_image(files: Sequence[Path]) -> WeightImage:
    """The tensors of safetensors files, to be read. Raises ModelError for a file that is none."""
    fds: list[int] = []
    try:
        tensors: list[tuple[WeightTensor, int, int]] = []
        for number, file in enumerate(files):
            fds.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            tensors += [(tensor, number, offset) for tensor, offset in _tensors_in(file, fds[-1])]
        return WeightImage(fds, tensors, writes=False)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
        raise


def _header_of(tensors: Sequence[WeightTensor]) -> tuple[bytes, list[int]]:
    """The head of a safetensors file with these tensors one after the other, and where each begins behind it."""
    starts, entries, end = list[int](), dict[str, object](), 0
    for tensor in tensors:
        starts.append(end)
        end += tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": (starts[-1], end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    nbytes = -(-(len(text) + 8) // ALIGN_BYTES) * ALIGN_BYTES - 8
    return nbytes.to_bytes(8, "little") + text.ljust(nbytes), starts


def _tensors_in(file: Path, fd: int) -> list[tuple[WeightTensor, int]]:
    """With their offsets in the file. Its reader has checked the rest."""
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    try:
        header = json.loads(os.pread(fd, header_bytes, 8))
    except (ValueError, OverflowError) as error:
        raise ModelError(f"{file} is no safetensors file; download it again") from error
    found = []
    for name, entry in header.items():
        if name == "__metadata__" or name.endswith(OBSOLETE):
            continue
        check_stored_type(file, name, entry["dtype"])
        tensor = WeightTensor(name, entry["dtype"], tuple(entry["shape"]))
        found.append((tensor, 8 + header_bytes + entry["data_offsets"][0]))
    return found

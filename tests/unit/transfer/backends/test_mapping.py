"""Shared memory of another process, mapped here."""

from __future__ import annotations

import ctypes
import mmap
import os

from pdcluster.transfer.backends.shm_memory import POPULATE_BYTES, MappedMemory


def test_what_is_written_through_the_mapping_is_in_the_memory_whether_populated_or_not() -> None:
    nbytes = 2 * POPULATE_BYTES + 4096
    fd = os.memfd_create("pdcluster-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    mapped = MappedMemory(fd, nbytes)
    mapped.populate(POPULATE_BYTES - 1, 2)
    for offset in (0, POPULATE_BYTES, nbytes - 3):
        ctypes.memmove(mapped.address + offset, b"abc", 3)
    with mmap.mmap(fd, nbytes) as memory:
        assert memory[:3] == memory[POPULATE_BYTES : POPULATE_BYTES + 3] == memory[-3:] == b"abc"
    mapped.close()
    os.close(fd)


def test_populating_in_pauses_comes_to_an_end() -> None:
    nbytes = 3 * POPULATE_BYTES
    fd = os.memfd_create("pdcluster-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    mapped = MappedMemory(fd, nbytes)
    mapped.populate(POPULATE_BYTES, 1)
    assert [mapped.populate_more() for _ in range(3)] == [True, True, False] and mapped.is_populated
    mapped.close()
    os.close(fd)

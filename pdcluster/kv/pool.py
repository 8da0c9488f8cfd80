"""The memory behind page ids: one contiguous run of pages, and the tensor view that the engine computes in.

It allocates no ids and knows no requests. On a CPU the pages are one memfd: shared memory that other processes map by
its descriptor. The kernel frees it with the last of them, even after SIGKILL. On an accelerator they are a device
tensor, and `fd` is None.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from pdcluster.core.errors import ConfigError
from pdcluster.kv.layout import KVLayout, KVType

TORCH_DTYPE: dict[KVType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Linux 5.14. Python has no name for it.
_MADV_POPULATE_WRITE = 23


class KVPool:
    """Owns the pages from construction to `close`. Any thread may read the attributes. Others decide who may write
    which page.

    tensor: [page][layer][K, V][kv head][token][dim].
    address, nbytes, fd: the fields of `transfer.backends.base.Region`.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: str = "cpu", *, populates: bool = True) -> None:
        """populates: touch every page, so that the first prefill does not pay for it."""
        if num_pages < 1:
            raise ConfigError(f"a KV pool of {num_pages} pages holds nothing; give it at least 1")
        self.layout = layout
        self.num_pages = num_pages
        self.nbytes = num_pages * layout.page_bytes
        self.fd: int | None = None
        self._mapping: mmap.mmap | None = None
        shape = (num_pages, layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
        dtype = _torch_dtype(layout)
        if device == "cpu":
            self.fd, self._mapping = _map_shared(self.nbytes, populates=populates)
            self.tensor = torch.frombuffer(self._mapping, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.address: int = self.tensor.data_ptr()

    @property
    def view(self) -> memoryview:
        """All bytes, writable. Only host memory has them."""
        if self._mapping is None:
            raise ConfigError(
                "a pool in device memory has no host view; use a transfer backend that reaches device memory"
            )
        return memoryview(self._mapping)

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy each (source, target) pair in turn."""
        for source, target in pages:
            self.tensor[target].copy_(self.tensor[source])

    def close(self) -> None:
        """Give the memory back and release the descriptor. The mapping ends with its last view, so no reader gets a
        dangling address: it reads zeros, also where another process has mapped the pool. Idempotent.
        """
        if self.fd is not None:
            if self._mapping is not None:
                with suppress(OSError):  # this kernel has none
                    self._mapping.madvise(mmap.MADV_REMOVE)
            os.close(self.fd)
            self.fd = None
        self.tensor = torch.empty(0)
        self._mapping = None


def _torch_dtype(layout: KVLayout) -> torch.dtype:
    found = TORCH_DTYPE.get(layout.dtype)
    if found is None:
        raise ConfigError(f"our own engine keeps no KV in {layout.dtype}, only in {' or '.join(TORCH_DTYPE)}")
    return found


def _map_shared(nbytes: int, *, populates: bool) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("pdcluster-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise ConfigError(f"cannot map {nbytes} bytes for the KV pool: {error}; lower the number of pages") from error
    with suppress(OSError):  # this kernel has none
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if populates:
        _populate(mapping)
    return fd, mapping


def _populate(mapping: mmap.mmap) -> None:
    """Touch every page. Kernels that cannot do that fault pages in on first use.

    Huge pages were asked for, where the system has them for shared memory (`shmem_enabled`): a long context lies in
    pieces of a few KiB, and reads end at every page of the system.
    """
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        mapping.madvise(mmap.MADV_WILLNEED)

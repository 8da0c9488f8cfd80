"""The pool's memory: shape, sharing through its descriptor, nothing left behind."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pdcluster.core.errors import ConfigError
from pdcluster.kv.layout import KVLayout, KVType
from pdcluster.kv.pool import KVPool

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, page_tokens=8, dtype="bfloat16")


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool(LAYOUT, 5)
    yield pool
    pool.close()


def test_a_page_is_one_contiguous_run_of_layers_sides_heads_and_tokens(pool: KVPool) -> None:
    assert pool.tensor.shape == (5, 3, 2, 2, 8, 4)
    assert pool.tensor.is_contiguous()
    assert pool.nbytes == 5 * LAYOUT.page_bytes == pool.tensor.nbytes
    assert pool.tensor[3].data_ptr() - pool.address == 3 * LAYOUT.page_bytes


@pytest.mark.parametrize("dtype", ["float16", "fp8"])
def test_kv_that_only_other_engines_keep_is_refused_by_name(dtype: KVType) -> None:
    with pytest.raises(ConfigError, match=f"our own engine keeps no KV in {dtype}"):
        KVPool(replace(LAYOUT, dtype=dtype), 5)


def test_pages_start_as_zeros(pool: KVPool) -> None:
    assert not pool.tensor.any()


def test_the_tensor_and_the_view_are_the_same_bytes(pool: KVPool) -> None:
    pool.tensor[4] = 1.0
    offset = 4 * LAYOUT.page_bytes
    assert bytes(pool.view[offset : offset + 2]) == b"\x80\x3f"
    pool.view[offset : offset + 2] = b"\x00\x40"
    assert pool.tensor[4, 0, 0, 0, 0, 0] == 2.0


def test_another_mapping_of_the_descriptor_sees_the_pages(pool: KVPool) -> None:
    assert pool.fd is not None
    with mmap.mmap(pool.fd, pool.nbytes) as other:
        other[:2] = b"\x80\x3f"
        assert pool.tensor[0, 0, 0, 0, 0, 0] == 1.0


def test_closing_gives_the_descriptor_back_and_may_be_repeated(pool: KVPool) -> None:
    descriptor = pool.fd
    assert descriptor is not None
    pool.close()
    pool.close()
    assert pool.fd is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_view_outlives_close(pool: KVPool) -> None:
    view = pool.view
    pool.close()
    view[0:1] = b"x"
    assert bytes(view[0:1]) == b"x"


def test_a_killed_process_leaves_no_file_behind() -> None:
    code = (
        "import os, signal; from pdcluster.kv.pool import KVPool; from pdcluster.kv.layout import KVLayout;"
        "p = KVPool(KVLayout(1, 1, 2, 4, 'float32'), 3);"
        "print(os.readlink(f'/proc/self/fd/{p.fd}'), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = set(os.listdir("/dev/shm"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == -9
    assert "memfd:pdcluster-kv (deleted)" in run.stdout
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pdcluster-kv" in name]


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVPool(LAYOUT, 0)


def test_a_pool_larger_than_the_address_space_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match="lower the number of pages"):
        KVPool(LAYOUT, 1 << 52)


def test_device_memory_has_no_host_view() -> None:
    pool = KVPool(LAYOUT, 1, "meta")
    assert pool.fd is None
    with pytest.raises(ConfigError, match="no host view"):
        _ = pool.view
    assert pool.tensor.dtype == torch.bfloat16


def test_closing_gives_the_memory_back_wherever_it_is_mapped() -> None:
    pool = KVPool(LAYOUT, 4)
    assert pool.fd is not None
    other = mmap.mmap(os.dup(pool.fd), pool.nbytes)
    pool.tensor.fill_(1.0)
    assert any(other[:64])
    pool.close()
    assert not any(other[:])

"""Doing without kernels, and splitting calls over threads."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE
from numba.core.errors import NumbaError

from pdcluster.engine.kernels import elementwise, loader
from pdcluster.engine.kernels.loader import Parallel, load_kernels, load_pair_kernels
from pdcluster.engine.ops.select import select_ops


def test_without_numba_the_engine_runs_on_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.WARNING):
        assert select_ops("cpu", "float32", 1, tmp_path).name == "torch"
    assert "plain torch" in caplog.text


def test_kernels_that_do_not_compile_are_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise NumbaError("no such target")

    monkeypatch.setattr(loader, "_compile", fail)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(tmp_path, "float32") is None
    assert "no such target" in caplog.text


def test_a_cache_directory_that_cannot_be_written_is_no_reason_to_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert load_kernels(blocked / "cache", "float32") is None
    assert (
        f"cannot be kept in {blocked / 'cache'}" in caplog.text
        and "plain torch" in caplog.text
        and "XDG_CACHE_HOME" in caplog.text
    )


def test_other_devices_do_not_load_kernels(tmp_path: Path) -> None:
    assert select_ops("cuda", "bfloat16", 1, tmp_path).name == "torch"


def test_nothing_is_compiled_after_the_start() -> None:
    """A first batch of several rows must not wait for a compiler."""
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    pairs = load_pair_kernels()
    assert pairs is not None
    compiled = [cast(Any, kernel) for kernel in (pairs.linear_rows, pairs.multiply_panels, pairs.pack_panels)]
    before = [len(kernel.signatures) for kernel in compiled]
    weights = [torch.zeros(size, 64, dtype=torch.bfloat16) for size in (8, 12)]
    for rows in (1, 2, 9, 40):
        for joined in (weights, weights[:1]):
            ops.linear(joined, [None] * len(joined))(torch.zeros(rows, 64, dtype=torch.bfloat16))
    assert [len(kernel.signatures) for kernel in compiled] == before


def test_the_log_says_how_products_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    assert load_kernels(KERNEL_CACHE, "bfloat16") is not None
    with caplog.at_level(logging.INFO):
        pairs = load_pair_kernels()
    assert pairs is not None and ("in panels" if pairs.has_panels else "as they are") in caplog.text


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [1, 4, 7, 100])
def test_every_task_runs_exactly_once(threads: int, tasks: int) -> None:
    counts = np.zeros(tasks, np.int64)

    def kernel(lo: int, hi: int) -> None:
        counts[lo:hi] += 1

    parallel = Parallel(threads)
    parallel.run(kernel, tasks)
    parallel.close()
    assert counts.tolist() == [1] * tasks


def test_small_calls_stay_on_the_calling_thread() -> None:
    seen: list[str] = []
    parallel = Parallel(4)
    parallel.run(lambda lo, hi: seen.append(threading.current_thread().name), 31, grain=16)
    parallel.close()
    assert seen == [threading.current_thread().name]


def test_an_error_on_a_helper_thread_is_raised_after_all_ended() -> None:
    ended = []

    def kernel(lo: int, hi: int) -> None:
        if lo:
            raise ValueError("helper")
        ended.append(lo)

    parallel = Parallel(2)
    with pytest.raises(ValueError, match="helper"):
        parallel.run(kernel, 10)
    parallel.close()
    assert ended == [0]


@pytest.mark.parametrize("value", [-80.0, -3.3, -1e-4, 0.0, 0.5, 10.0, 60.0])
def test_exponential_is_accurate(value: float) -> None:
    assert float(elementwise.exponential(np.float32(value))) == pytest.approx(np.exp(np.float32(value)), rel=2e-5)


def test_exponential_is_clamped_to_finite_numbers() -> None:
    assert 0 < float(elementwise.exponential(np.float32(-1e30))) < 1e-37
    assert np.isfinite(elementwise.exponential(np.float32(1e30)))

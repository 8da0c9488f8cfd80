"""The building blocks of kernels: on CPUs that multiply pairs of bfloat16, and in the way that runs anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core.registry import cpu_target
from numpy.typing import NDArray

from pdcluster.engine.kernels import loader
from pdcluster.engine.kernels.intrinsics import (
    SUMS_ORDER,
    address,
    asking_tile_of,
    dots_of,
    greatest_of,
    has_matrix_tiles,
    has_pair_product,
    has_wide_product,
    tile_of,
    weigh_of,
    weigh_pairs_of,
)

needs_pair_product = pytest.mark.skipif(not has_pair_product(), reason="this CPU does not multiply pairs of bfloat16")
WAYS = [pytest.param(True, marks=needs_pair_product), False]


def noise(*size: int) -> NDArray[Any]:
    return loader.as_array(torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16())


def wide(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("is_native", WAYS)
@pytest.mark.parametrize(("num_weights", "num_rows"), [(4, 1), (4, 3), (8, 2), (4, 4), (4, 6), (2, 8)])
def test_dots_of_rows(is_native: bool, num_weights: int, num_rows: int) -> None:
    dots = dots_of(num_weights, num_rows, native=is_native)

    @numba.njit
    def run(weights: Any, rows: Any, out: Any) -> None:
        width = 2 * weights.shape[1]
        dots(address(weights), width, address(weights), address(rows), width, width, address(out), 4 * out.shape[1])

    weights, rows = noise(num_weights, 96), noise(num_rows, 96)
    out = np.full((num_rows, num_weights + 1), 7.0, np.float32)
    run(weights, rows, out)
    np.testing.assert_allclose(out[:, :num_weights], wide(rows) @ wide(weights).T, rtol=1e-4, atol=1e-4)
    assert (out[:, num_weights] == 7.0).all()


@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (3, 1), (4, 2)])
def test_weighed_values_are_added_in_the_order_of_lanes(num_rows: int, num_blocks: int) -> None:
    weigh = weigh_of(num_rows, num_blocks)

    @numba.njit
    def run(values: Any, shares: Any, sums: Any) -> None:
        at = address(values)
        weigh(
            at,
            2 * values.shape[1],
            at,
            shares.shape[1],
            address(shares),
            4 * shares.shape[1],
            address(sums),
            4 * sums.shape[1],
        )

    values, shares = noise(11, 32 * num_blocks), np.random.default_rng(1).random((num_rows, 11)).astype(np.float32)
    sums = np.ones((num_rows, 32 * num_blocks), np.float32)
    run(values, shares, sums)
    blocks = (1 + shares @ wide(values)).reshape(num_rows, num_blocks, 16, 2)
    np.testing.assert_allclose(sums, blocks.transpose(0, 1, 3, 2).reshape(num_rows, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_native", WAYS)
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (3, 1), (4, 2)])
def test_pairs_of_weighed_values_are_added_in_the_order_of_sums(
    num_rows: int, num_blocks: int, is_native: bool
) -> None:
    weigh = weigh_pairs_of(num_rows, num_blocks, native=is_native)

    @numba.njit
    def run(values: Any, shares: Any, sums: Any) -> None:
        at, step = address(values), 2 * values.shape[1]
        weigh(
            at,
            step,
            step,
            at,
            shares.shape[1] // 2,
            address(shares),
            2 * shares.shape[1],
            address(sums),
            4 * sums.shape[1],
        )

    values, shares = noise(12, 32 * num_blocks), noise(num_rows, 12)
    sums = np.ones((num_rows, 32 * num_blocks), np.float32)
    run(values, shares, sums)
    expected = (1 + wide(shares) @ wide(values)).reshape(num_rows, num_blocks, 32)
    np.testing.assert_allclose(sums, expected[:, :, list(SUMS_ORDER)].reshape(num_rows, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_native", WAYS)
@pytest.mark.parametrize("kind", ["new", "adds", "asks"])
def test_a_tile_of_a_product_of_pairs(is_native: bool, kind: str) -> None:
    tile = (
        asking_tile_of(3, 2, 2, native=is_native)
        if kind == "asks"
        else tile_of(3, 2, native=is_native, adds=kind == "adds")
    )
    asks = kind == "asks"

    @numba.njit
    def run(left: Any, right: Any, out: Any) -> None:
        sizes = 2 * left.shape[1], address(right), 4 * right.shape[1], right.shape[0], address(out), 4 * out.shape[1]
        if asks:
            tile(address(left), *sizes, address(right))
        else:
            tile(address(left), *sizes)

    left, dense = noise(3, 10), noise(10, 32)
    right = np.ascontiguousarray(dense.reshape(5, 2, 32).transpose(0, 2, 1)).view(np.uint32)[:, :, 0]
    out = np.ones((3, 32), np.float32)
    run(left, np.ascontiguousarray(right), out)
    np.testing.assert_allclose(out, wide(left) @ wide(dense) + (1 if kind == "adds" else 0), rtol=1e-4, atol=1e-4)


def test_without_kernels_for_pairs_the_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(loader, "_compile_pairs", fail)
    assert loader.load_pair_kernels() is None
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize(
    ("features", "pairs", "tiles", "wide"),
    [
        ("+avx2,+avx512f,+avx512bf16,-amx-bf16,+fma", True, False, False),
        ("+avx2,+avx512f,+avx512bf16,+amx-bf16,+fma", True, True, False),
        ("+avx2,+avx512f,-avx512bf16,-amx-bf16,+fma", False, False, False),
        ("+avx2,-avx512f,-avx512bf16,-amx-bf16,+fma", False, False, True),
        ("+avx2,-avx512f,-avx512bf16,-amx-bf16,-fma", False, False, False),
    ],
)
def test_features_say_what_a_cpu_multiplies_at_once(
    features: str, pairs: bool, tiles: bool, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codegen = cpu_target.target_context.codegen()
    monkeypatch.setattr(codegen, "magic_tuple", lambda: ("x86_64-linux", "some cpu", features))
    assert (has_pair_product(), has_matrix_tiles(), has_wide_product()) == (pairs, tiles, wide)


DOT_FOR_ANOTHER_CPU = """
import numba, numpy as np
from pdcluster.engine.kernels.intrinsics import address, dots_of, has_pair_product
dots = dots_of(4, 1, native=has_pair_product())
@numba.njit
def run(weights, row, out):
    dots(address(weights), 64, address(weights), address(row), 64, 64, address(out), 16)
out = np.zeros(4, np.float32)
run(np.full((4, 32), 0x4000, np.uint16), np.full(32, 0x4040, np.uint16), out)
print(out.tolist())
"""


@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME=generic", "NUMBA_ENABLE_AVX=0"])
def test_what_numba_is_told_of_the_cpu_decides(setting: str) -> None:
    """LLVM ends the process that asks it for an instruction of another CPU."""
    done = subprocess.run(
        ["env", setting, sys.executable, "-c", DOT_FOR_ANOTHER_CPU],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[192.0, 192.0, 192.0, 192.0]\n"), done.stderr


KINDS = (
    "from pdcluster.engine.kernels.intrinsics import *; print(has_pair_product(), has_broad_product(), "
    "has_wide_product())"
)
AVX512 = "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq"


@pytest.mark.parametrize(
    ("name", "features", "kinds"),
    [
        ("haswell", "+avx2,+fma", "False False True"),
        ("skylake-avx512", AVX512, "False True False"),
        ("znver4", f"{AVX512},+avx512bf16", "True False False"),
        ("emeraldrapids", f"{AVX512},+avx512bf16", "True True False"),
        ("emeraldrapids", f"{AVX512},+avx512bf16,+amx-bf16", "True False False"),
        ("generic", "", "False False False"),
    ],
    ids=["avx2", "avx512", "pairs", "slow pairs", "tiles", "none"],
)
def test_how_a_cpu_multiplies_best(name: str, features: str, kinds: str) -> None:
    cpu = ["env", f"NUMBA_CPU_NAME={name}", f"NUMBA_CPU_FEATURES={features}"]
    done = subprocess.run([*cpu, sys.executable, "-c", KINDS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == kinds


@pytest.mark.parametrize("count", [16, 32, 64])
def test_the_greatest_of_some_floats_wherever_it_stands(count: int) -> None:
    greatest = greatest_of(count)

    @numba.njit
    def find(values: Any) -> Any:
        return greatest(address(values))

    values = -np.arange(1.0, count + 1, dtype=np.float32)
    for place in range(count):
        assert find(values) == values.max()
        values = np.roll(values, 1)
        assert values[(place + 1) % count] == -1.0
    assert find(np.full(count, -3e38, np.float32)) == np.float32(-3e38)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    "+avx512f" not in cpu_target.target_context.codegen().magic_tuple()[2].split(","), reason="this CPU has no AVX512"
)
def test_products_and_attention_of_a_cpu_with_avx512_and_nothing_else() -> None:
    """Kernels are compiled for a lesser CPU than this one, with a cache of its own."""
    cpu = ["env", "NUMBA_CPU_NAME=skylake-avx512", f"NUMBA_CPU_FEATURES={AVX512}"]
    tests = [
        str(Path(__file__).parents[1] / name)
        for name in ("ops/test_attention.py", "ops/test_fused.py", "ops/test_select.py", "kernels/test_gemm_f32.py")
    ]
    command = [*cpu, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]

"""Products of float32 rows by panels, of 16 outputs as CPUs with AVX2 do them and of 64 as those with AVX512, against
float32; other CPUs compute the same, if not as fast."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE
from numpy.typing import NDArray

from pdcluster.engine.kernels import loader
from pdcluster.engine.kernels.f32_tiles import wide_tile_of
from pdcluster.engine.kernels.intrinsics import address
from pdcluster.processes.kernel_cache import filling

Words = NDArray[np.uint16]
FILL = 7


@pytest.fixture(scope="module", params=["wide", "broad"])
def kernels(request: pytest.FixtureRequest) -> Any:
    assert loader.load_kernels(KERNEL_CACHE, "bfloat16") is not None
    with filling(Path(numba.config.CACHE_DIR), f"{request.param} panels"):  # type: ignore[attr-defined]
        from pdcluster.engine.kernels import gemm_f32_avx2, gemm_f32_avx512, gemm_pairs

        found: Any = gemm_f32_avx2
        if request.param == "broad":
            sizes = {"PANEL": gemm_pairs.PANEL, "WIDE_BYTES": gemm_f32_avx512.WIDE_BYTES}
            found = SimpleNamespace(
                **sizes, pack_panels=gemm_pairs.pack_panels, multiply_panels=gemm_f32_avx512.multiply_widened
            )
        multiplied(found, noise(1, 2), noise(1, 2), np.zeros(1, np.float32))
        return found


def noise(*size: int) -> Words:
    return loader.as_array(torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16())


def wide(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def packed(kernels: Any, weight: Words) -> NDArray[np.uint32]:
    outputs, inputs = weight.shape
    panels = np.zeros((-(-outputs // kernels.PANEL), inputs // 2, kernels.PANEL), np.uint32)
    kernels.pack_panels(np.ascontiguousarray(weight).view(np.uint32), panels, 0, outputs)
    return panels


def multiplied(
    kernels: Any, x: Words, weight: Words, bias: NDArray[np.float32], column: int = 0, behind: int = 0
) -> NDArray[np.float32]:
    """Outputs in an array that has `column` columns before them and some behind, which the product leaves alone."""
    panels = packed(kernels, weight)
    out = np.full((len(x), column + len(weight) + behind), FILL, np.float32)
    kernels.multiply_panels(x, panels, bias, out, column, 0, len(panels))
    assert (out[:, :column] == FILL).all() and (out[:, column + len(weight) :] == FILL).all()
    return out[:, column : column + len(weight)]


def assert_product(found: NDArray[np.float32], x: Words, weight: Words, bias: NDArray[np.float32]) -> None:
    """Off by what float32 loses of all that was added."""
    left, right = wide(x).astype(np.float64), wide(weight).T.astype(np.float64)
    exact, most = left @ right + bias, np.abs(left) @ np.abs(right) + np.abs(bias)
    assert (np.abs(found - exact) <= 1e-5 * most).all()


@pytest.mark.parametrize("rows", [*range(1, 27), 31, 48, 100])
@pytest.mark.parametrize("outputs", [1, 15, 16, 33, 64, 80, 131, 300, 520])
def test_any_number_of_rows_times_whole_and_partial_panels(kernels: Any, rows: int, outputs: int) -> None:
    x, weight, bias = noise(rows, 96), noise(outputs, 96), wide(noise(outputs, 1))[:, 0]
    assert_product(multiplied(kernels, x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("inputs", [2, 6, 32, 66, 130, 1024])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_any_even_number_of_inputs(kernels: Any, inputs: int, rows: int) -> None:
    x, weight, bias = noise(rows, inputs), noise(70, inputs), np.zeros(70, np.float32)
    assert_product(multiplied(kernels, x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20])
def test_outputs_stand_in_the_columns_that_were_asked_for(kernels: Any, rows: int) -> None:
    x, weight, bias = noise(rows, 64), noise(45, 64), np.ones(45, np.float32)
    assert_product(multiplied(kernels, x, weight, bias, column=3, behind=5), x, weight, bias)


def test_more_rows_than_are_widened_at_once(kernels: Any) -> None:
    inputs, outputs = 2048, 17
    rows = 2 * (kernels.WIDE_BYTES // (4 * inputs)) + 11
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs), wide(noise(outputs, 1))[:, 0]
    assert_product(multiplied(kernels, x, weight, bias), x, weight, bias)


def test_rows_that_are_wider_than_what_is_widened_at_once(kernels: Any) -> None:
    inputs = kernels.WIDE_BYTES // 4 // 4
    x, weight, bias = noise(13, inputs), noise(16, inputs), np.zeros(16, np.float32)
    assert_product(multiplied(kernels, x, weight, bias), x, weight, bias)


def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: Any) -> None:
    x, weight, bias = noise(700, 512), noise(100, 512), wide(noise(100, 1))[:, 0]
    together = multiplied(kernels, x, weight, bias)
    for count in (*range(1, 20), 31, 300):
        assert np.array_equal(multiplied(kernels, x[11 : 11 + count], weight, bias), together[11 : 11 + count])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 13])
@pytest.mark.parametrize("bounds", [(0, 9), (0, 3), (2, 7), (7, 9), (8, 9), (4, 4)])
def test_only_the_panels_of_the_range_are_multiplied(kernels: Any, rows: int, bounds: tuple[int, int]) -> None:
    x, weight, bias = noise(rows, 64), noise(140, 64), np.zeros(140, np.float32)
    out = np.full((rows, 140), FILL, np.float32)
    kernels.multiply_panels(x, packed(kernels, weight), bias, out, 0, *bounds)
    begin, end = (min(kernels.PANEL * bound, 140) for bound in bounds)
    assert_product(out[:, begin:end], x, weight[begin:end], bias[begin:end])
    assert (out[:, :begin] == FILL).all() and (out[:, end:] == FILL).all()


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_pairs", [1, 5, 32])
def test_a_wide_tile_leaves_float32(adds: bool, interleaved: bool, num_pairs: int) -> None:
    tile = wide_tile_of(3, adds=adds, row_bytes=None if interleaved else 8 * num_pairs)

    @numba.njit
    def run(left: Any, right: Any, out: Any) -> None:
        tile(address(left), address(right), 4 * right.shape[1], right.shape[0], address(out), 4 * out.shape[1])

    left, dense = wide(noise(3, 2 * num_pairs)), noise(2 * num_pairs, 20)
    right = np.ascontiguousarray(dense.reshape(num_pairs, 2, 20).transpose(0, 2, 1)).view(np.uint32)[:, :, 0]
    out = np.ones((3, 18), np.float32)
    run(np.ascontiguousarray(left.T) if interleaved else left, np.ascontiguousarray(right), out)
    np.testing.assert_allclose(out[:, :16], left @ wide(dense)[:, :16] + adds, rtol=1e-5, atol=1e-5)
    assert (out[:, 16:] == 1).all()

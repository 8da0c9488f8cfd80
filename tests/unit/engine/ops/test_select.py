"""Norm, activation and matrix products: every implementation against float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numba
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE

from pdcluster.engine.kernels import loader
from pdcluster.engine.kernels.loader import PairKernels, Parallel, load_kernels
from pdcluster.engine.ops.linear import MOST_ROWS, PackedLinear, PlainLinear, can_pack
from pdcluster.engine.ops.packed_weights import PanelLinear, Panels
from pdcluster.engine.ops.select import CpuOps, Ops, TorchOps, select_ops
from pdcluster.kv.layout import DType
from pdcluster.kv.pool import TORCH_DTYPE
from pdcluster.processes.kernel_cache import filling

TOLERANCE: dict[DType, float] = {"float32": 1e-5, "bfloat16": 2e-2}
# Of what is rounded once, when it is stored.
ROUNDED: dict[DType, float] = {"float32": 1e-5, "bfloat16": 2**-8}


@pytest.fixture(params=["torch", "cpu", "cpu with 3 threads", "cpu without panels"])
def ops_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> DType:
    return request.param


@pytest.fixture
def ops(ops_name: str, dtype: DType) -> Iterator[Ops]:
    made: Ops = (
        TorchOps() if ops_name == "torch" else select_ops("cpu", dtype, 3 if "3" in ops_name else 1, KERNEL_CACHE)
    )
    if "without" in ops_name:
        made = without_panels(made)
    assert made.name == ("torch" if ops_name == "torch" else "cpu")
    yield made
    made.close()


def without_panels(ops: Ops) -> CpuOps:
    """As on a CPU for which there are none, or where there is something faster."""
    assert isinstance(ops, CpuOps)
    if ops._pairs is not None:
        with filling(Path(numba.config.CACHE_DIR), "rows"):  # type: ignore[attr-defined]
            loader._compile_products(ops._pairs, in_panels=False)
    return CpuOps(ops._kernels, ops._pairs, ops._parallel, pack=can_pack(), panels=False)


def noise(*size: int, dtype: DType) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(TORCH_DTYPE[dtype])


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rms_norm(ops: Ops, dtype: DType, rows: int) -> None:
    x, weight = noise(rows, 72, dtype="float32"), noise(72, dtype=dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == weight.dtype
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDED[dtype], atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("is_exact", [False, True], ids=["of a library", "of our kernels"])
def test_silu_mul(ops: Ops, dtype: DType, rows: int, is_exact: bool) -> None:
    x = noise(rows, 144, dtype="float32" if is_exact else dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    found = ops.silu_mul(x, TORCH_DTYPE[dtype])
    assert found.dtype == TORCH_DTYPE[dtype]
    torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, rtol=ROUNDED[dtype], atol=1e-5)


def test_silu_of_extreme_gates_is_finite_and_right(ops: Ops, dtype: DType) -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(TORCH_DTYPE[dtype])
    torch.testing.assert_close(
        ops.silu_mul(x, x.dtype).float(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]), rtol=1e-2, atol=1e-6
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("sizes", [(8,), (13,), (32, 16, 16), (1030, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_puts_the_outputs_of_all_weights_side_by_side(
    ops: Ops, dtype: DType, rows: int, sizes: tuple[int, ...], biased: bool
) -> None:
    x = noise(rows, 66, dtype=dtype)
    weights = [noise(size, 66, dtype=dtype) for size in sizes]
    biases = [noise(size, dtype=dtype) if biased else None for size in sizes]
    expected = torch.cat(
        [x.double() @ w.double().T + (0 if b is None else b.double()) for w, b in zip(weights, biases, strict=True)],
        dim=-1,
    )
    found = ops.linear(weights, biases)(x)
    assert found.dtype in (x.dtype, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 5)


def test_only_some_of_joined_weights_may_have_a_bias(ops: Ops, dtype: DType) -> None:
    x, weights, bias = (
        noise(2, 8, dtype=dtype),
        [noise(4, 8, dtype=dtype), noise(6, 8, dtype=dtype)],
        noise(6, dtype=dtype),
    )
    found = ops.linear(weights, [None, bias])(x)
    expected = torch.cat([x @ weights[0].T, x @ weights[1].T + bias], dim=-1)
    torch.testing.assert_close(found.to(x.dtype), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 5)


@pytest.mark.parametrize("inputs", [64, 66, 67])
@pytest.mark.parametrize("rows", [1, 3, 33, 130])
@pytest.mark.parametrize("outputs", [3, 5000])
def test_logits_are_sums_that_nothing_rounded(ops: Ops, dtype: DType, rows: int, inputs: int, outputs: int) -> None:
    """In models of every type, for any number of rows, and where no kernel takes the shape."""
    x, weight = noise(rows, inputs, dtype=dtype), noise(outputs, inputs, dtype=dtype)
    found = ops.head(weight)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 33])
def test_our_own_kernels_give_sums_that_nothing_rounded(rows: int) -> None:
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    assert isinstance(ops, CpuOps)
    if ops._panels is None and rows > MOST_ROWS:
        pytest.skip("without panels these are oneDNN's")
    x, weights = noise(rows, 96, dtype="bfloat16"), [noise(size, 96, dtype="bfloat16") for size in (64, 33)]
    expected = torch.cat([x.double() @ weight.double().T for weight in weights], dim=-1)
    torch.testing.assert_close(ops.linear(weights, [None, None])(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [*range(1, 10), 13, 31, 32, 33])
@pytest.mark.parametrize("sizes", [(4,), (7,), (64, 32, 33), (257,)])
def test_few_rows_times_weights_of_whole_vectors(ops: Ops, dtype: DType, rows: int, sizes: tuple[int, ...]) -> None:
    x, weights, bias = (
        noise(rows, 96, dtype=dtype),
        [noise(size, 96, dtype=dtype) for size in sizes],
        noise(sizes[0], dtype=dtype),
    )
    biases = [bias, *[None] * (len(sizes) - 1)]
    expected = torch.cat([x.double() @ weight.double().T for weight in weights], dim=-1)
    expected[:, : sizes[0]] += bias.double()
    torch.testing.assert_close(
        ops.linear(weights, biases)(x).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 5
    )


@pytest.mark.parametrize("inputs", [128, 2048])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(inputs: int) -> None:
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    product, x = ops.linear([noise(40, inputs, dtype="bfloat16")], [None]), noise(MOST_ROWS, inputs, dtype="bfloat16")
    together = product(x)
    for count in (1, 2, 3, 5, 6, 7, 8, 12, 14, 19, 25):
        assert torch.equal(product(x[7 : 7 + count].clone()), together[7 : 7 + count])


def test_weights_are_laid_out_once_for_all_that_multiply_by_them() -> None:
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    assert isinstance(ops, CpuOps)
    if ops._panels is None:
        pytest.skip("this CPU has no use for panels")
    weight, other = noise(70, 66, dtype="bfloat16"), noise(3, 66, dtype="bfloat16")
    panels = ops._panels.of(weight)
    assert ops._pairs is not None
    outputs = ops._pairs.PANEL
    assert panels.shape == (-(-70 // outputs), 33, outputs) and ops._panels.of(weight.view(70, 66)) is panels
    pairs = panels.transpose(0, 2, 1).reshape(-1, 33)
    assert np.array_equal(pairs[:70], weight.view(torch.uint16).numpy().view(np.uint32)) and not pairs[70:].any()
    assert not np.shares_memory(panels, ops._panels.of(other)) and not np.shares_memory(
        panels, ops._panels.of(weight[:64])
    )


def test_panels_begin_with_a_cache_line() -> None:
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    assert isinstance(ops, CpuOps)
    if ops._panels is None:
        pytest.skip("this CPU has no use for panels")
    for outputs, inputs in ((70, 66), (3, 66), (64, 64)):
        assert ops._panels.of(noise(outputs, inputs, dtype="bfloat16")).ctypes.data % 64 == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_weights_of_a_layer_lie_behind_each_other(num_layers: int) -> None:
    """The kernel of all layers was compiled for layers that lie apart: a lone one is of that kind, too."""
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    assert isinstance(ops, CpuOps)
    if ops._panels is None:
        pytest.skip("this CPU has no use for panels")
    kinds = [
        [noise(outputs, inputs, dtype="bfloat16") for _ in range(num_layers)]
        for outputs, inputs in ((128, 64), (40, 66), (64, 96))
    ]
    stacks = ops._panels.interleaved(kinds)
    lie = []
    for weights, stack in zip(kinds, stacks, strict=True):
        assert not stack.flags.c_contiguous and stack[0].flags.c_contiguous and stack.flags.writeable
        for layer, weight in enumerate(weights):
            kept = ops._panels.of(weight)
            np.testing.assert_array_equal(
                stack[layer], Panels(ops._panels._kernels, ops._panels._parallel).of(weight.clone())
            )
            assert np.shares_memory(kept, stack[layer]) and kept.ctypes.data == stack[layer].ctypes.data
            lie.append((layer, kept.ctypes.data, kept.nbytes))
    lie.sort(key=lambda each: each[0])  # and those of a layer in the order of their kinds
    assert all(begin + size == following for (_, begin, size), (_, following, _) in pairwise(lie))


def test_a_weight_and_its_transpose_have_panels_of_their_own() -> None:
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    x, square = noise(2, 64, dtype="bfloat16"), noise(64, 64, dtype="bfloat16")
    for weight in (square, square.T):
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(ops.linear([weight], [None])(x).double(), expected, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (6, 1), (64, 2)])
def test_a_product_of_little_work_wakes_no_other_thread(rows: int, parts: int) -> None:
    """The keys' weights of a model of 0.5 B: a row takes a tenth of what handing half of it over costs."""
    native_pairs = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    assert isinstance(native_pairs, CpuOps) and native_pairs._pairs is not None
    pairs, ranges = native_pairs._pairs, []
    recorded = SimpleNamespace(
        pack_panels=pairs.pack_panels, multiply_panels=lambda *args: ranges.append(args[-2:]), PANEL=pairs.PANEL
    )
    parallel = Parallel(2)
    kernels = cast(PairKernels, recorded)
    PanelLinear([noise(128, 896, dtype="bfloat16")], [None], Panels(kernels, parallel), kernels, parallel)(
        noise(rows, 896, dtype="bfloat16")
    )
    parallel.close()
    assert len(ranges) == parts and {panel for lo, hi in ranges for panel in range(lo, hi)} == set(
        range(128 // pairs.PANEL)
    )


def test_odd_inputs_are_not_packed() -> None:
    kernels = load_kernels(KERNEL_CACHE, "bfloat16")
    assert kernels is not None
    ops = CpuOps(kernels, None, Parallel(1), pack=True)
    assert isinstance(ops.linear([noise(4, 7, dtype="bfloat16")], [None]), PlainLinear)


@pytest.mark.skipif(not can_pack(), reason="this CPU has no oneDNN product for bfloat16")
def test_packed_products_of_any_number_of_rows() -> None:
    weight = noise(24, 16, dtype="bfloat16")
    product = PackedLinear([weight], [None])
    for rows in (1, 2, 50):
        x = noise(rows, 16, dtype="bfloat16")
        torch.testing.assert_close(product(x), x @ weight.T, rtol=2e-2, atol=5e-2)


def test_weights_may_lie_where_the_file_put_them() -> None:
    ops = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    storage, x = noise(64 * 32 + 1, dtype="bfloat16"), noise(3, 32, dtype="bfloat16")
    shifted = storage[1:].view(64, 32)
    assert torch.equal(ops.linear([shifted], [None])(x), ops.linear([shifted.clone()], [None])(x))


def test_heads_are_rotated_alike_by_every_compiled_copy() -> None:
    """A kernel that others call is compiled into each of them; which copy runs depends on what a process has loaded. In
    float32 no rounding hides a difference."""
    kernels = cast(Any, load_kernels(KERNEL_CACHE, "float32"))
    rng = np.random.default_rng(3)
    rows, heads, size = 2000, 4, 32
    qkv = rng.standard_normal((rows, (heads + 2) * size)).astype(np.float32)
    phase, eps, zeros = (
        rng.uniform(0, 6, (rows, size // 2)).astype(np.float32),
        np.float32(1e-6),
        np.zeros(rows, np.int64),
    )
    cos, sin, norm, scratch = np.cos(phase), np.sin(phase), qkv[0, :size].copy(), np.empty(size, np.float32)
    together, alone = np.empty((rows, heads, size), np.float32), np.empty((rows, heads, size), np.float32)
    pool = np.zeros((1, 1, 2, 1, 8, size), np.float32)
    kernels.store_kv(qkv, norm, norm, True, eps, cos, sin, zeros, zeros, pool, 0, together, 0, rows)
    for row, head in np.ndindex(rows, heads):
        source = qkv[row, head * size : (head + 1) * size]
        kernels.rotate(source, norm, True, eps, cos[row], sin[row], scratch, alone[row, head])
    assert np.array_equal(together, alone)

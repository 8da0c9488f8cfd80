"""Norm, activation and matrix products: every implementation against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checkpoints import KERNEL_CACHE

from pdcluster.engine.linear import PackedLinear, PlainLinear, as_pairs, can_pack
from pdcluster.engine.native import Parallel, load_kernels
from pdcluster.engine.ops import CpuOps, Ops, TorchOps, select_ops
from pdcluster.kv.layout import DType
from pdcluster.kv.pool import TORCH_DTYPE

TOLERANCE: dict[DType, float] = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(params=["torch", "cpu", "cpu with 3 threads"])
def ops_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> DType:
    return request.param


@pytest.fixture
def ops(ops_name: str, dtype: DType) -> Iterator[Ops]:
    made: Ops = TorchOps() if ops_name == "torch" else select_ops("cpu", dtype, 3 if "3" in ops_name else 1, KERNEL_CACHE)
    assert made.name == ("torch" if ops_name == "torch" else "cpu")
    yield made
    made.close()


def noise(*size: int, dtype: DType) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(TORCH_DTYPE[dtype])


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rms_norm(ops: Ops, dtype: DType, rows: int) -> None:
    x, weight = noise(rows, 72, dtype=dtype), noise(72, dtype=dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_silu_mul(ops: Ops, dtype: DType, rows: int) -> None:
    x = noise(rows, 144, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(ops.silu_mul(x).double(), gate * gate.sigmoid() * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_silu_of_extreme_gates_is_finite_and_right(ops: Ops, dtype: DType) -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(TORCH_DTYPE[dtype])
    torch.testing.assert_close(ops.silu_mul(x).float(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("sizes", [(8,), (13,), (32, 16, 16), (1030, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_puts_the_outputs_of_all_weights_side_by_side(ops: Ops, dtype: DType, rows: int, sizes: tuple[int, ...], biased: bool) -> None:
    x = noise(rows, 66, dtype=dtype)
    weights = [noise(size, 66, dtype=dtype) for size in sizes]
    biases = [noise(size, dtype=dtype) if biased else None for size in sizes]
    expected = torch.cat([x.double() @ w.double().T + (0 if b is None else b.double()) for w, b in zip(weights, biases, strict=True)], dim=-1)
    found = ops.linear(weights, biases)(x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 5)


def test_only_some_of_joined_weights_may_have_a_bias(ops: Ops, dtype: DType) -> None:
    x, weights, bias = noise(2, 8, dtype=dtype), [noise(4, 8, dtype=dtype), noise(6, 8, dtype=dtype)], noise(6, dtype=dtype)
    found = ops.linear(weights, [None, bias])(x)
    expected = torch.cat([x @ weights[0].T, x @ weights[1].T + bias], dim=-1)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 5)


def test_odd_inputs_are_not_packed() -> None:
    kernels = load_kernels(KERNEL_CACHE, "bfloat16")
    assert kernels is not None
    ops = CpuOps(kernels, Parallel(1), pack=True)
    assert isinstance(ops.linear([noise(4, 7, dtype="bfloat16")], [None]), PlainLinear)


@pytest.mark.skipif(not can_pack(), reason="this CPU has no oneDNN product for bfloat16")
def test_packed_products_work_without_numba() -> None:
    weight, x = noise(24, 16, dtype="bfloat16"), noise(1, 16, dtype="bfloat16")
    found = PackedLinear([weight], [None], None, Parallel(1))(x)
    torch.testing.assert_close(found, x @ weight.T, rtol=2e-2, atol=5e-2)


def test_weights_that_the_file_did_not_align_are_copied() -> None:
    storage = torch.arange(33, dtype=torch.bfloat16)
    assert as_pairs(storage[1:].view(4, 8)).shape == (4, 4)
    assert as_pairs(storage[1:].view(4, 8)).tolist() == as_pairs(storage[1:].clone().view(4, 8)).tolist()

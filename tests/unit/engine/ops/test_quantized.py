"""Weights of eight bits: what they stand for, that products are right for any number of rows, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE

from pdcluster.core.errors import ConfigError
from pdcluster.engine.kernels.intrinsics import address
from pdcluster.engine.kernels.loader import as_array
from pdcluster.engine.kernels.quantized import dots_of, quantize
from pdcluster.engine.ops.linear import MOST_ROWS
from pdcluster.engine.ops.quantized import (
    Int8Linear,
    Int8Ops,
    PlainInt8Linear,
    Quantization,
    TorchInt8Ops,
    int8_ops,
    quantize_rows,
    quantize_weight,
)
from pdcluster.engine.ops.select import select_ops
from pdcluster.kv.layout import DEFAULT_ARITHMETIC
from pdcluster.node.native.process import arithmetic_of, check
from pdcluster.settings.config import NodeConfig

SCHEMES: tuple[Quantization, ...] = ("int8", "w8a8_int8")
ROWS = (1, 2, 3, 4, 5, 8, 31, MOST_ROWS, MOST_ROWS + 1, 130)


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Quantization:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def ops(scheme: Quantization, threads: int) -> Iterator[Int8Ops]:
    made = int8_ops(scheme, "cpu", "bfloat16", threads, KERNEL_CACHE)
    assert isinstance(made, Int8Ops)
    yield made
    made.close()


def noise(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


def widened(weight: torch.Tensor) -> torch.Tensor:
    found = quantize_weight(weight)
    return found.values.double() * found.scales.double()[:, None]


# ---------------------------------------------------------------- numbers


def test_a_weight_is_off_by_at_most_half_a_step_of_its_channel() -> None:
    weight = noise(50, 96) * torch.logspace(-6, 6, 50)[:, None].bfloat16()
    found = quantize_weight(weight)
    assert found.values.dtype == torch.int8
    assert found.values.abs().amax(dim=1).eq(127).all()
    assert ((widened(weight) - weight.double()).abs() <= 0.5001 * found.scales.double()[:, None]).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = noise(4, 64)
    weight[2] = 0
    assert widened(weight)[2].eq(0).all() and torch.isfinite(quantize_weight(weight).scales).all()


@pytest.mark.parametrize("planes", [1, 2])
def test_rows_are_bytes_that_stand_for_them(planes: int) -> None:
    x = noise(20, 70) * torch.logspace(-20, 20, 20)[:, None].bfloat16()
    x[3] = 0
    found, scales = np.empty((20 * planes, 128), np.uint8), np.empty(20, np.float32)
    quantize(as_array(x), planes, found, scales, 0, 20)
    wide = found.reshape(20, planes, 128).astype(np.int64) - 128
    whole = wide[:, 0] if planes == 1 else 256 * wide[:, 0] + wide[:, 1]
    assert not whole[:, 70:].any(), "what pads a row counts nothing"
    error = np.abs(whole[:, :70] * scales[:, None].astype(np.float64) - x.double().numpy())
    assert (error <= 0.505 * scales[:, None]).all()
    if planes == 1:
        values, _ = quantize_rows(x)
        assert np.array_equal(whole[:, :70], values.numpy())


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_sums_of_bytes_are_exact_with_and_without_the_instruction(native: bool, rows: int) -> None:
    from pdcluster.engine.kernels import quantized

    if native and not quantized.NATIVE:
        pytest.skip("this CPU has no byte product")
    block = dots_of(rows, native=native)

    @numba.njit  # type: ignore[untyped-decorator]
    def run(weights, x, out):  # type: ignore[no-untyped-def]
        block(address(weights), x.shape[1], address(x), x.shape[1], address(out))

    rng = np.random.default_rng(rows)
    weights, x = rng.integers(-127, 128, (4, 192)).astype(np.int8), rng.integers(0, 256, (rows, 192)).astype(np.uint8)
    weights[1], x[0] = -127, 255
    out = np.zeros(16, np.int32)
    run(weights, x, out)
    assert np.array_equal(out[: 4 * rows].reshape(rows, 4), x.astype(np.int64) @ weights.astype(np.int64).T)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("inputs", [32, 96, 192, 608])
@pytest.mark.parametrize("sizes", [(4,), (7, 33), (300,)])
def test_a_product_is_that_of_the_quantised_weights(
    ops: Int8Ops, scheme: Quantization, inputs: int, sizes: tuple[int, ...]
) -> None:
    weights = [noise(size, inputs) for size in sizes]
    biases = [noise(sizes[0]), *[None] * (len(sizes) - 1)]
    product, plain = ops.linear(weights, biases), PlainInt8Linear(weights, biases, scheme)
    assert isinstance(product, Int8Linear)
    for rows in ROWS:
        x = noise(rows, inputs)
        values, scales = quantize_rows(x)
        given = x.double() if scheme == "int8" else values.double() * scales.double()
        expected = torch.cat([given @ widened(weight).T for weight in weights], dim=-1)
        expected[:, : sizes[0]] += biases[0].double()  # type: ignore[union-attr]
        for found in (product(x), plain(x)):
            error = (found.double() - expected).norm() / expected.norm()
            assert error < 0.004, "what quantisation itself changes is twice that"


def test_the_dynamic_product_of_a_row_is_the_same_bits_among_any_others(threads: int) -> None:
    """Sums of whole numbers have no order: up to 2^24 they are the same by the kernel, by oneDNN and by torch."""
    made = int8_ops("w8a8_int8", "cpu", "bfloat16", threads, KERNEL_CACHE)
    weights, x = [noise(100, 96), noise(44, 96)], noise(200, 96)
    product, plain = made.linear(weights, [None, noise(44)]), PlainInt8Linear(weights, [None, noise(44)], "w8a8_int8")
    whole = product(x)
    for begin, end in ((0, 1), (5, 8), (11, 43), (50, 83), (0, 200)):
        assert torch.equal(product(x[begin:end].clone()), whole[begin:end])
    assert torch.equal(plain(x), whole)
    made.close()


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_sums_of_bytes_are_exact_by_numbers_of_16_bits(rows: int) -> None:
    from pdcluster.engine.kernels import quantized

    if not quantized.WIDE:
        pytest.skip("this CPU has something wider")
    block = quantized.wide_dots_of(rows)

    @numba.njit  # type: ignore[untyped-decorator]
    def run(weights, x, out):  # type: ignore[no-untyped-def]
        block(address(weights), x.shape[1], address(x), x.shape[1], address(out))

    rng = np.random.default_rng(rows)
    weights, x = rng.integers(-128, 128, (4, 192)).astype(np.int8), rng.integers(0, 256, (rows, 192)).astype(np.uint8)
    weights[1], weights[2], x[0] = -128, 127, 255
    out = np.zeros(16, np.int32)
    run(weights, x, out)
    assert np.array_equal(out[: 4 * rows].reshape(rows, 4), x.astype(np.int64) @ weights.astype(np.int64).T)


def test_without_the_instruction_many_rows_are_multiplied_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's sums may saturate there."""
    made = int8_ops("w8a8_int8", "cpu", "bfloat16", 1, KERNEL_CACHE)
    product, x = made.linear([noise(100, 96)], [None]), noise(70, 96)
    usual = product(x)
    monkeypatch.setattr("pdcluster.engine.kernels.quantized.NATIVE", False)
    monkeypatch.setattr(Int8Linear, "_dynamic_many", None)
    assert torch.equal(product(x), usual)
    made.close()


def test_what_is_no_number_stays_none_and_leaves_other_rows_alone(ops: Int8Ops) -> None:
    product = ops.linear([noise(40, 64)], [None])
    for rows in (5, 60):
        x = noise(rows, 64)
        clean = product(x.clone())
        for bad in (float("nan"), float("inf")):
            x[2, 7] = bad
            found = product(x)
            assert not torch.isfinite(found[2]).any()
            assert torch.equal(found[3:], clean[3:]) and torch.equal(found[:2], clean[:2])


def test_the_head_keeps_its_weights(ops: Int8Ops) -> None:
    plain, weight, x = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE), noise(100, 64), noise(3, 64)
    assert torch.equal(ops.head(weight)(x), plain.head(weight)(x))
    plain.close()


# ---------------------------------------------------------------- what is chosen


def test_without_numba_plain_torch_does_the_same(
    monkeypatch: pytest.MonkeyPatch, scheme: Quantization, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    made = int8_ops(scheme, "cpu", "bfloat16", 1, tmp_path)
    assert isinstance(made, TorchInt8Ops)
    weight, x = noise(40, 72), noise(3, 72)
    assert torch.equal(made.linear([weight], [None])(x), PlainInt8Linear([weight], [None], scheme)(x))
    assert torch.equal(made.head(weight)(x), torch.nn.functional.linear(x.float(), weight.float()))


def test_what_has_no_int8_products_is_refused_by_name(scheme: Quantization) -> None:
    with pytest.raises(ConfigError, match=f"quantization {scheme} is not supported in float32.*--dtype bfloat16"):
        int8_ops(scheme, "cpu", "float32", 1, KERNEL_CACHE)
    with pytest.raises(ConfigError, match=f"quantization {scheme} is not supported on cuda"):
        int8_ops(scheme, "cuda", "bfloat16", 1, KERNEL_CACHE)
    with pytest.raises(ConfigError, match="65536"):
        TorchInt8Ops(scheme).linear([torch.zeros(1, (1 << 16) + 1, dtype=torch.bfloat16)], [None])
    with pytest.raises(ConfigError, match=r"node\.quantization is .* node\.deterministic is set"):
        check(NodeConfig(quantization=scheme, deterministic=True))
    with pytest.raises(ConfigError, match=r"node\.quantization is .* node\.device is cuda"):
        check(NodeConfig(quantization=scheme, device="cuda"))


def test_nodes_of_other_weights_do_not_join() -> None:
    found = {arithmetic_of(NodeConfig(quantization=scheme, tp=ranks)) for scheme in SCHEMES for ranks in (1, 2)}
    assert len(found) == 4
    assert arithmetic_of(NodeConfig()) == DEFAULT_ARITHMETIC not in found

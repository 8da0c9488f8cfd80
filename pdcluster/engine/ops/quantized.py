"""Weights of eight bits, symmetric, with one scale for each output channel: half the size of bfloat16, whose reading
bounds decoding.

- int8: the weights alone. Products are as exact as bfloat16 (few rows: in 16-bit integers, many: weights are widened
  again).
- w8a8_int8: activations too, one scale for each token. Twice as fast for prompts, less exact.

All products but the head's. The embedding stays as it is, too. Quantised when the model is loaded (round to nearest, no
data). With numba `Int8Linear`, through kernels and oneDNN, else `PlainInt8Linear`, which is also the reference in
tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcluster.core.errors import ConfigError
from pdcluster.engine.kernels.loader import (
    Array,
    Int8Kernels,
    Kernels,
    PairKernels,
    Parallel,
    as_array,
    load_int8_kernels,
    load_kernels,
    load_pair_kernels,
)
from pdcluster.engine.model.rope import RopeConfig
from pdcluster.engine.model.weights import Weights
from pdcluster.engine.ops.attention import AttentionShape
from pdcluster.engine.ops.fused import FusedLayers
from pdcluster.engine.ops.linear import MOST_ROWS, WEIGHT_GRAIN, Linear, bias_array, can_pack
from pdcluster.engine.ops.packed_weights import Panels
from pdcluster.engine.ops.select import CpuOps, Ops, TorchOps
from pdcluster.kv.layout import DType

Quantization = Literal["none", "int8", "w8a8_int8"]

LEVELS = 127.0
# Bytes of a row that are multiplied at once: rows are padded to a multiple.
GRAIN = 64
# Of a row, whose sums of products are less than 2^31 then.
MOST_INPUTS = 1 << 16
ROW_GRAIN = 16


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """values: int8 [outputs, inputs], -127 … 127; scales: float32 [outputs]."""

    values: Tensor
    scales: Tensor


def quantize_weight(weight: Tensor) -> Int8Weight:
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / LEVELS
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return Int8Weight((wide / scales[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8), scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as int8 and a scale for each row."""
    wide = x.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    factor = torch.where(
        most > 0, torch.full_like(most, LEVELS) / most, torch.zeros_like(most)
    )  # a number ÷ a tensor is rounded twice
    return (wide * factor).round().to(torch.int8), most / LEVELS


class PlainInt8Linear:
    """In plain torch, a fused product's weights one by one."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], quantization: Quantization) -> None:
        self._parts = tuple((quantize_weight(weight), bias) for weight, bias in zip(weights, biases, strict=True))
        self._product = _dynamic if quantization == "w8a8_int8" else _weights_alone

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [self._product(x, weight, bias) for weight, bias in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _weights_alone(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    return F.linear(x, (weight.values.float() * weight.scales[:, None]).to(x.dtype), bias)


def _dynamic(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Whole numbers in float32: exact up to 2^24. torch's own product of bytes may saturate on CPUs without VNNI."""
    rows, scales = quantize_rows(x)
    wide = F.linear(rows.float(), weight.values.float()) * (scales * weight.scales)
    return wide if bias is None else wide + bias.float()


class Int8Linear:
    """The weights of a fused product side by side, in a private copy. scratch: widened weights, one for all products of
    a model."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        quantization: Quantization,
        kernels: Int8Kernels,
        parallel: Parallel,
        scratch: WidenScratch,
    ) -> None:
        parts = [quantize_weight(weight) for weight in weights]
        self._kernels, self._parallel, self._scratch = kernels, parallel, scratch
        self._is_dynamic = quantization == "w8a8_int8"
        self._num_inputs = weights[0].shape[1]
        values = torch.cat([part.values for part in parts])
        self._values = F.pad(values, (0, -values.shape[1] % GRAIN)).contiguous()
        self._scales = torch.cat([part.scales for part in parts])
        self.width = values.shape[0]
        self.arrays: tuple[Array, Array, Array, Array] = (
            self._values.numpy(),
            self._scales.numpy(),
            values.int().sum(dim=1, dtype=torch.int32).numpy(),
            np.concatenate([bias_array(bias, weight.shape[0]) for weight, bias in zip(weights, biases, strict=True)]),
        )
        self._packed: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def planes(self) -> int:
        return 1 if self._is_dynamic else 2

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.shape[0] > MOST_ROWS and not self._is_dynamic:
            return self._widened_many(x)
        if x.shape[0] > MOST_ROWS and self._kernels.NATIVE and _has_byte_product():
            return self._dynamic_many(x)
        out = torch.empty(x.shape[0], self.width)
        tasks = self.width - 3 * (self.width // 4)
        self._parallel.run(
            self._kernels.multiply, tasks, as_array(x), self.planes, *self.arrays, as_array(out), grain=WEIGHT_GRAIN
        )
        return out

    def _dynamic_many(self, x: Tensor) -> Tensor:
        """oneDNN multiplies bytes with a zero of 128, exactly where the CPU has VNNI; scales of rows it does not
        know."""
        if self._packed is None:
            packed = torch.ops.onednn.qlinear_prepack(self._values, None)
            self._packed = packed, torch.ones(self.width), torch.zeros(self.width, dtype=torch.int64)
        packed, ones, zeros = self._packed
        rows, scales = torch.empty(x.shape[0], self._values.shape[1], dtype=torch.uint8), torch.empty(x.shape[0])
        self._parallel.run(
            self._kernels.quantize, x.shape[0], as_array(x), 1, rows.numpy(), scales.numpy(), grain=ROW_GRAIN
        )
        sums = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out = torch.empty(x.shape[0], self.width)
        _, weight_scales, _, bias = self.arrays
        arrays = sums.numpy(), scales.numpy(), weight_scales, bias, as_array(out)
        self._parallel.run(self._kernels.finish, x.shape[0], *arrays, grain=ROW_GRAIN)
        return out

    def _widened_many(self, x: Tensor) -> Tensor:
        weight = self._scratch.of(self.width, self._num_inputs)
        values, scales, _, bias = self.arrays
        self._parallel.run(self._kernels.dequantize, self.width, values, scales, as_array(weight), grain=WEIGHT_GRAIN)
        return self._scratch.multiply(x, weight, bias)


class WidenScratch:
    """Memory for one widened weight, as large as the largest, and the product by it. Used by the engine's worker thread
    only. panels: where they are faster than torch's."""

    def __init__(self, panels: Panels | None) -> None:
        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self._panels = panels

    def of(self, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.bfloat16)
        return self._memory[:size].view(*shape)

    def multiply(self, x: Tensor, weight: Tensor, bias: Array) -> Tensor:
        if self._panels is not None and weight.shape[1] % 2 == 0:
            return self._panels.multiply_once(x, weight, bias)
        return F.linear(x, weight, torch.from_numpy(bias).to(x.dtype) if bias.any() else None)


class Int8Ops(CpuOps):
    """All but the products is CpuOps'."""

    name = "cpu, int8"

    def __init__(
        self,
        kernels: Kernels,
        pairs: PairKernels | None,
        int8: Int8Kernels,
        parallel: Parallel,
        quantization: Quantization,
    ) -> None:
        super().__init__(kernels, pairs, parallel, pack=can_pack())
        self._int8, self._quantization = int8, quantization
        from pdcluster.engine.kernels.intrinsics import has_broad_product  # needs numba, as whoever comes here has

        self._widened = WidenScratch(self._panels if has_broad_product() or not can_pack() else None)

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        _check_inputs(weights)
        if sum(weight.shape[0] for weight in weights) < 4:
            return PlainInt8Linear(weights, biases, self._quantization)
        return Int8Linear(weights, biases, self._quantization, self._int8, self._parallel, self._widened)

    def fused_layers(
        self, weights: Weights, shape: AttentionShape, pages: Tensor, rope: RopeConfig
    ) -> FusedLayers | None:
        return None  # its kernel reads bfloat16 weights


class TorchInt8Ops(TorchOps):
    """Where there is no numba."""

    name = "torch, int8"

    def __init__(self, quantization: Quantization) -> None:
        super().__init__("cpu")
        self._quantization = quantization

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        _check_inputs(weights)
        return PlainInt8Linear(weights, biases, self._quantization)


def int8_ops(quantization: Quantization, device: str, dtype: DType, threads: int, cache_dir: Path) -> Ops:
    if device != "cpu":
        raise ConfigError(
            f"quantization {quantization} is not supported on {device}: its kernels are for CPUs; use --device cpu "
            "or leave it out"
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"quantization {quantization} is not supported in {dtype}: what is not quantised is bfloat16; add "
            "--dtype bfloat16"
        )
    kernels = load_kernels(cache_dir, dtype)
    int8 = load_int8_kernels() if kernels is not None else None
    if kernels is None or int8 is None:
        return TorchInt8Ops(quantization)
    return Int8Ops(kernels, load_pair_kernels(), int8, Parallel(threads), quantization)


def int8_arithmetic(quantization: Quantization, ranks: int) -> str:
    """What two nodes must have in common, beside the model, to hold the same quantised weights. Ranks have scales of
    their own.
    """
    return f"{quantization}, {ranks} rank{'s' if ranks > 1 else ''}"


def _has_byte_product() -> bool:
    try:
        torch.ops.onednn.qlinear_prepack  # noqa: B018 (an op that is not built in raises here)
        torch.ops.onednn.qlinear_pointwise  # noqa: B018
    except AttributeError:
        return False
    return True


def _check_inputs(weights: Sequence[Tensor]) -> None:
    inputs = weights[0].shape[1]
    if inputs > MOST_INPUTS:
        raise ConfigError(
            f"quantization is not supported for weights of {inputs} inputs: sums of more than {MOST_INPUTS} products "
            "may overflow"
        )

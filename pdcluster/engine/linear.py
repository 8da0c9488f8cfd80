"""Matrix products with weights: one call for projections that share their input, its outputs side by side.

PlainLinear    F.linear, any device and type; the weights stay views of the mapped files
PackedLinear   bfloat16 on CPU: one row by the numba kernel, which reads the mapped weights; more rows by oneDNN on a private, prepacked copy
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdcluster.engine.native import Kernels, Parallel, as_array

GRAIN_BLOCKS = 64
"""Blocks of eight outputs below which a thread is not worth waking."""


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] → [n, outputs of all weights together]."""


class PlainLinear:
    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._parts = tuple(zip(weights, biases, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, weight, bias) for weight, bias in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class PackedLinear:
    """kernels None: every number of rows goes through oneDNN."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kernels: Kernels | None, parallel: Parallel) -> None:
        self._kernels, self._parallel = kernels, parallel
        self._sizes = tuple(weight.shape[0] for weight in weights)
        self._ends = tuple(accumulate(self._sizes))
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)))
        self._bias = _joined_bias(biases, self._sizes)
        rows = torch.zeros(self._ends[-1]) if self._bias is None else self._bias.float()
        self._parts = tuple(
            (as_pairs(weight), rows[end - size : end].numpy(), end - size, end)
            for weight, size, end in zip(weights, self._sizes, self._ends, strict=True)
        )

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1 and self._kernels is not None:
            return self._one_row(x, self._kernels)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product

    def _one_row(self, x: Tensor, kernels: Kernels) -> Tensor:
        out = torch.empty(1, self._ends[-1], dtype=x.dtype)
        target, row = as_array(out)[0], x[0].view(torch.uint32).numpy()
        for weight, bias, begin, end in self._parts:
            self._parallel.run(kernels.matvec, -(-(end - begin) // 8), row, weight, bias, target[begin:end], grain=GRAIN_BLOCKS)
        return out


def can_pack() -> bool:
    """Whether this torch and this CPU have oneDNN's prepacked bfloat16 product."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        torch.ops.mkldnn._reorder_linear_weight  # noqa: B018 (an op that is not built in raises here)
        torch.ops.mkldnn._linear_pointwise  # noqa: B018
    except AttributeError:
        return False
    return True


def as_pairs(weight: Tensor) -> object:
    """uint32 [outputs, inputs / 2] over the same bytes; copied only when the file did not align them."""
    if weight.data_ptr() % 4:
        weight = weight.clone()
    return weight.view(torch.uint32).numpy()


def _joined_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros(size, dtype=torch.bfloat16) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)])

"""Matrix products with weights: one call for projections that share their input, its outputs side by side.

- PlainLinear: F.linear, any device and type. The weights stay views of the mapped files.
- PackedLinear: bfloat16 on CPU. oneDNN on a private, prepacked copy.
- RowsLinear: bfloat16 on CPU. Few rows by a kernel that reads the mapped weights at the speed of memory, more by one of
  the others.
- PlainHead: the product that gives logits, any device and type.

Kernels of pdcluster give their sums in float32. Libraries give bfloat16, since torch has no product on a CPU that keeps
the sums. Logits are always float32: at 16 and above a bfloat16 is off by up to 0.06, which was the largest error of
all.

On CPUs with AVX512 or AVX2, but no tiles for bfloat16, `packed_weights.PanelLinear` is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcluster.engine.kernels.loader import Array, PairKernels, Parallel, as_array

# Up to so many rows the kernel was at least as fast as oneDNN (Zen 4). With more, oneDNN's better use of registers
# wins.
MOST_ROWS = 32

# Weights that a head widens at once.
WIDENED = 4096

# Weights of each of the kernel's four runs below which a thread is not worth waking.
WEIGHT_GRAIN = 128


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] → [n, outputs of all weights together], in float32 or in the type of x."""


class PlainLinear:
    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._parts = tuple(zip(weights, biases, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, weight, bias) for weight, bias in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class PackedLinear:
    """The copy is made when it is first needed. Nodes that never see many rows of a weight (the head) do not pay for
    it.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._weights = tuple(weights)
        self._bias = _joined_bias(biases, [weight.shape[0] for weight in weights])
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            whole = self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(whole)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


class PlainHead:
    """Logits in float32. A CPU widens some weights at a time; CUDA's product keeps its sums (not run on hardware)."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight.dtype == torch.float32:
            return F.linear(x, self._weight)
        if self._weight.is_cuda:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        wide = x.float()
        return torch.cat([F.linear(wide, part.float()) for part in torch.split(self._weight, WIDENED)], dim=-1)


class RowsLinear:
    """many: the same product for more than MOST_ROWS rows; None where the kernel does that, too."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        kernels: PairKernels,
        parallel: Parallel,
        many: Linear | None,
    ) -> None:
        self._kernels, self._parallel, self._many = kernels, parallel, many
        ends = tuple(accumulate(weight.shape[0] for weight in weights))
        self._width = ends[-1]
        self._parts = tuple(
            (
                as_array(weight),
                bias_array(bias, weight.shape[0]),
                end - weight.shape[0],
                end,
                weight.shape[0] - 3 * (weight.shape[0] // 4),
            )
            for weight, bias, end in zip(weights, biases, ends, strict=True)
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._many is not None and x.shape[0] > MOST_ROWS:
            return self._many(x)
        out = torch.empty(x.shape[0], self._width)
        rows, target = as_array(x.contiguous()), as_array(out)
        for weight, bias, begin, end, tasks in self._parts:
            self._parallel.run(
                self._kernels.linear_rows, tasks, rows, weight, bias, target[:, begin:end], grain=WEIGHT_GRAIN
            )
        return out


def takes_rows(weights: Sequence[Tensor]) -> bool:
    """Whether RowsLinear can multiply by these weights."""
    return all(weight.shape[1] % 32 == 0 and weight.shape[0] >= 4 and weight.is_contiguous() for weight in weights)


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


def bias_array(bias: Tensor | None, size: int) -> Array:
    return np.zeros(size, np.float32) if bias is None else bias.float().numpy()


def _joined_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(size, dtype=torch.bfloat16) if bias is None else bias
            for bias, size in zip(biases, sizes, strict=True)
        ]
    )

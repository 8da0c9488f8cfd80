"""The one place where an implementation is chosen: norms, activation, matrix products and attention of a model.

- TorchOps: plain torch, the reference, any device.
- CpuOps: numba kernels. For many rows of bfloat16, prepacked oneDNN products where these are faster.
- `batch_invariant.InvariantOps`: the batch-invariant mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcluster.engine.kernels.loader import Kernels, PairKernels, Parallel, as_array, load_kernels, load_pair_kernels
from pdcluster.engine.model.rope import Rope, RopeConfig, Rotation
from pdcluster.engine.model.weights import Weights
from pdcluster.engine.ops.attention import Attention, AttentionShape, ReferenceAttention
from pdcluster.engine.ops.attention_cpu import CpuAttention
from pdcluster.engine.ops.fused import FusedLayers, fits_fused_layers
from pdcluster.engine.ops.linear import Linear, PackedLinear, PlainHead, PlainLinear, RowsLinear, can_pack, takes_rows
from pdcluster.engine.ops.packed_weights import PanelLinear, Panels
from pdcluster.kv.layout import DType

ROW_GRAIN = 32


class Ops(Protocol):
    name: str

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        """One product for weights that share their input."""

    def head(self, weight: Tensor) -> Linear:
        """The product that gives logits, in float32; its weights are never quantised."""

    def attention(self, shape: AttentionShape, pages: Tensor) -> Attention:
        """Attention over the pool's tensor."""

    def fused_layers(
        self, weights: Weights, shape: AttentionShape, pages: Tensor, rope: RopeConfig
    ) -> FusedLayers | None:
        """A step of an undivided model by one call, where there is a kernel for them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """float32 [n, width] → the same in the type of the weight."""

    def silu_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, 2 * width] of a product → [n, width] of `dtype`, for the next one."""

    def rope(self, config: RopeConfig, head_dim: int) -> Rotation:
        """The angles by which positions rotate heads."""

    def close(self) -> None:
        """Stop helper threads."""


def select_ops(device: str, dtype: DType, threads: int, cache_dir: Path) -> Ops:
    """The fastest that works here: CpuOps on a CPU where numba compiles, else TorchOps."""
    kernels = load_kernels(cache_dir, dtype) if device == "cpu" else None
    if kernels is None:
        return TorchOps(device)
    if dtype != "bfloat16":
        return CpuOps(kernels, None, Parallel(threads), pack=False)
    return CpuOps(kernels, load_pair_kernels(), Parallel(threads), pack=can_pack())


class TorchOps:
    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        return PlainLinear(weights, biases)

    def head(self, weight: Tensor) -> Linear:
        return PlainHead(weight)

    def attention(self, shape: AttentionShape, pages: Tensor) -> Attention:
        return ReferenceAttention(shape, pages)

    def fused_layers(
        self, weights: Weights, shape: AttentionShape, pages: Tensor, rope: RopeConfig
    ) -> FusedLayers | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight).to(weight.dtype)

    def silu_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(dtype)

    def rope(self, config: RopeConfig, head_dim: int) -> Rotation:
        return Rope(config, head_dim, self._device)

    def close(self) -> None:
        """Nothing runs beside the caller."""


class CpuOps:
    """pairs: the kernels for bfloat16, where the model has that type and they compile.
    panels: whether weights are laid out for them, where that is faster.
    """

    name = "cpu"

    def __init__(
        self, kernels: Kernels, pairs: PairKernels | None, parallel: Parallel, *, pack: bool, panels: bool = True
    ) -> None:
        self._kernels = kernels
        self._rms_norm, self._silu_mul = kernels.rms_norm, kernels.silu_mul
        self._pairs = pairs
        self._parallel = parallel
        self._pack = pack
        self._panels = Panels(pairs, parallel) if panels and pairs is not None and pairs.has_panels else None

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        is_even = weights[0].shape[1] % 2 == 0
        if self._pairs is not None and self._panels is not None and is_even:
            return PanelLinear(weights, biases, self._panels, self._pairs, self._parallel)
        many: Linear = PackedLinear(weights, biases) if self._pack and is_even else PlainLinear(weights, biases)
        if self._pairs is None or not takes_rows(weights):
            return many
        return RowsLinear(weights, biases, self._pairs, self._parallel, many)

    def head(self, weight: Tensor) -> Linear:
        """Where the other products of many rows are oneDNN's, too, the kernel takes all of this one's: its sums stay
        float32."""
        if self._pairs is not None and self._panels is not None and weight.shape[1] % 2 == 0:
            return PanelLinear([weight], [None], self._panels, self._pairs, self._parallel)
        if self._pairs is not None and takes_rows([weight]):
            return RowsLinear([weight], [None], self._pairs, self._parallel, None)
        return PlainHead(weight)

    def attention(self, shape: AttentionShape, pages: Tensor) -> Attention:
        return CpuAttention(shape, pages, self._kernels, self._pairs, self._parallel)

    def fused_layers(
        self, weights: Weights, shape: AttentionShape, pages: Tensor, rope: RopeConfig
    ) -> FusedLayers | None:
        if self._pairs is None or self._parallel.threads > 1 or not fits_fused_layers(weights, shape, pages):
            return None
        return FusedLayers(weights, shape, rope, pages, self._pairs, self._parallel, self._panels)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=weight.dtype)
        self._parallel.run(
            self._rms_norm, x.shape[0], as_array(x), as_array(weight), np.float32(eps), as_array(out), grain=ROW_GRAIN
        )
        return out

    def silu_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=dtype)
        self._parallel.run(self._silu_mul, gate_up.shape[0], as_array(gate_up), as_array(out), grain=ROW_GRAIN)
        return out

    def rope(self, config: RopeConfig, head_dim: int) -> Rotation:
        return Rope(config, head_dim, "cpu")

    def close(self) -> None:
        self._parallel.close()

"""Runs a model in the batch-invariant mode. A token's keys, values and logits are the same bits whatever shares its
step and however its prompt was cut. Nor does it matter whether it was a prompt's token or a new one.

`InvariantOps` needs bfloat16 on CPUs where numba works. Anything else is refused. Ranks sum in their order
(`collective.InOrder`), and rows are drawn one by one (`sampler.sample_alone`).

Matrix products, norms, activation and attention are `kernels.batch_invariant`, whose sums are in one order on CPUs of
one kind. Storing is `kernels.elementwise`, which rotates one head at a time in a fixed order too. A residual's sum is
of two float32 numbers, which has one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.core.errors import ConfigError
from pdcluster.engine.kernels.loader import (
    InvariantKernels,
    Kernels,
    Parallel,
    as_array,
    load_invariant_kernels,
    load_kernels,
)
from pdcluster.engine.model.batch import Batch, RowSpan
from pdcluster.engine.model.rope import RopeConfig, Rotation, attention_scale, inverse_frequencies
from pdcluster.engine.model.weights import Weights
from pdcluster.engine.ops.attention import Angles, Attention, AttentionShape, HeadNorms
from pdcluster.engine.ops.attention_cpu import CpuAttention
from pdcluster.engine.ops.linear import WEIGHT_GRAIN, Linear, bias_array, takes_rows
from pdcluster.engine.ops.select import CpuOps
from pdcluster.kv.layout import DType

# Keys that are read at once: pages hold a multiple of it.
PAGE_GRAIN = 8


def invariant_arithmetic(ranks: int) -> str:
    """What two nodes must have in common, beside the model, for equal bits: their CPUs' product of pairs, and the parts
    of a sum.
    """
    from pdcluster.engine.kernels.intrinsics import has_pair_product

    return (
        f"invariant, float32 residual, {'bf16 pairs' if has_pair_product() else 'float32'}, {ranks} "
        f"rank{'s' if ranks > 1 else ''}"
    )


def invariant_ops(device: str, dtype: DType, threads: int, cache_dir: Path) -> InvariantOps:
    if device != "cpu":
        raise ConfigError(
            f"deterministic is not supported on {device}: the batch-invariant kernels are for CPUs; use --device cpu "
            "or leave it out"
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"deterministic is not supported in {dtype}: the batch-invariant kernels are for bfloat16; add --dtype "
            "bfloat16"
        )
    kernels = load_kernels(cache_dir, dtype)
    if kernels is None:
        raise ConfigError(
            "deterministic needs numba, which does not work here (the log says why); install it or leave "
            "deterministic out"
        )
    return InvariantOps(kernels, load_invariant_kernels(), Parallel(threads))


class InvariantOps(CpuOps):
    """As CpuOps, with kernels that add up in one order."""

    name = "invariant"

    def __init__(self, kernels: Kernels, invariant: InvariantKernels, parallel: Parallel) -> None:
        super().__init__(kernels, None, parallel, pack=False)
        self._rms_norm, self._silu_mul = invariant.rms_norm, invariant.silu_mul
        self._invariant = invariant

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        if not takes_rows(weights):
            shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
            raise ConfigError(
                f"deterministic is not supported for weights of shape {shapes}: the kernels need at least 4 outputs "
                "and a multiple of 32 inputs "
                "on every rank; use fewer ranks or leave it out"
            )
        return InvariantLinear(weights, biases, self._invariant, self._parallel)

    def head(self, weight: Tensor) -> Linear:
        return self.linear([weight], [None])

    def attention(self, shape: AttentionShape, pages: Tensor) -> Attention:
        if shape.head_dim % 32 or pages.shape[4] % PAGE_GRAIN:
            raise ConfigError(
                f"deterministic is not supported for heads of {shape.head_dim} dimensions and pages of "
                f"{pages.shape[4]} tokens: multiples of 32 and "
                f"of {PAGE_GRAIN} are needed; set kv.page_tokens to one, or leave deterministic out"
            )
        return InvariantAttention(shape, pages, self._kernels, self._invariant, self._parallel)

    def fused_layers(self, weights: Weights, shape: AttentionShape, pages: Tensor, rope: RopeConfig) -> None:
        """Products with other sums than these would join in."""

    def rope(self, config: RopeConfig, head_dim: int) -> Rotation:
        return InvariantRope(config, head_dim, self._invariant, self._parallel)


class InvariantLinear:
    """Any number of rows by one kernel that reads the mapped weights."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kernels: InvariantKernels, parallel: Parallel
    ) -> None:
        self._kernels, self._parallel = kernels, parallel
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
        out = torch.empty(x.shape[0], self._width)
        rows, target = as_array(x.contiguous()), as_array(out)
        for weight, bias, begin, end, tasks in self._parts:
            self._parallel.run(
                self._kernels.multiply, tasks, rows, weight, bias, target[:, begin:end], grain=WEIGHT_GRAIN
            )
        return out


class InvariantRope:
    def __init__(self, config: RopeConfig, head_dim: int, kernels: InvariantKernels, parallel: Parallel) -> None:
        self._kernels, self._parallel = kernels, parallel
        self._inverse = inverse_frequencies(config, head_dim).numpy()
        self._scale = np.float32(attention_scale(config))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.empty(positions.shape[0], len(self._inverse)) for _ in range(2))
        self._parallel.run(
            self._kernels.angles,
            positions.shape[0],
            positions.numpy(),
            self._inverse,
            self._scale,
            cos.numpy(),
            sin.numpy(),
        )
        return cos, sin


class InvariantAttention(CpuAttention):
    """Every token by the same kernel; a prompt's tokens in groups, which only share what they read. Used by the
    engine's worker thread only."""

    def __init__(
        self, shape: AttentionShape, pages: Tensor, kernels: Kernels, invariant: InvariantKernels, parallel: Parallel
    ) -> None:
        super().__init__(shape, pages, kernels, None, parallel)
        self._invariant = invariant
        self._tokens = invariant.group_tokens(shape.num_heads // shape.num_kv_heads)
        self._grouped: tuple[Batch, _Groups] | None = None

    def run(self, qkv: Tensor, norms: HeadNorms | None, angles: Angles, layer: int, batch: Batch) -> Tensor:
        q = self._store(qkv, norms, angles, layer, batch)
        out = torch.empty_like(q)
        if self._grouped is None or self._grouped[0] is not batch:
            self._grouped = batch, _groups(batch.spans, self._tokens)
        groups, scale = self._grouped[1], np.float32(self._shape.scale)
        tasks = len(groups[1]) * self._shape.num_kv_heads
        self._parallel.run(self._invariant.attend, tasks, as_array(q), self._pool, layer, *groups, scale, as_array(out))
        return out.view(out.shape[0], -1)


_Ids = NDArray[np.int64]
_Groups = tuple[_Ids, _Ids, _Ids, _Ids, _Ids]


def _groups(spans: Sequence[RowSpan], most: int) -> _Groups:
    """The pages of all rows. And of each group of at most so many tokens: first token, their number, first position,
    where its row's pages begin.
    """
    sizes = np.array([span.end - span.begin for span in spans], np.int64)
    numbers = -(-sizes // most)
    rows = np.repeat(np.arange(len(spans)), numbers)
    within = most * (np.arange(len(rows)) - np.repeat(numbers.cumsum() - numbers, numbers))
    num_pages = np.array([len(span.pages) for span in spans], np.int64)
    begins = np.array([span.begin for span in spans], np.int64)[rows] + within
    starts = np.array([span.start for span in spans], np.int64)[rows] + within
    counts = np.minimum(sizes[rows] - within, most)
    return (
        np.concatenate([span.pages for span in spans]),
        begins,
        counts,
        starts,
        (num_pages.cumsum() - num_pages)[rows],
    )

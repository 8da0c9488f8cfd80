"""The seam between a decoder layer and the ways to attend over pages. Implementations: `ReferenceAttention` (any
device), `attention_cpu.CpuAttention`.

One contract test (tests/unit/engine/ops/test_attention.py) runs over all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdcluster.engine.model.batch import Batch, RowSpan


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """eps belongs to the q/k norms of families that have them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMS norms over each query and key head, before rotation."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    """float32 [num_tokens, head_dim / 2] each, for the tokens of the step."""

    cos: Tensor
    sin: Tensor


class Attention(Protocol):
    def run(self, qkv: Tensor, norms: HeadNorms | None, angles: Angles, layer: int, batch: Batch) -> Tensor:
        """Norm and rotate q and k, write k and v into the batch's slots, attend causally over each row's pages.

        qkv: [num_tokens, (heads + 2 kv heads) * head_dim]; returns [num_tokens, heads * head_dim] in the same type.
        """


# Paged attention in plain torch: row by row, in float32, on any device. What the other implementations are compared
# with.


class ReferenceAttention:
    """pages: the pool's tensor, [page][layer][K, V][kv head][token][dim]."""

    def __init__(self, shape: AttentionShape, pages: Tensor) -> None:
        self._shape = shape
        self._pages = pages

    def run(self, qkv: Tensor, norms: HeadNorms | None, angles: Angles, layer: int, batch: Batch) -> Tensor:
        shape = self._shape
        heads = qkv.view(qkv.shape[0], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        q = rotate(head_norm(q, norms.q, shape.eps) if norms else q.float(), angles)
        k = rotate(head_norm(k, norms.k, shape.eps) if norms else k.float(), angles)
        keys, values = self._pages[:, layer, 0], self._pages[:, layer, 1]
        keys[batch.slot_pages, :, batch.slot_offsets] = k.to(keys.dtype)
        values[batch.slot_pages, :, batch.slot_offsets] = v.to(values.dtype)
        rows = [
            self._attend(q[span.begin : span.end].to(keys.dtype).float(), span, keys, values) for span in batch.spans
        ]
        return torch.cat(rows).to(keys.dtype)

    def _attend(self, q: Tensor, span: RowSpan, keys: Tensor, values: Tensor) -> Tensor:
        """One row: [count, heads, dim] → [count, heads * dim]."""
        shape, count = self._shape, q.shape[0]
        pages = torch.from_numpy(span.pages).to(keys.device)
        k, v = (side[pages].transpose(0, 1).flatten(1, 2)[:, : span.length].float() for side in (keys, values))
        grouped = q.view(count, shape.num_kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)
        scores = grouped @ k[:, None].transpose(-1, -2) * shape.scale
        positions = torch.arange(span.length, device=q.device)
        future = positions[None, :] > positions[span.start :, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(count, -1)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the two halves of each head against each other."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

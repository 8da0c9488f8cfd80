"""Paged attention on CPU. numba reads the pages of decode rows in place. Prefill chunks pack their pages once per layer
for a kernel of bfloat16 pairs, or gather them for torch's SDPA.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcluster.engine.kernels.layer_arrays import BLOCK
from pdcluster.engine.kernels.loader import Kernels, PairKernels, Parallel, as_array
from pdcluster.engine.model.batch import Batch, RowSpan
from pdcluster.engine.ops.attention import Angles, AttentionShape, HeadNorms

# Queries per SDPA call behind a cached prefix: bounds the mask, and skips the keys after the block.
QUERY_BLOCK = 256

TOKEN_GRAIN = 32
PAGE_GRAIN = 16


class CpuAttention:
    """Used by the engine's worker thread only. Scratch for gathered keys and values, and the causal mask, are reused
    and grow by doubling.
    """

    def __init__(
        self, shape: AttentionShape, pages: Tensor, kernels: Kernels, pairs: PairKernels | None, parallel: Parallel
    ) -> None:
        self._shape = shape
        self._pages, self._pool = pages, as_array(pages)
        self._page_tokens = pages.shape[4]
        self._kernels, self._parallel = kernels, parallel
        self._pairs = pairs if shape.head_dim % 32 == 0 and self._page_tokens % 8 == 0 else None
        self._packed_keys = np.empty((0, 0, 0, 0), np.uint32)
        self._packed_values = self._packed_keys
        self._no_norm = torch.ones(shape.head_dim, dtype=pages.dtype)
        self._keys = self._values = torch.empty(shape.num_kv_heads, 0, shape.head_dim, dtype=pages.dtype)
        self._mask = torch.empty(QUERY_BLOCK, 0, dtype=pages.dtype)

    def run(self, qkv: Tensor, norms: HeadNorms | None, angles: Angles, layer: int, batch: Batch) -> Tensor:
        q = self._store(qkv, norms, angles, layer, batch)
        out = torch.empty_like(q)
        if batch.num_decodes:
            self._decode(q, out, layer, batch)
        for span in batch.spans[batch.num_decodes :]:
            self._prefill(q, out, layer, span)
        return out.view(out.shape[0], -1)

    def _store(self, qkv: Tensor, norms: HeadNorms | None, angles: Angles, layer: int, batch: Batch) -> Tensor:
        """Keys and values go to their slots; returns the normed and rotated queries, [num_tokens, heads, dim]."""
        q = torch.empty(qkv.shape[0], self._shape.num_heads, self._shape.head_dim, dtype=self._pages.dtype)
        q_norm, k_norm = (norms.q, norms.k) if norms else (self._no_norm, self._no_norm)
        self._parallel.run(
            self._kernels.store_kv,
            qkv.shape[0],
            as_array(qkv),
            as_array(q_norm),
            as_array(k_norm),
            norms is not None,
            np.float32(self._shape.eps),
            angles.cos.numpy(),
            angles.sin.numpy(),
            batch.slot_pages.numpy(),
            batch.slot_offsets.numpy(),
            self._pool,
            layer,
            as_array(q),
            grain=TOKEN_GRAIN,
        )
        return q

    def _decode(self, q: Tensor, out: Tensor, layer: int, batch: Batch) -> None:
        self._parallel.run(
            self._kernels.attend_decode if self._pairs is None else self._pairs.attend_rows,
            batch.num_decodes * self._shape.num_kv_heads,
            as_array(q),
            self._pool,
            layer,
            batch.decode_pages,
            batch.decode_first,
            batch.decode_lengths,
            np.float32(self._shape.scale),
            as_array(out),
        )

    def _prefill(self, q: Tensor, out: Tensor, layer: int, span: RowSpan) -> None:
        """By the kernels for chunks, else by SDPA. Without a prefix its own causal mode does. Behind one, blocks of
        queries each see the keys up to their last one.
        """
        if self._pairs is not None and self._pairs.has_chunks:
            self._attend_chunk(self._pairs, q, out, layer, span)
            return
        keys, values = self._gather(layer, span)
        if span.start == 0:
            self._attend(q[span.begin : span.end], keys, values, out[span.begin : span.end], None)
            return
        for begin in range(span.begin, span.end, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, span.end)
            visible = span.start + end - span.begin
            mask = self._bottom_right_mask(end - begin, visible)
            self._attend(q[begin:end], keys[:, :visible], values[:, :visible], out[begin:end], mask)

    def _attend_chunk(self, pairs: PairKernels, q: Tensor, out: Tensor, layer: int, span: RowSpan) -> None:
        shape = self._shape
        blocks = -(-span.length // BLOCK)
        if blocks > self._packed_keys.shape[1]:
            self._packed_keys = np.empty((shape.num_kv_heads, 2 * blocks, shape.head_dim // 2, BLOCK), np.uint32)
            self._packed_values = np.empty((shape.num_kv_heads, 2 * blocks, BLOCK // 2, shape.head_dim), np.uint32)
        packed, count = (self._packed_keys, self._packed_values), span.end - span.begin
        self._parallel.run(
            pairs.pack_context,
            shape.num_kv_heads * blocks,
            self._pool.view(np.uint32),
            layer,
            span.pages,
            span.length,
            *packed,
        )
        tasks = pairs.chunk_tasks(shape.num_heads, shape.num_kv_heads, count)
        scale = np.float32(shape.scale)
        self._parallel.run(
            pairs.attend_chunk, tasks, as_array(q), *packed, span.start, span.begin, count, scale, as_array(out)
        )

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, mask: Tensor | None) -> None:
        """SDPA with kv heads as its batch, and the queries that share one as its heads. No key or value is copied per
        query head.
        """
        shape, count = self._shape, q.shape[0]
        group = shape.num_heads // shape.num_kv_heads
        grouped = q.view(count, shape.num_kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
        k, v = (side[:, None].expand(-1, group, -1, -1) for side in (keys, values))
        result = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale
        )
        out.view(count, shape.num_kv_heads, group, shape.head_dim).copy_(result.permute(2, 0, 1, 3))

    def _gather(self, layer: int, span: RowSpan) -> tuple[Tensor, Tensor]:
        """Keys and values of the row, [kv heads, length, dim] each, valid until the next call."""
        needed = len(span.pages) * self._page_tokens
        if needed > self._keys.shape[1]:
            capacity = 2 * needed
            self._keys, self._values = (
                torch.zeros(self._keys.shape[0], capacity, self._keys.shape[2], dtype=self._keys.dtype)
                for _ in range(2)
            )
        self._parallel.run(
            self._kernels.gather_pages,
            len(span.pages),
            self._pool,
            layer,
            span.pages,
            as_array(self._keys),
            as_array(self._values),
            grain=PAGE_GRAIN,
        )
        return self._keys[:, : span.length], self._values[:, : span.length]

    def _bottom_right_mask(self, count: int, visible: int) -> Tensor:
        """[count, visible], 0 where query i may see key j: j ≤ visible - count + i. A window of one long mask that is
        built once."""
        if visible > self._mask.shape[1] - QUERY_BLOCK:
            width = 2 * visible + QUERY_BLOCK
            self._mask = torch.full((QUERY_BLOCK, width), float("-inf"), dtype=self._mask.dtype).triu_(
                width - QUERY_BLOCK + 1
            )
        begin = self._mask.shape[1] - QUERY_BLOCK - visible + count
        return self._mask[:count, begin : begin + visible]

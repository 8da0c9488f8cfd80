"""Steps of few rows that all decode, on one thread of one rank in bfloat16: a kernel call per layer (`layer_kernels`) on scratch made once.

What does not fit (prompts, more rows, tensor parallel, other types, layers of other shapes) takes the separate calls, which give the same but for
the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdcluster.engine.attention.base import Angles, AttentionShape
from pdcluster.engine.batch import Batch
from pdcluster.engine.linear import MOST_ROWS, bias_array, takes_rows
from pdcluster.engine.native import Array, PairKernels, Parallel, as_array
from pdcluster.engine.weights import LayerWeights


class FewRows:
    """Used by the engine's worker thread only."""

    def __init__(self, layers: Sequence[LayerWeights], shape: AttentionShape, pages: Tensor, kernels: PairKernels, parallel: Parallel) -> None:
        first = layers[0]
        self._parallel, self._kernel = parallel, kernels.decode_layer
        self._pool, self._eps, self._scale = as_array(pages), np.float32(shape.eps), np.float32(shape.scale)
        no_norm = as_array(torch.ones(shape.head_dim, dtype=pages.dtype))
        self._layers = tuple(_arrays(layer, no_norm) for layer in layers)
        queries = MOST_ROWS, shape.num_heads, shape.head_dim
        self._scratch = (
            np.empty((MOST_ROWS, first.input_norm.shape[0]), np.uint16),
            np.empty((MOST_ROWS, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim), np.uint16),
            np.empty(queries, np.uint16),
            np.empty(queries, np.uint16),
            np.empty((MOST_ROWS, 2 * first.gate.shape[0]), np.uint16),
            np.empty((MOST_ROWS, first.gate.shape[0]), np.uint16),
        )

    def takes(self, batch: Batch) -> bool:
        return batch.num_decodes == len(batch.spans) <= MOST_ROWS

    def run(self, index: int, hidden: Tensor, angles: Angles, batch: Batch) -> None:
        """Layer `index` turns hidden into its output and writes the rows' KV."""
        rows = hidden.shape[0]
        self._parallel.run(
            self._kernel,
            rows,
            as_array(hidden),
            self._eps,
            *self._layers[index],
            angles.cos.numpy(),
            angles.sin.numpy(),
            batch.slot_pages.numpy(),
            batch.slot_offsets.numpy(),
            self._pool,
            index,
            batch.decode_pages,
            batch.decode_first,
            batch.decode_lengths,
            self._scale,
            *self._scratch,
            grain=rows,
        )


def fits_few_rows(layers: Sequence[LayerWeights], shape: AttentionShape, pages: Tensor) -> bool:
    """Whether the kernel's shapes are those of the model."""
    products = [weight for layer in layers for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)]
    return bool(layers) and takes_rows(products) and shape.head_dim % 32 == 0 and pages.shape[4] % 8 == 0


def _arrays(layer: LayerWeights, no_norm: Array) -> tuple[Array | bool, ...]:
    """The arguments of the kernel that are the layer's own, in their order."""
    normed = layer.q_norm is not None and layer.k_norm is not None
    q_norm, k_norm = (no_norm if norm is None else as_array(norm) for norm in (layer.q_norm, layer.k_norm))
    attention = ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
    feed_forward = ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias), (layer.down, layer.down_bias))
    return (
        as_array(layer.input_norm),
        *_pairs(attention),
        q_norm,
        k_norm,
        normed,
        *_pairs(((layer.o, layer.o_bias),)),
        as_array(layer.post_norm),
        *_pairs(feed_forward),
    )


def _pairs(products: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Array, ...]:
    return tuple(array for weight, bias in products for array in (as_array(weight), bias_array(bias, weight.shape[0])))

"""Steps of few rows that all decode, on one thread of one rank in bfloat16: a kernel call per layer (`layer_kernels`) on scratch made once.

What does not fit (prompts, more rows, tensor parallel, other types, layers of other shapes) takes the separate calls, which give the same but for
the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pdcluster.engine.attention.base import Angles, AttentionShape
from pdcluster.engine.batch import Batch
from pdcluster.engine.layer_arrays import LayerArrays, RowArrays, Scratch
from pdcluster.engine.linear import MOST_ROWS, bias_array, takes_rows
from pdcluster.engine.native import Array, PairKernels, Parallel, as_array
from pdcluster.engine.panels import Panels
from pdcluster.engine.weights import LayerWeights


class FewRows:
    """Used by the engine's worker thread only."""

    def __init__(
        self, layers: Sequence[LayerWeights], shape: AttentionShape, pages: Tensor, kernels: PairKernels, parallel: Parallel, panels: Panels | None
    ) -> None:
        """panels: where there are kernels for them."""
        first = layers[0]
        self._parallel, self._kernel = parallel, kernels.decode_layer
        self._pool, self._scale = as_array(pages), np.float32(shape.scale)
        no_norm = as_array(torch.ones(shape.head_dim, dtype=pages.dtype))
        arrays_of = as_array if panels is None else panels.of
        self._layers = tuple(tuple(_arrays(layer, no_norm, np.float32(shape.eps), arrays_of)) for layer in layers)
        queries = MOST_ROWS, shape.num_heads, shape.head_dim
        scratch = Scratch(
            x=np.empty((MOST_ROWS, first.input_norm.shape[0]), np.uint16),
            qkv=np.empty((MOST_ROWS, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim), np.uint16),
            queries=np.empty(queries, np.uint16),
            attended=np.empty(queries, np.uint16),
            gate_up=np.empty((MOST_ROWS, 2 * first.gate.shape[0]), np.uint16),
            active=np.empty((MOST_ROWS, first.gate.shape[0]), np.uint16),
        )
        self._scratch = tuple(scratch)

    def takes(self, batch: Batch) -> bool:
        return batch.num_decodes == len(batch.spans) <= MOST_ROWS

    def run(self, index: int, hidden: Tensor, angles: Angles, batch: Batch) -> None:
        """Layer `index` turns hidden into its output and writes the rows' KV."""
        count = hidden.shape[0]
        rows = RowArrays(
            cos=angles.cos.numpy(),
            sin=angles.sin.numpy(),
            slot_pages=batch.slot_pages.numpy(),
            slot_offsets=batch.slot_offsets.numpy(),
            pages=batch.decode_pages,
            first_page=batch.decode_first,
            lengths=batch.decode_lengths,
            scale=self._scale,
        )
        arguments = as_array(hidden), self._layers[index], tuple(rows), self._pool, index, self._scratch
        self._parallel.run(self._kernel, count, *arguments, grain=count)


def fits_few_rows(layers: Sequence[LayerWeights], shape: AttentionShape, pages: Tensor) -> bool:
    """Whether the kernel's shapes are those of the model."""
    products = [weight for layer in layers for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)]
    return bool(layers) and takes_rows(products) and shape.head_dim % 32 == 0 and pages.shape[4] % 8 == 0


def _arrays(layer: LayerWeights, no_norm: Array, eps: np.float32, arrays_of: Callable[[Tensor], Array]) -> LayerArrays:
    q_norm, k_norm = (no_norm if norm is None else as_array(norm) for norm in (layer.q_norm, layer.k_norm))
    return LayerArrays(
        input_norm=as_array(layer.input_norm),
        q_weight=arrays_of(layer.q),
        q_bias=_bias(layer.q, layer.q_bias),
        k_weight=arrays_of(layer.k),
        k_bias=_bias(layer.k, layer.k_bias),
        v_weight=arrays_of(layer.v),
        v_bias=_bias(layer.v, layer.v_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        normed=layer.q_norm is not None and layer.k_norm is not None,
        o_weight=arrays_of(layer.o),
        o_bias=_bias(layer.o, layer.o_bias),
        post_norm=as_array(layer.post_norm),
        gate_weight=arrays_of(layer.gate),
        gate_bias=_bias(layer.gate, layer.gate_bias),
        up_weight=arrays_of(layer.up),
        up_bias=_bias(layer.up, layer.up_bias),
        down_weight=arrays_of(layer.down),
        down_bias=_bias(layer.down, layer.down_bias),
        eps=eps,
    )


def _bias(weight: Tensor, bias: Tensor | None) -> Array:
    return bias_array(bias, weight.shape[0])

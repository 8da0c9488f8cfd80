"""All layers of a step in one kernel call (`layer_kernels`), on one thread of one rank in bfloat16, on scratch that is kept from step to step.

Between two kernels the interpreter finds its own memory gone from the caches, and a small call that takes 2 µs alone takes 20 and more: of a prompt
of 128 tokens and 0.5 B parameters 7 % of the time went there, of one decoded token 9 %.

What does not fit (tensor parallel, other types, layers of other shapes; prompts where weights are not in panels) takes the separate calls, which
give the same but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pdcluster.engine.attention.base import Angles, AttentionShape
from pdcluster.engine.batch import Batch
from pdcluster.engine.layer_arrays import BLOCK, LayerArrays, RowArrays, Scratch
from pdcluster.engine.linear import MOST_ROWS, bias_array, takes_rows
from pdcluster.engine.models.base import Progress
from pdcluster.engine.native import Array, PairKernels, Parallel, as_array
from pdcluster.engine.panels import Panels
from pdcluster.engine.weights import LayerWeights

MOST_TOKENS = 2048
"""Of a step: scratch is kept, and grows with them (72 MiB at 0.5 B parameters)."""
LEAST_TOKENS, LEAST_BLOCKS = 32, 8


class FusedLayers:
    """Used by the engine's worker thread only."""

    def __init__(
        self, layers: Sequence[LayerWeights], shape: AttentionShape, pages: Tensor, kernels: PairKernels, parallel: Parallel, panels: Panels | None
    ) -> None:
        """panels: where there are kernels for them."""
        self._parallel, self._kernel = parallel, kernels.compute_layers
        self._takes_prompts = panels is not None and kernels.has_chunks
        self._pool, self._shape = as_array(pages), shape
        self._stacks = tuple(_stacks(layers, shape, pages.dtype, panels))
        self._widths = layers[0].input_norm.shape[0], layers[0].gate.shape[0]
        self._scratch = self._scratch_of(LEAST_TOKENS, LEAST_BLOCKS)

    def takes(self, batch: Batch) -> bool:
        tokens = len(batch.token_ids)
        return tokens <= MOST_TOKENS if self._takes_prompts else batch.num_decodes == len(batch.spans) and tokens <= MOST_ROWS

    def run(self, hidden: Tensor, angles: Angles, batch: Batch, progress: Progress) -> None:
        """Turn hidden into the last layer's output and write the rows' KV."""
        count, rows = len(hidden), self._rows(angles, batch)
        scratch = tuple(self._room(count, int(rows.chunk_lengths.max(initial=0))))
        arguments = tuple(rows), self._pool, self._pool.view(np.uint32), scratch, progress.counter
        for first, stack in self._stacks:
            for begin, end in progress.runs(len(stack.input_norm)):
                self._parallel.run(self._kernel, count, as_array(hidden), tuple(stack), *arguments, first, begin, end, grain=count)
                progress.ring()

    def _rows(self, angles: Angles, batch: Batch) -> RowArrays:
        chunks = batch.spans[batch.num_decodes :]
        pages = np.array([len(span.pages) for span in chunks], np.int64)
        return RowArrays(
            cos=angles.cos.numpy(),
            sin=angles.sin.numpy(),
            slot_pages=batch.slot_pages.numpy(),
            slot_offsets=batch.slot_offsets.numpy(),
            pages=batch.decode_pages,
            first_page=batch.decode_first,
            lengths=batch.decode_lengths,
            chunk_begins=np.array([span.begin for span in chunks], np.int64),
            chunk_counts=np.array([span.end - span.begin for span in chunks], np.int64),
            chunk_lengths=np.array([span.length for span in chunks], np.int64),
            chunk_pages=np.concatenate([span.pages for span in chunks]) if chunks else np.zeros(0, np.int64),
            chunk_first_page=np.cumsum(pages) - pages,
            scale=np.float32(self._shape.scale),
        )

    def _room(self, tokens: int, length: int) -> Scratch:
        """For so many tokens, and a prompt's context of that length."""
        blocks, (have, have_blocks) = -(-length // BLOCK), (len(self._scratch.x), self._scratch.keys.shape[1])
        if tokens > have or blocks > have_blocks:
            self._scratch = self._scratch_of(_grown(have, tokens), _grown(have_blocks, blocks))
        return self._scratch

    def _scratch_of(self, tokens: int, blocks: int) -> Scratch:
        shape, (width, inner) = self._shape, self._widths
        queries = tokens, shape.num_heads, shape.head_dim
        return Scratch(
            x=np.empty((tokens, width), np.uint16),
            qkv=np.empty((tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim), np.uint16),
            queries=np.empty(queries, np.uint16),
            attended=np.empty(queries, np.uint16),
            gate_up=np.empty((tokens, 2 * inner), np.uint16),
            active=np.empty((tokens, inner), np.uint16),
            keys=np.empty((shape.num_kv_heads, blocks, shape.head_dim // 2, BLOCK), np.uint32),
            values=np.empty((shape.num_kv_heads, blocks, BLOCK // 2, shape.head_dim), np.uint32),
        )


def fits_fused_layers(layers: Sequence[LayerWeights], shape: AttentionShape, pages: Tensor) -> bool:
    """Whether the kernel's shapes are those of the model, whose layers are all alike."""
    products = [weight for layer in layers for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)]
    alike = len({_form(layer) for layer in layers}) == 1
    return alike and takes_rows(products) and shape.head_dim % 32 == 0 and pages.shape[4] % 8 == 0


def _form(layer: LayerWeights) -> tuple[object, ...]:
    products = layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down
    return *(weight.shape for weight in products), layer.q_norm is None, layer.k_norm is None


def _grown(have: int, needed: int) -> int:
    return have if needed <= have else max(2 * have, needed)


def _stacks(layers: Sequence[LayerWeights], shape: AttentionShape, dtype: torch.dtype, panels: Panels | None) -> Iterator[tuple[int, LayerArrays]]:
    """Runs of layers and the first of each: all of them in panels, or, mapped weights lying where they do, each alone."""
    no_norm = torch.ones(shape.head_dim, dtype=dtype)
    if panels is not None:
        yield 0, _arrays(layers, no_norm, np.float32(shape.eps), panels.stacked)
        return
    for index, layer in enumerate(layers):
        yield index, _arrays([layer], no_norm, np.float32(shape.eps), lambda weights: as_array(weights[0])[None])


def _arrays(layers: Sequence[LayerWeights], no_norm: Tensor, eps: np.float32, product: Callable[[Sequence[Tensor]], Array]) -> LayerArrays:
    def norms(norms: Sequence[Tensor | None]) -> Array:
        return np.stack([as_array(no_norm if norm is None else norm) for norm in norms])

    def biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Array:
        return np.stack([bias_array(bias, len(weight)) for weight, bias in zip(weights, biases, strict=True)])

    q, k, v, o = [each.q for each in layers], [each.k for each in layers], [each.v for each in layers], [each.o for each in layers]
    gate, up, down = [each.gate for each in layers], [each.up for each in layers], [each.down for each in layers]
    return LayerArrays(
        input_norm=norms([each.input_norm for each in layers]),
        q_weight=product(q),
        q_bias=biases(q, [each.q_bias for each in layers]),
        k_weight=product(k),
        k_bias=biases(k, [each.k_bias for each in layers]),
        v_weight=product(v),
        v_bias=biases(v, [each.v_bias for each in layers]),
        q_norm=norms([each.q_norm for each in layers]),
        k_norm=norms([each.k_norm for each in layers]),
        normed=layers[0].q_norm is not None and layers[0].k_norm is not None,
        o_weight=product(o),
        o_bias=biases(o, [each.o_bias for each in layers]),
        post_norm=norms([each.post_norm for each in layers]),
        gate_weight=product(gate),
        gate_bias=biases(gate, [each.gate_bias for each in layers]),
        up_weight=product(up),
        up_bias=biases(up, [each.up_bias for each in layers]),
        down_weight=product(down),
        down_bias=biases(down, [each.down_bias for each in layers]),
        eps=eps,
    )

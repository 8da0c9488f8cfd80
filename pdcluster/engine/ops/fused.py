"""A step in one kernel call (`kernels.fused_step`), from tokens to logits: one thread, one rank, bfloat16, on scratch
that is kept.

Between two kernels the interpreter finds its own memory gone from the caches. A small call that takes 2 µs alone takes
20 and more. Of a prompt of 128 tokens and 0.5 B parameters 7 % of the time went there, of one decoded token 9 %.

What does not fit takes the separate calls: tensor parallel, other types, layers of other shapes, prompts where weights
are not in panels. Both give the same but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pdcluster.engine.kernels.layer_arrays import BLOCK, EndArrays, LayerArrays, RowArrays, StepScratch
from pdcluster.engine.kernels.loader import Array, PairKernels, Parallel, as_array
from pdcluster.engine.model.base import ForwardOutput, LayerProgress
from pdcluster.engine.model.batch import Batch
from pdcluster.engine.model.rope import RopeConfig, attention_scale, inverse_frequencies
from pdcluster.engine.model.weights import LayerWeights, Weights
from pdcluster.engine.ops.attention import AttentionShape
from pdcluster.engine.ops.linear import MOST_ROWS, bias_array, takes_rows
from pdcluster.engine.ops.packed_weights import Panels

# Of a step. Scratch is kept and grows with them (76 MiB at 0.5 B parameters), with prompts' contexts and with rows that
# draw (0.3 MiB each).
MOST_TOKENS = 2048
LEAST_TOKENS, LEAST_BLOCKS, LEAST_WANTED = 32, 8, 1


class FusedLayers:
    """Used by the engine's worker thread only."""

    def __init__(
        self,
        weights: Weights,
        shape: AttentionShape,
        rope: RopeConfig,
        pages: Tensor,
        kernels: PairKernels,
        parallel: Parallel,
        panels: Panels | None,
    ) -> None:
        """panels: where there are kernels for them."""
        self._parallel, self._kernel = parallel, kernels.compute_layers
        self._takes_prompts = panels is not None and kernels.has_chunks
        self._pool, self._shape, self._scale = as_array(pages), shape, np.float32(shape.scale)
        self._words = self._pool.view(np.uint32)
        self._ends = tuple(_ends(weights, shape, rope, panels))
        self._stacks = tuple(
            (first, len(stack.input_norm), tuple(stack))
            for first, stack in _stacks(weights.layers, shape, pages.dtype, panels)
        )
        self._widths = len(weights.norm), len(weights.layers[0].gate), len(weights.head)
        self._scratch = self._scratch_of(LEAST_TOKENS, LEAST_BLOCKS, LEAST_WANTED)

    def takes(self, batch: Batch) -> bool:
        tokens = len(batch.tokens)
        return (
            tokens <= MOST_TOKENS
            if self._takes_prompts
            else batch.num_decodes == batch.num_rows and tokens <= MOST_ROWS
        )

    def run(self, batch: Batch, progress: LayerProgress, wanted: Sequence[int]) -> ForwardOutput:
        count, scratch = len(batch.tokens), self._room(batch, len(wanted))
        rows = RowArrays(
            batch.tokens,
            batch.begins,
            batch.lengths,
            batch.first_page,
            batch.pages,
            batch.num_decodes,
            np.array(wanted, np.int64),
            self._scale,
        )
        arguments = tuple(rows), self._pool, self._words, tuple(scratch), progress.counter
        for first, num_layers, stack in self._stacks:
            for begin, end in progress.runs(num_layers):
                self._parallel.run(self._kernel, count, self._ends, stack, *arguments, first, begin, end, grain=count)
                progress.signal()
        hidden, logits = scratch.hidden[:count], scratch.logits[: len(wanted)]
        return ForwardOutput(
            lambda: torch.from_numpy(hidden), lambda: torch.from_numpy(logits), scratch.best[: len(wanted)]
        )

    def _room(self, batch: Batch, wanted: int) -> StepScratch:
        chunks = batch.lengths[batch.num_decodes :]
        tokens, blocks = len(batch.tokens), -(-int(chunks.max()) // BLOCK) if len(chunks) else 0
        have, have_blocks, have_wanted = len(self._scratch.x), self._scratch.keys.shape[1], len(self._scratch.logits)
        if tokens > have or blocks > have_blocks or wanted > have_wanted:
            self._scratch = self._scratch_of(
                _grown(have, tokens), _grown(have_blocks, blocks), _grown(have_wanted, wanted)
            )
        return self._scratch

    def _scratch_of(self, tokens: int, blocks: int, wanted: int) -> StepScratch:
        shape, (width, inner, vocabulary) = self._shape, self._widths
        half = shape.head_dim // 2
        queries = tokens, shape.num_heads, shape.head_dim
        return StepScratch(
            hidden=np.empty((tokens, width), np.float32),
            cos=np.empty((tokens, half), np.float32),
            sin=np.empty((tokens, half), np.float32),
            slot_pages=np.empty(tokens, np.int64),
            slot_offsets=np.empty(tokens, np.int64),
            x=np.empty((tokens, width), np.uint16),
            part=np.empty((tokens, width), np.float32),
            qkv=np.empty((tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim), np.float32),
            queries=np.empty(queries, np.uint16),
            attended=np.empty(queries, np.uint16),
            gate_up=np.empty((tokens, 2 * inner), np.float32),
            active=np.empty((tokens, inner), np.uint16),
            keys=np.empty((shape.num_kv_heads, blocks, half, BLOCK), np.uint32),
            values=np.empty((shape.num_kv_heads, blocks, BLOCK // 2, shape.head_dim), np.uint32),
            logits=np.empty((wanted, vocabulary), np.float32),
            best=np.empty(wanted, np.int64),
        )


def fits_fused_layers(weights: Weights, shape: AttentionShape, pages: Tensor) -> bool:
    """Whether the kernel's shapes are those of the model, whose layers are all alike."""
    layers = weights.layers
    products = [
        weight for layer in layers for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    alike = len({_form(layer) for layer in layers}) == 1
    whole = weights.embedding.is_contiguous() and takes_rows([*products, weights.head])
    return alike and whole and shape.head_dim % 32 == 0 and pages.shape[4] % 8 == 0


def _form(layer: LayerWeights) -> tuple[object, ...]:
    products = layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down
    return *(weight.shape for weight in products), layer.q_norm is None, layer.k_norm is None


def _ends(weights: Weights, shape: AttentionShape, rope: RopeConfig, panels: Panels | None) -> EndArrays:
    return EndArrays(
        embedding=as_array(weights.embedding),
        inverse=inverse_frequencies(rope, shape.head_dim).numpy(),
        rope_scale=np.float32(attention_scale(rope)),
        norm=as_array(weights.norm),
        head=as_array(weights.head) if panels is None else panels.of(weights.head),
        head_bias=bias_array(None, len(weights.head)),
        eps=np.float32(shape.eps),
    )


def _grown(have: int, needed: int) -> int:
    return have if needed <= have else max(2 * have, needed)


def _stacks(
    layers: Sequence[LayerWeights], shape: AttentionShape, dtype: torch.dtype, panels: Panels | None
) -> Iterator[tuple[int, LayerArrays]]:
    """Runs of layers and the first of each: all of them in panels, or each alone where mapped weights lie."""
    no_norm = torch.ones(shape.head_dim, dtype=dtype)
    if panels is not None:
        yield 0, _arrays(layers, no_norm, np.float32(shape.eps), panels.interleaved)
        return
    for index, layer in enumerate(layers):
        yield (
            index,
            _arrays(
                [layer], no_norm, np.float32(shape.eps), lambda kinds: [as_array(weights[0])[None] for weights in kinds]
            ),
        )


def _arrays(
    layers: Sequence[LayerWeights],
    no_norm: Tensor,
    eps: np.float32,
    products: Callable[[list[list[Tensor]]], list[Array]],
) -> LayerArrays:
    def norms(norms: Sequence[Tensor | None]) -> Array:
        return np.stack([as_array(no_norm if norm is None else norm) for norm in norms])

    def biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Array:
        return np.stack([bias_array(bias, len(weight)) for weight, bias in zip(weights, biases, strict=True)])

    q, k, v, o = (
        [each.q for each in layers],
        [each.k for each in layers],
        [each.v for each in layers],
        [each.o for each in layers],
    )
    gate, up, down = [each.gate for each in layers], [each.up for each in layers], [each.down for each in layers]
    q_weight, k_weight, v_weight, o_weight, gate_weight, up_weight, down_weight = products([q, k, v, o, gate, up, down])
    return LayerArrays(
        input_norm=norms([each.input_norm for each in layers]),
        q_weight=q_weight,
        q_bias=biases(q, [each.q_bias for each in layers]),
        k_weight=k_weight,
        k_bias=biases(k, [each.k_bias for each in layers]),
        v_weight=v_weight,
        v_bias=biases(v, [each.v_bias for each in layers]),
        q_norm=norms([each.q_norm for each in layers]),
        k_norm=norms([each.k_norm for each in layers]),
        normed=layers[0].q_norm is not None and layers[0].k_norm is not None,
        o_weight=o_weight,
        o_bias=biases(o, [each.o_bias for each in layers]),
        post_norm=norms([each.post_norm for each in layers]),
        gate_weight=gate_weight,
        gate_bias=biases(gate, [each.gate_bias for each in layers]),
        up_weight=up_weight,
        up_bias=biases(up, [each.up_bias for each in layers]),
        down_weight=down_weight,
        down_bias=biases(down, [each.down_bias for each in layers]),
        eps=eps,
    )

"""The decoder that Llama 3, Qwen2, Qwen3 and Mistral share, over the flattened tokens of a mixed batch.

The families differ in data only: biases and q/k norms are there or not (`LayerWeights`). A layer is an attention block
and a feed-forward block with a residual around each. Another kind of block replaces one of the two classes here. With
tensor parallel each block gives a part of a sum. The group completes it before it joins the residual.

The residual stream is float32 in models of every type. In bfloat16 each layer rounded it twice, half of the error that
is left with float32 logits (`python -m bench.accuracy`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from pdcluster.engine.model.base import ForwardOutput, LayerProgress
from pdcluster.engine.model.batch import Batch
from pdcluster.engine.model.collective import Collective
from pdcluster.engine.model.config import ModelConfig
from pdcluster.engine.model.shard import Share
from pdcluster.engine.model.weights import LayerWeights, Weights
from pdcluster.engine.ops.attention import Angles, Attention, AttentionShape, HeadNorms
from pdcluster.engine.ops.select import Ops


class Decoder:
    """pages: the KV pool's tensor; every forward writes and reads there. weights: this rank's share."""

    def __init__(
        self, config: ModelConfig, weights: Weights, pages: Tensor, ops: Ops, share: Share, group: Collective
    ) -> None:
        self._ops = ops
        self._group = group
        self._vocab_size = config.vocab_size
        self._eps = config.rms_norm_eps
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head = ops.head(weights.head)
        self._rope = ops.rope(config.rope, config.head_dim)
        shape = AttentionShape(share.num_heads, share.num_kv_heads, config.head_dim, config.rms_norm_eps)
        attention = ops.attention(shape, pages)
        self._fused = ops.fused_layers(weights, shape, pages, config.rope) if group.size == 1 else None
        self._layers = tuple(
            _Layer(layer, index, attention, self._eps, ops, group) for index, layer in enumerate(weights.layers)
        )

    def forward(self, batch: Batch, progress: LayerProgress, wanted: Sequence[int] = ()) -> ForwardOutput:
        if self._fused is not None and self._fused.takes(batch):
            return self._fused.run(batch, progress, wanted)
        hidden = F.embedding(batch.token_ids, self._embedding).float()
        angles = Angles(*self._rope.angles(batch.positions))
        for layer in self._layers:
            hidden = layer(hidden, angles, batch)
            progress.advance()
        return ForwardOutput(lambda: hidden, lambda: self.logits(_rows(hidden, wanted)))

    def logits(self, hidden: Tensor) -> Tensor:
        own = self._head(self._ops.rms_norm(hidden, self._norm, self._eps))
        return self._group.join_columns(own)[:, : self._vocab_size]


def _rows(hidden: Tensor, indexes: Sequence[int]) -> Tensor:
    """A view where that does: of all rows, or of one."""
    if len(indexes) == 1:
        return hidden[indexes[0] : indexes[0] + 1]
    return hidden if len(indexes) == len(hidden) else hidden[list(indexes)]


class _Layer:
    def __init__(
        self, weights: LayerWeights, index: int, attention: Attention, eps: float, ops: Ops, group: Collective
    ) -> None:
        self._ops, self._eps, self._group = ops, eps, group
        self._input_norm, self._post_norm = weights.input_norm, weights.post_norm
        self._attend = _SelfAttention(weights, index, attention, ops)
        self._feed_forward = _GatedMLP(weights, ops)

    def __call__(self, hidden: Tensor, angles: Angles, batch: Batch) -> Tensor:
        hidden.add_(
            self._group.sum(self._attend(self._ops.rms_norm(hidden, self._input_norm, self._eps), angles, batch))
        )
        return hidden.add_(self._group.sum(self._feed_forward(self._ops.rms_norm(hidden, self._post_norm, self._eps))))


class _SelfAttention:
    def __init__(self, weights: LayerWeights, index: int, attention: Attention, ops: Ops) -> None:
        self._index, self._attention = index, attention
        self._qkv = ops.linear([weights.q, weights.k, weights.v], [weights.q_bias, weights.k_bias, weights.v_bias])
        self._output = ops.linear([weights.o], [weights.o_bias])
        self._norms = (
            HeadNorms(weights.q_norm, weights.k_norm)
            if weights.q_norm is not None and weights.k_norm is not None
            else None
        )

    def __call__(self, x: Tensor, angles: Angles, batch: Batch) -> Tensor:
        return self._output(self._attention.run(self._qkv(x), self._norms, angles, self._index, batch))


class _GatedMLP:
    def __init__(self, weights: LayerWeights, ops: Ops) -> None:
        self._ops, self._dtype = ops, weights.down.dtype
        self._gate_up = ops.linear([weights.gate, weights.up], [weights.gate_bias, weights.up_bias])
        self._down = ops.linear([weights.down], [weights.down_bias])

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._ops.silu_mul(self._gate_up(x), self._dtype))

"""Cuts a model for tensor parallel: which heads, columns and rows a rank computes, and its share of the weights.

Query heads, their kv heads, the feed-forward's inner columns and the vocabulary of the head are dealt out in order.
Norms and the embedding are everywhere. The products after them (attention output, down) give each rank a part of a sum.
With more ranks than kv heads several ranks hold the same kv head. Row slices stay views of the mapped files. Column
slices are private copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from pdcluster.core.errors import ConfigError
from pdcluster.engine.model.config import ModelConfig
from pdcluster.engine.model.weights import LayerWeights, Weights
from pdcluster.kv.layout import head_range


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of `size` computes: slices of query heads, kv heads, inner columns and vocabulary. The last rank's
    may reach past its end.
    """

    rank: int
    size: int
    num_heads: int
    num_kv_heads: int
    heads: slice
    kv_heads: slice
    inner: slice
    vocab: slice


def share_of(config: ModelConfig, rank: int, size: int) -> Share:
    """Raises ConfigError when the model's heads cannot be dealt out evenly."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"tensor parallel over {size} ranks cannot deal out {heads} attention heads and {kv_heads} kv heads "
            "evenly; "
            f"use --tp {' or '.join(map(str, possible))}"
        )
    own_heads = heads // size
    first_kv, end_kv = head_range(kv_heads, rank, size)
    inner, vocab = config.intermediate_size, -(-config.vocab_size // size)
    return Share(
        rank,
        size,
        own_heads,
        end_kv - first_kv,
        heads=slice(rank * own_heads, (rank + 1) * own_heads),
        kv_heads=slice(first_kv, end_kv),
        inner=slice(inner * rank // size, inner * (rank + 1) // size),
        vocab=slice(rank * vocab, (rank + 1) * vocab),
    )


def cut(weights: Weights, config: ModelConfig, share: Share) -> Weights:
    """The share of a rank. Its head has the same number of rows on every rank, zeros after the vocabulary's end."""
    if share.size == 1:
        return weights
    layers = tuple(_cut_layer(layer, config.head_dim, share) for layer in weights.layers)
    return replace(weights, layers=layers, head=_cut_head(weights.head, share.vocab))


def _cut_layer(layer: LayerWeights, dim: int, share: Share) -> LayerWeights:
    queries, keys = _rows(share.heads, dim), _rows(share.kv_heads, dim)
    return replace(
        layer,
        q=layer.q[queries],
        k=layer.k[keys],
        v=layer.v[keys],
        o=layer.o[:, queries].contiguous(),
        gate=layer.gate[share.inner],
        up=layer.up[share.inner],
        down=layer.down[:, share.inner].contiguous(),
        q_bias=_part(layer.q_bias, queries),
        k_bias=_part(layer.k_bias, keys),
        v_bias=_part(layer.v_bias, keys),
        o_bias=_once(layer.o_bias, share),
        gate_bias=_part(layer.gate_bias, share.inner),
        up_bias=_part(layer.up_bias, share.inner),
        down_bias=_once(layer.down_bias, share),
    )


def _rows(heads: slice, dim: int) -> slice:
    return slice(heads.start * dim, heads.stop * dim)


def _part(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]


def _once(bias: Tensor | None, share: Share) -> Tensor | None:
    """A bias that is added to a sum over ranks is added by one of them."""
    return bias if share.rank == 0 else None


def _cut_head(head: Tensor, vocab: slice) -> Tensor:
    rows = head[vocab]
    missing = vocab.stop - vocab.start - rows.shape[0]
    return rows if not missing else F.pad(rows, (0, 0, 0, missing))

"""What `fused_step` works on, by name. It holds no code and needs no numba.

Python hands these over as plain tuples, and the kernel gives the names back. numba takes a tuple as fast as single
arrays. Named ones cost it 2 µs at every call and nested ones 5. (17 arrays: 0.8 µs apart, 1.2 as a tuple, 4.6 nested.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Keys of one block of a prompt's attention.
BLOCK = 64


class LayerArrays(NamedTuple):
    """The weights of some layers behind each other, or one's of them; those of products as they are or in panels.
    Biases are float32, of zeros where there are none; normed: whether heads have norms."""

    input_norm: Array
    q_weight: Array
    q_bias: Array
    k_weight: Array
    k_bias: Array
    v_weight: Array
    v_bias: Array
    q_norm: Array
    k_norm: Array
    normed: bool
    o_weight: Array
    o_bias: Array
    post_norm: Array
    gate_weight: Array
    gate_bias: Array
    up_weight: Array
    up_bias: Array
    down_weight: Array
    down_bias: Array
    eps: np.float32


class EndArrays(NamedTuple):
    """What stands before the layers and behind them.

    inverse, rope_scale: radians per position of each pair of dimensions, and the factor of cos and sin.
    head: plain or in panels.
    head_bias: zeros, one for each token of the vocabulary.
    """

    embedding: Array
    inverse: Array
    rope_scale: np.float32
    norm: Array
    head: Array
    head_bias: Array
    eps: np.float32


class RowArrays(NamedTuple):
    """A step's rows, as `batch.Batch` has them; wanted: the tokens of which logits are."""

    tokens: Array
    begins: Array
    lengths: Array
    first_page: Array
    pages: Array
    num_decodes: int
    wanted: Array
    scale: np.float32


class StepScratch(NamedTuple):
    """Memory that a step fills anew: a row of each for every token. In keys and values: the blocks of one prompt's
    context, as `attention_chunks.pack_context` lays them out. logits and best have a row for each wanted token. Sums
    are float32 (hidden, part, qkv, gate_up, logits). What products read is bfloat16 (x, queries, attended, active).
    """

    hidden: Array
    cos: Array
    sin: Array
    slot_pages: Array
    slot_offsets: Array
    x: Array
    part: Array
    qkv: Array
    queries: Array
    attended: Array
    gate_up: Array
    active: Array
    keys: Array
    values: Array
    logits: Array
    best: Array

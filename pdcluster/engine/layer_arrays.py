"""What `layer_kernels` works on, by name. It holds no code and needs no numba.

Python hands these over as plain tuples, and the kernel gives the names back: numba takes a tuple as fast as single arrays, while named ones cost
it 2 µs at every call and nested ones 5 (17 arrays: 0.8 µs apart, 1.2 as a tuple, 4.6 nested).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK = 64
"""Keys of one block of a prompt's attention."""


class LayerArrays(NamedTuple):
    """The weights of some layers behind each other, or one's of them; those of products as they are or in panels. Biases are float32, of zeros where
    there are none; normed: whether heads have norms."""

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


class RowArrays(NamedTuple):
    """Of a step's tokens: their angles and where their KV goes, as `batch.Batch` has them; of rows that decode, which come first, the pages that they
    attend to; of the chunks of prompts behind these, which tokens they are, and the length and pages of their context."""

    cos: Array
    sin: Array
    slot_pages: Array
    slot_offsets: Array
    pages: Array
    first_page: Array
    lengths: Array
    chunk_begins: Array
    chunk_counts: Array
    chunk_lengths: Array
    chunk_pages: Array
    chunk_first_page: Array
    scale: np.float32


class Scratch(NamedTuple):
    """Memory that a layer fills anew: a row of each for every token; in keys and values the blocks of one prompt's context, as
    `chunk_kernels.pack_context` lays them out."""

    x: Array
    qkv: Array
    queries: Array
    attended: Array
    gate_up: Array
    active: Array
    keys: Array
    values: Array

# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments; the typed face is `native.PairKernels`.
"""A whole layer for rows that decode, as one call: what `kernels` and `pair_kernels` do one after the other, without Python or a new array between.

Import it through `native`. Every step rounds where the separate calls round, so that both give the same but for the order of sums, which is the
compiler's where it builds one kernel into another. `lo` goes along to every step, though it is 0: for a
literal 0 numba would compile each of them again, as a kernel whose sums the compiler may order otherwise.
"""

from __future__ import annotations

import numba

from pdcluster.engine.kernels import narrow, rms_norm, silu_mul, store_kv, widen
from pdcluster.engine.layer_arrays import LayerArrays, RowArrays, Scratch
from pdcluster.engine.pair_kernels import attend_chunk, attend_rows, chunk_tasks, has_chunks, linear_rows, pack_context
from pdcluster.engine.panel_kernels import has_panels, multiply_panels, pack_panels

__all__ = [
    "attend_chunk",
    "attend_rows",
    "chunk_tasks",
    "decode_layer",
    "has_chunks",
    "has_panels",
    "linear_rows",
    "multiply_panels",
    "pack_context",
    "pack_panels",
]


@numba.njit(error_model="numpy", nogil=True, cache=True)
def decode_layer(hidden, weights, rows, pool, layer, scratch, lo, hi):
    """hidden becomes the layer's output; lo is 0, hi all rows or none. weights, rows and scratch: tuples in the order of `layer_arrays`, scratch of
    at least as many rows."""
    if hi == 0:
        return
    named, memory = LayerArrays(*weights), Scratch(*scratch)
    attend_block(hidden, named, RowArrays(*rows), pool, layer, memory, lo, hi)
    feed_forward_block(hidden, named, memory, lo, hi)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def attend_block(hidden, weights, rows, pool, layer, scratch, lo, hi):
    x, qkv, queries, attended = scratch.x[:hi], scratch.qkv[:hi], scratch.queries[:hi], scratch.attended[:hi]
    rms_norm(hidden, weights.input_norm, weights.eps, x, lo, hi)
    keys = weights.q_bias.shape[0]
    values = keys + weights.k_bias.shape[0]
    project(x, weights.q_weight, weights.q_bias, qkv, 0, lo)
    project(x, weights.k_weight, weights.k_bias, qkv, keys, lo)
    project(x, weights.v_weight, weights.v_bias, qkv, values, lo)
    norms = weights.q_norm, weights.k_norm, weights.normed, weights.eps
    store_kv(qkv, *norms, rows.cos, rows.sin, rows.slot_pages, rows.slot_offsets, pool, layer, queries, lo, hi)
    attend_rows(queries, pool, layer, rows.pages, rows.first_page, rows.lengths, rows.scale, attended, lo, hi * pool.shape[3])
    project(attended.reshape(hi, attended.shape[1] * attended.shape[2]), weights.o_weight, weights.o_bias, x, 0, lo)
    add_to(hidden, x)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def feed_forward_block(hidden, weights, scratch, lo, hi):
    x, gate_up, active = scratch.x[:hi], scratch.gate_up[:hi], scratch.active[:hi]
    rms_norm(hidden, weights.post_norm, weights.eps, x, lo, hi)
    inner = weights.gate_bias.shape[0]
    project(x, weights.gate_weight, weights.gate_bias, gate_up, 0, lo)
    project(x, weights.up_weight, weights.up_bias, gate_up, inner, lo)
    silu_mul(gate_up, active, lo, hi)
    project(active, weights.down_weight, weights.down_bias, x, 0, lo)
    add_to(hidden, x)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def project(x, weight, bias, out, column, lo):
    """Into the columns of out from `column` on. By panels, which have three dimensions, or by weights as they are: of the two the compiler keeps the
    one that applies."""
    if weight.ndim == 3:
        multiply_panels(x, weight, bias, out, column, lo, weight.shape[0])
    else:
        linear_rows(x, weight, bias, out[:, column : column + weight.shape[0]], lo, weight.shape[0] - 3 * (weight.shape[0] // 4))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def add_to(total, part):
    for n in range(total.shape[0]):
        row, added = total[n], part[n]
        for i in range(row.shape[0]):
            row[i] = narrow(widen(row[i]) + widen(added[i]), row[i])

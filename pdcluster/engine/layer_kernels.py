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
from pdcluster.engine.pair_kernels import attend_chunk, attend_rows, chunk_tasks, has_chunks, linear_rows, pack_context

__all__ = ["attend_chunk", "attend_rows", "chunk_tasks", "decode_layer", "has_chunks", "linear_rows", "pack_context"]


@numba.njit(error_model="numpy", nogil=True, cache=True)
def decode_layer(
    hidden,
    eps,
    input_norm,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    v_weight,
    v_bias,
    q_norm,
    k_norm,
    normed,
    o_weight,
    o_bias,
    post_norm,
    gate_weight,
    gate_bias,
    up_weight,
    up_bias,
    down_weight,
    down_bias,
    cos,
    sin,
    slot_pages,
    slot_offsets,
    pool,
    layer,
    pages,
    first_page,
    lengths,
    scale,
    x,
    qkv,
    queries,
    attended,
    gate_up,
    active,
    lo,
    hi,
):
    """hidden becomes the layer's output; lo is 0, hi all rows or none. From x on: scratch of at least as many rows."""
    if hi == 0:
        return
    x, qkv, queries, attended, gate_up, active = x[:hi], qkv[:hi], queries[:hi], attended[:hi], gate_up[:hi], active[:hi]
    rms_norm(hidden, input_norm, eps, x, lo, hi)
    keys = q_weight.shape[0]
    values = keys + k_weight.shape[0]
    project(x, q_weight, q_bias, qkv[:, :keys], lo)
    project(x, k_weight, k_bias, qkv[:, keys:values], lo)
    project(x, v_weight, v_bias, qkv[:, values:], lo)
    store_kv(qkv, q_norm, k_norm, normed, eps, cos, sin, slot_pages, slot_offsets, pool, layer, queries, lo, hi)
    attend_rows(queries, pool, layer, pages, first_page, lengths, scale, attended, lo, hi * pool.shape[3])
    project(attended.reshape(hi, o_weight.shape[1]), o_weight, o_bias, x, lo)
    add_to(hidden, x)
    rms_norm(hidden, post_norm, eps, x, lo, hi)
    inner = gate_weight.shape[0]
    project(x, gate_weight, gate_bias, gate_up[:, :inner], lo)
    project(x, up_weight, up_bias, gate_up[:, inner:], lo)
    silu_mul(gate_up, active, lo, hi)
    project(active, down_weight, down_bias, x, lo)
    add_to(hidden, x)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def project(x, weight, bias, out, lo):
    linear_rows(x, weight, bias, out, lo, weight.shape[0] - 3 * (weight.shape[0] // 4))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def add_to(total, part):
    for n in range(total.shape[0]):
        row, added = total[n], part[n]
        for i in range(row.shape[0]):
            row[i] = narrow(widen(row[i]) + widen(added[i]), row[i])

# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""A whole step as one call, without Python or a new array between: what the kernels of `elementwise`, `gemm_pairs`,
`attention_rows` and `attention_chunks` do one after the other.

Every step rounds where the separate calls round. So both give the same but for the order of sums, which is the
compiler's where it builds one kernel into another. `lo` goes along to every step, though it is 0. For a literal 0 numba
would compile each of them again, with another order of sums. Import it through `loader`.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from pdcluster.engine.kernels.attention_chunks import attend_chunk, chunk_tasks, has_chunks, pack_context
from pdcluster.engine.kernels.attention_rows import attend_rows
from pdcluster.engine.kernels.elementwise import rms_norm, silu_mul, store_kv, widen
from pdcluster.engine.kernels.gemm_pairs import linear_rows
from pdcluster.engine.kernels.intrinsics import address, has_wide_product, publish
from pdcluster.engine.kernels.layer_arrays import BLOCK, EndArrays, LayerArrays, RowArrays, StepScratch

if has_wide_product():
    from pdcluster.engine.kernels.gemm_f32_avx2 import PANEL, has_panels, multiply_panels, pack_panels
else:
    from pdcluster.engine.kernels.gemm_pairs import PANEL, has_panels, multiply_panels, pack_panels

__all__ = [
    "PANEL",
    "attend_chunk",
    "attend_rows",
    "chunk_tasks",
    "compute_layers",
    "has_chunks",
    "has_panels",
    "linear_rows",
    "multiply_panels",
    "pack_context",
    "pack_panels",
]

# Logits of which the best is found at once.
RUN = 256
# As bits of a float32: of infinity, greater ones than which are no number; and all but the sign.
INFINITY, MAGNITUDE = np.int32(0x7F800000), np.int32(0x7FFFFFFF)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def compute_layers(ends, weights, rows, pool, words, scratch, done, first, begin, end, lo, hi):
    """scratch.hidden becomes the output of layers [begin, end) of weights, whose layer 0 is the pool's layer `first`.
    done[0] counts each. Before the model's first layer it is filled. Behind the last one logits are made of the wanted
    tokens.

    ends, weights, rows and scratch: tuples in the order of `layer_arrays`, scratch for at least as many tokens.
    words: the pool in pairs.
    lo is 0, hi all tokens or none.
    """
    if hi == 0:
        return
    around, stack, named, memory = EndArrays(*ends), LayerArrays(*weights), RowArrays(*rows), StepScratch(*scratch)
    hidden = memory.hidden[:hi]
    if first + begin == 0:
        embed(named.tokens, around.embedding, hidden)
        place(named, pool.shape[4], around.inverse, around.rope_scale, memory)
    for index in range(begin, end):
        layer = layer_of(stack, index)
        attend_block(hidden, layer, named, pool, words, first + index, memory, lo, hi)
        feed_forward_block(hidden, layer, memory, lo, hi)
        publish(address(done), done[0] + np.uint64(1))
    if first + end == pool.shape[1]:
        make_logits(hidden, around, named.wanted, memory, lo)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def embed(tokens, embedding, hidden):
    for t in range(hidden.shape[0]):
        row, target = embedding[tokens[t]], hidden[t]
        for i in range(row.shape[0]):
            target[i] = widen(row[i])


@numba.njit(error_model="numpy", nogil=True, cache=True)
def place(rows, page_tokens, inverse, scale, scratch):
    """Where each token's KV goes, and the angles of its position."""
    for r in range(rows.lengths.shape[0]):
        end = rows.begins[r + 1]
        for t in range(rows.begins[r], end):
            position = rows.lengths[r] + t - end
            scratch.slot_pages[t] = rows.pages[rows.first_page[r] + position // page_tokens]
            scratch.slot_offsets[t] = position % page_tokens
            for i in range(inverse.shape[0]):
                phase = np.float32(position) * inverse[i]
                scratch.cos[t, i] = math.cos(phase) * scale
                scratch.sin[t, i] = math.sin(phase) * scale


@numba.njit(error_model="numpy", nogil=True, cache=True)
def make_logits(hidden, ends, wanted, scratch, lo):
    count = wanted.shape[0]
    if count == 0:
        return
    x, logits = scratch.x[:count], scratch.logits[:count]
    for i in range(count):
        rms_norm(hidden[wanted[i] : wanted[i] + 1], ends.norm, ends.eps, x[i : i + 1], lo, 1)
    project(x, ends.head, ends.head_bias, logits, 0, lo)
    words = logits.view(np.int32)
    for i in range(count):
        scratch.best[i] = find_best(words[i])


@numba.njit(error_model="numpy", nogil=True, cache=True)
def find_best(logits):
    """Where the first of the greatest stands, of float32 as int32 bits. -1 where some are no numbers, or the greatest
    is infinite.
    """
    most, begin, largest = ordered(logits[0]), 0, np.int32(0)
    for run in range(0, logits.shape[0], RUN):
        part = logits[run : run + RUN]
        best = ordered(part[0])
        for i in range(part.shape[0]):
            best = max(best, ordered(part[i]))
            largest = max(largest, part[i] & MAGNITUDE)
        if best > most:
            most, begin = best, run
    if not -INFINITY < most < INFINITY or largest > INFINITY:
        return -1
    while ordered(logits[begin]) != most:
        begin += 1
    return begin


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def ordered(bits):
    """A whole number for the int32 bits of a float32, in the same order; both zeros are one."""
    return bits if bits >= np.int32(0) else -(bits & MAGNITUDE)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def layer_of(stack, index):
    return LayerArrays(
        stack.input_norm[index],
        stack.q_weight[index],
        stack.q_bias[index],
        stack.k_weight[index],
        stack.k_bias[index],
        stack.v_weight[index],
        stack.v_bias[index],
        stack.q_norm[index],
        stack.k_norm[index],
        stack.normed,
        stack.o_weight[index],
        stack.o_bias[index],
        stack.post_norm[index],
        stack.gate_weight[index],
        stack.gate_bias[index],
        stack.up_weight[index],
        stack.up_bias[index],
        stack.down_weight[index],
        stack.down_bias[index],
        stack.eps,
    )


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def attend_block(hidden, weights, rows, pool, words, layer, scratch, lo, hi):
    x, part, qkv = scratch.x[:hi], scratch.part[:hi], scratch.qkv[:hi]
    queries, attended = scratch.queries[:hi], scratch.attended[:hi]
    rms_norm(hidden, weights.input_norm, weights.eps, x, lo, hi)
    keys = weights.q_bias.shape[0]
    values = keys + weights.k_bias.shape[0]
    project(x, weights.q_weight, weights.q_bias, qkv, 0, lo)
    project(x, weights.k_weight, weights.k_bias, qkv, keys, lo)
    project(x, weights.v_weight, weights.v_bias, qkv, values, lo)
    norms = weights.q_norm, weights.k_norm, weights.normed, weights.eps
    store_kv(
        qkv, *norms, scratch.cos, scratch.sin, scratch.slot_pages, scratch.slot_offsets, pool, layer, queries, lo, hi
    )
    if rows.num_decodes > 0:
        tasks = rows.num_decodes * pool.shape[3]
        attend_rows(queries, pool, layer, rows.pages, rows.first_page, rows.lengths, rows.scale, attended, lo, tasks)
    attend_chunks(queries, words, layer, rows, scratch, attended, lo)
    project(attended.reshape(hi, attended.shape[1] * attended.shape[2]), weights.o_weight, weights.o_bias, part, 0, lo)
    add_to(hidden, part)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def attend_chunks(queries, words, layer, rows, scratch, attended, lo):
    num_kv_heads = words.shape[3]
    for r in range(rows.num_decodes, rows.lengths.shape[0]):
        begin, count, length = rows.begins[r], rows.begins[r + 1] - rows.begins[r], rows.lengths[r]
        pages = rows.pages[rows.first_page[r] :]
        pack_context(
            words,
            layer,
            pages,
            length,
            scratch.keys,
            scratch.values,
            lo,
            num_kv_heads * ((length + BLOCK - 1) // BLOCK),
        )
        tasks = chunk_tasks(queries.shape[1], num_kv_heads, count)
        attend_chunk(
            queries, scratch.keys, scratch.values, length - count, begin, count, rows.scale, attended, lo, tasks
        )


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def feed_forward_block(hidden, weights, scratch, lo, hi):
    x, part, gate_up, active = scratch.x[:hi], scratch.part[:hi], scratch.gate_up[:hi], scratch.active[:hi]
    rms_norm(hidden, weights.post_norm, weights.eps, x, lo, hi)
    inner = weights.gate_bias.shape[0]
    project(x, weights.gate_weight, weights.gate_bias, gate_up, 0, lo)
    project(x, weights.up_weight, weights.up_bias, gate_up, inner, lo)
    silu_mul(gate_up, active, lo, hi)
    project(active, weights.down_weight, weights.down_bias, part, 0, lo)
    add_to(hidden, part)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def project(x, weight, bias, out, column, lo):
    """Into the columns of out from `column` on. By panels, which have three dimensions, or by plain weights. The
    compiler keeps the one that applies.
    """
    if weight.ndim == 3:
        multiply_panels(x, weight, bias, out, column, lo, weight.shape[0])
    else:
        linear_rows(
            x, weight, bias, out[:, column : column + weight.shape[0]], lo, weight.shape[0] - 3 * (weight.shape[0] // 4)
        )


@numba.njit(error_model="numpy", nogil=True, cache=True)
def add_to(total, part):
    for n in range(total.shape[0]):
        row, added = total[n], part[n]
        for i in range(row.shape[0]):
            row[i] += added[i]

# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.Kernels`.
"""CPU kernels in numba: norms, rotation, storing, activation, and attention for every type. Import it through
`loader.load_kernels`, which sets the cache directory first and copes with a numba that does not work.

All take raw arrays and a range [lo, hi) of independent tasks, so that `loader.Parallel` can split one call over
threads. None holds the GIL. bfloat16 arrives as uint16 (numpy has no such type) and is widened to float32 by a shift.
Every sum is kept in float32. Products arrive in float32 or bfloat16, the residual stream in float32.

The arithmetic may be reordered (fastmath), so no kernel uses infinities. Not so where heads are normalised and rotated.
A kernel that others call has a compiled copy in each of them, and which one runs depends on what was loaded first.
Those copies added in different orders and fused other products. A kernel that says nothing of fastmath is compiled with
it when its first caller has it, hence `fastmath=False`.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

VERY_NEGATIVE = np.float32(-1e30)
LOG2_E = np.float32(1.4426950408889634)


@intrinsic
def widen(typing_context, value):
    """float32 of a stored element: uint16 (bfloat16 bits) or float32."""
    if value == types.float32:
        return types.float32(value), lambda context, builder, signature, args: args[0]

    def shift(context, builder, signature, args):
        bits = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), shift


@intrinsic
def narrow(typing_context, value, like):
    """What to store for a float32 in an array whose elements are typed as `like`. bfloat16 is rounded to nearest, ties
    to even.
    """
    if like == types.float32:
        return types.float32(types.float32, like), lambda context, builder, signature, args: args[0]

    def round_to_even(context, builder, signature, args):
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32, types.uint16), round_to_even


@intrinsic
def fused(typing_context, a, b, c):
    """a * b + c, rounded once. Left to the compiler, copies of a kernel would fuse different products."""

    def build(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), build


@intrinsic
def power_of_two(typing_context, exponent):
    """2 to an integer in [-126, 127] that is given as float32."""

    def build(context, builder, signature, args):
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.float32), build


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def exponential(value):
    """exp in float32, off by at most a few units in the last place, and clamped to finite numbers. Unlike math.exp it
    vectorises."""
    scaled = min(max(value * LOG2_E, np.float32(-126.0)), np.float32(126.0))
    whole = np.floor(scaled + np.float32(0.5))
    rest = (scaled - whole) * np.float32(0.6931471805599453)
    series = np.float32(1.0 / 5040.0)
    series = series * rest + np.float32(1.0 / 720.0)
    series = series * rest + np.float32(1.0 / 120.0)
    series = series * rest + np.float32(1.0 / 24.0)
    series = series * rest + np.float32(1.0 / 6.0)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    series = series * rest + np.float32(1.0)
    return series * power_of_two(whole)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def rms_norm(x, weight, eps, out, lo, hi):
    """Rows [lo, hi) of x divided by their root mean square, times weight."""
    width = x.shape[1]
    for n in range(lo, hi):
        row, target = x[n], out[n]
        total = np.float32(0)
        for i in range(width):
            total += widen(row[i]) * widen(row[i])
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            target[i] = narrow(widen(row[i]) * scale * widen(weight[i]), target[i])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def silu_mul(gate_up, out, lo, hi):
    """silu(gate) * up, with gate and up side by side in each row."""
    width = out.shape[1]
    for n in range(lo, hi):
        gate, up, target = gate_up[n, :width], gate_up[n, width:], out[n]
        for i in range(width):
            g = widen(gate[i])
            target[i] = narrow(g / (np.float32(1.0) + exponential(-g)) * widen(up[i]), target[i])


@numba.njit(error_model="numpy", fastmath=False, nogil=True, cache=True)
def sum_of_squares(values):
    """Of float32. Four sums side by side, so that additions need not wait for each other; their order is fixed."""
    size = values.shape[0]
    whole = size - size % 4
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(0, whole, 4):
        a = fused(values[i], values[i], a)
        b = fused(values[i + 1], values[i + 1], b)
        c = fused(values[i + 2], values[i + 2], c)
        d = fused(values[i + 3], values[i + 3], d)
    for i in range(whole, size):
        a = fused(values[i], values[i], a)
    return (a + b) + (c + d)


@numba.njit(error_model="numpy", fastmath=False, nogil=True, cache=True)
def rotate(source, norm, normed, eps, cos, sin, scratch, target):
    """One head of one token: normalised over its dimensions if `normed`, rotated by halves, stored in `target`.
    scratch: float32 of its size."""
    size = source.shape[0]
    half = size // 2
    for i in range(size):
        scratch[i] = widen(source[i])
    if normed:
        scale = np.float32(1.0) / np.sqrt(sum_of_squares(scratch) / np.float32(size) + eps)
        for i in range(size):
            scratch[i] = scratch[i] * scale * widen(norm[i])
    for i in range(half):
        a, b = scratch[i], scratch[half + i]
        target[i] = narrow(fused(a, cos[i], -(b * sin[i])), target[i])
        target[half + i] = narrow(fused(b, cos[i], a * sin[i]), target[half + i])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def store_kv(qkv, q_norm, k_norm, normed, eps, cos, sin, pages, offsets, pool, layer, q_out, lo, hi):
    """Tokens [lo, hi): queries are normalised and rotated into q_out, keys likewise into their page slot, values copied
    there."""
    num_heads, head_dim = q_out.shape[1], q_out.shape[2]
    num_kv_heads = pool.shape[3]
    scratch = np.empty(head_dim, np.float32)
    for n in range(lo, hi):
        page, offset = pages[n], offsets[n]
        for h in range(num_heads):
            rotate(qkv[n, h * head_dim : (h + 1) * head_dim], q_norm, normed, eps, cos[n], sin[n], scratch, q_out[n, h])
        for h in range(num_kv_heads):
            begin = (num_heads + h) * head_dim
            rotate(
                qkv[n, begin : begin + head_dim],
                k_norm,
                normed,
                eps,
                cos[n],
                sin[n],
                scratch,
                pool[page, layer, 0, h, offset],
            )
            begin = (num_heads + num_kv_heads + h) * head_dim
            source, target = qkv[n, begin : begin + head_dim], pool[page, layer, 1, h, offset]
            for d in range(head_dim):
                target[d] = narrow(widen(source[d]), target[d])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_decode(q, pool, layer, pages, first_page, lengths, scale, out, lo, hi):
    """Attention of one query token per row over its pages, in place. Task = row * kv heads + kv head.

    The queries that share a kv head share each read of its keys and values. Softmax is online: a running maximum and
    sum per query, corrected once per page. Row r reads pages[first_page[r]:], lengths[r] tokens.
    """
    num_kv_heads, page_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    queries = np.empty((group, head_dim), np.float32)
    sums = np.empty((group, head_dim), np.float32)
    scores = np.empty((group, page_tokens), np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    wide = np.empty(head_dim, np.float32)
    for task in range(lo, hi):
        row, head = task // num_kv_heads, task % num_kv_heads
        for g in range(group):
            top[g], total[g] = VERY_NEGATIVE, np.float32(0)
            for d in range(head_dim):
                queries[g, d] = widen(q[row, head * group + g, d]) * scale
                sums[g, d] = np.float32(0)
        for p in range((lengths[row] + page_tokens - 1) // page_tokens):
            page = pages[first_page[row] + p]
            keys, values = pool[page, layer, 0, head], pool[page, layer, 1, head]
            count = min(page_tokens, lengths[row] - p * page_tokens)
            for t in range(count):
                key = keys[t]
                for d in range(head_dim):
                    wide[d] = widen(key[d])
                for g in range(group):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += queries[g, d] * wide[d]
                    scores[g, t] = score
            for g in range(group):
                fold_page(scores[g], count, top, total, g, sums[g])
            for t in range(count):
                value = values[t]
                for d in range(head_dim):
                    wide[d] = widen(value[d])
                for g in range(group):
                    weight = scores[g, t]
                    for d in range(head_dim):
                        sums[g, d] += weight * wide[d]
        for g in range(group):
            inverse = np.float32(1.0) / total[g]
            for d in range(head_dim):
                out[row, head * group + g, d] = narrow(sums[g, d] * inverse, out[row, head * group + g, d])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def fold_page(scores, count, top, total, g, sums):
    """Turn one page's scores into weights under the new maximum, and correct what was summed under the old one."""
    best = top[g]
    for t in range(count):
        best = max(best, scores[t])
    correction = exponential(top[g] - best)
    added = np.float32(0)
    for t in range(count):
        scores[t] = exponential(scores[t] - best)
        added += scores[t]
    total[g] = total[g] * correction + added
    top[g] = best
    for d in range(sums.shape[0]):
        sums[d] *= correction


@numba.njit(nogil=True, cache=True)
def gather_pages(pool, layer, pages, keys, values, lo, hi):
    """Pages [lo, hi) of one row, copied side by side per kv head: keys and values are [kv head][token][dim]."""
    num_kv_heads, page_tokens = pool.shape[3], pool.shape[4]
    for p in range(lo, hi):
        page, begin = pages[p], p * page_tokens
        for h in range(num_kv_heads):
            keys[h, begin : begin + page_tokens] = pool[page, layer, 0, h]
            values[h, begin : begin + page_tokens] = pool[page, layer, 1, h]

# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.InvariantKernels`.
"""CPU kernels for bfloat16 whose result for one token is the same bits whatever is computed beside it: the
batch-invariant mode.

Compiled without fastmath, so every sum keeps the order in which it is written. That order depends only on a token's own
position and on widths. It does not depend on the number of rows or tasks, nor on pages and their size (multiples of
eight tokens). Widths are multiples of 32. Import it through `loader`.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import VERY_NEGATIVE, exponential, narrow, sum_of_squares, widen
from pdcluster.engine.kernels.intrinsics import LANES, address, dots_of, has_pair_product, weigh_of

NATIVE = has_pair_product()
# Bytes by which weights are asked for before they are read, the fewer for one or two rows: as in `gemm_pairs`.
AHEAD, NEAR_AHEAD = 2048, 1024
# Rows that go over all weights together: their inputs stay in the second-level cache.
ROW_BLOCK = 96
# Keys between two corrections of the running softmax, counted from position 0.
TILE = 32
# Queries of one kv head that share a tile's keys and values, at least one token's.
ROWS = 32

dots_4x1, dots_4x2, dots_4x3, dots_4x4, dots_4x5, dots_4x6 = (
    dots_of(4, rows, native=NATIVE, exact=True) for rows in (1, 2, 3, 4, 5, 6)
)
dots_8x1, dots_8x2 = (dots_of(8, rows, native=NATIVE, exact=True) for rows in (1, 2))
weigh_1x1, weigh_4x1 = (weigh_of(rows, 1) for rows in (1, 4))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply(x, weight, bias, out, lo, hi):
    """out = x · weightᵀ + bias for any number of rows, tasks as those of `gemm_pairs.linear_rows`."""
    num_rows, step = x.shape[0], weight.shape[0] // 4
    row_bytes = 2 * weight.shape[1]
    first, inputs = address(weight), address(x)
    ahead = NEAR_AHEAD if num_rows <= 2 else AHEAD
    sums = np.empty(24, np.float32)
    at = address(sums)
    for block in range(0, num_rows, ROW_BLOCK):
        end = min(block + ROW_BLOCK, num_rows)
        for n in range(lo, hi):
            begin = first + n * row_bytes
            for r in range(block, end, 6):
                count = min(6, end - r)
                coming = begin + (ahead if r == block else 0)
                dots(count, begin, step * row_bytes, coming, inputs + r * row_bytes, row_bytes, at)
                for i in range(count):
                    for j in range(4):
                        place = n + j * step
                        out[r + i, place] = narrow(sums[4 * i + j] + bias[place], out[r + i, place])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def dots(count, weights, weight_step, coming, rows, row_bytes, out):
    if count == 6:
        dots_4x6(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 5:
        dots_4x5(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 4:
        dots_4x4(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 3:
        dots_4x3(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 2:
        dots_4x2(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    else:
        dots_4x1(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def rms_norm(x, weight, eps, out, lo, hi):
    """As `elementwise.rms_norm`, whose sum is in an order that a compiler chooses for its CPU."""
    width = x.shape[1]
    values = np.empty(width, np.float32)
    for n in range(lo, hi):
        for i in range(width):
            values[i] = widen(x[n, i])
        scale = np.float32(1.0) / np.sqrt(sum_of_squares(values) / np.float32(width) + eps)
        for i in range(width):
            out[n, i] = narrow(values[i] * scale * widen(weight[i]), out[n, i])


@numba.njit(error_model="numpy", nogil=True, cache=True)
def silu_mul(gate_up, out, lo, hi):
    """As `elementwise.silu_mul`, where a compiler may divide and fuse as suits its CPU."""
    width = out.shape[1]
    for n in range(lo, hi):
        gate, up, target = gate_up[n, :width], gate_up[n, width:], out[n]
        for i in range(width):
            g = widen(gate[i])
            target[i] = narrow(g / (np.float32(1.0) + exponential(-g)) * widen(up[i]), target[i])


@numba.njit(error_model="numpy", nogil=True, cache=True)
def angles(positions, inverse, scale, cos, sin, lo, hi):
    """Of the tokens [lo, hi): scale * cos and sin of position * inverse, one element at a time."""
    for n in range(lo, hi):
        position = np.float32(positions[n])
        for i in range(inverse.shape[0]):
            phase = position * inverse[i]
            cos[n, i] = math.cos(phase) * scale
            sin[n, i] = math.sin(phase) * scale


@numba.njit(error_model="numpy", nogil=True, cache=True)
def attend(q, pool, layer, pages, begins, counts, starts, first_pages, scale, out, lo, hi):
    """Attention of groups of tokens over their pages, causal, in place. Task = group of tokens * kv heads + kv head.

    Group i is the tokens [begins[i], begins[i] + counts[i]) of q, at positions from starts[i] on; their row's pages are
    pages[first_pages[i]:]. A token goes over the tiles of keys from position 0 to its own, alone or in a group.
    """
    num_kv_heads, page_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    token_bytes = 2 * head_dim
    head_bytes = page_tokens * token_bytes
    side_bytes = num_kv_heads * head_bytes
    page_bytes = pool.shape[1] * 2 * side_bytes
    base = address(pool) + layer * 2 * side_bytes
    most = max(ROWS, group)
    queries = np.empty((most, head_dim), np.uint16)
    sums = np.empty((most, head_dim), np.float32)
    scores = np.empty((most, TILE), np.float32)
    top, total = np.empty(most, np.float32), np.empty(most, np.float32)
    scratch = np.empty(TILE, np.float32)
    for task in range(lo, hi):
        which, head = task // num_kv_heads, task % num_kv_heads
        begin, count, start = begins[which], counts[which], starts[which]
        rows, length = count * group, start + count
        for r in range(rows):
            queries[r] = q[begin + r // group, head * group + r % group]
        sums[:rows] = np.float32(0)
        top[:rows] = VERY_NEGATIVE
        total[:rows] = np.float32(0)
        for tile in range(0, length, TILE):
            end = min(tile + TILE, length)
            t = tile
            while t < end:
                page, offset = pages[first_pages[which] + t // page_tokens], t % page_tokens
                run = min(end - t, page_tokens - offset)
                keys = base + page * page_bytes + head * head_bytes + offset * token_bytes
                score_run(
                    address(queries), rows, keys, keys + side_bytes, run, token_bytes, address(scores) + 4 * (t - tile)
                )
                t += run
            for r in range(rows):
                fold_tile(scores[r], start + r // group + 1 - tile, scale, top, total, r, sums[r], scratch)
            t = tile
            while t < end:
                page, offset = pages[first_pages[which] + t // page_tokens], t % page_tokens
                run = min(end - t, page_tokens - offset)
                values = base + page * page_bytes + side_bytes + head * head_bytes + offset * token_bytes
                weigh_run(address(scores) + 4 * (t - tile), rows, group, start - t, values, run, head_dim, sums)
                t += run
        for r in range(rows):
            put_sums(sums[r], np.float32(1.0) / total[r], out[begin + r // group, head * group + r % group])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def score_run(queries, rows, keys, coming, run, token_bytes, out):
    """scores[r, t] = query r · key t of one page; up to seven keys behind the last one are read, too."""
    step = 4 * TILE
    for r in range(0, rows, 2):
        at, into = queries + r * token_bytes, out + r * step
        for t in range(0, run, 8):
            key, following = keys + t * token_bytes, coming + t * token_bytes
            if r + 1 < rows:
                dots_8x2(key, token_bytes, following, at, token_bytes, token_bytes, into + 4 * t, step)
            else:
                dots_8x1(key, token_bytes, following, at, token_bytes, token_bytes, into + 4 * t, step)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def fold_tile(scores, visible, scale, top, total, r, sums, scratch):
    """One row's scores of a tile turned into shares under the new maximum, zero from `visible` on. What was summed
    under the old one is corrected.

    Maximum and sum go over the whole tile by halves.
    """
    if visible <= 0:
        return
    for t in range(TILE):
        scores[t] = scores[t] * scale
    for t in range(visible, TILE):
        scores[t] = VERY_NEGATIVE
    for t in range(TILE // 2):
        scratch[t] = max(scores[t], scores[t + TILE // 2])
    for t in range(TILE // 4):
        scratch[t] = max(scratch[t], scratch[t + TILE // 4])
    best = top[r]
    for t in range(TILE // 4):
        best = max(best, scratch[t])
    correction = exponential(top[r] - best)
    for t in range(TILE):
        scores[t] = exponential(scores[t] - best)
    for t in range(visible, TILE):
        scores[t] = np.float32(0)
    for t in range(TILE // 2):
        scratch[t] = scores[t] + scores[t + TILE // 2]
    for t in range(TILE // 4):
        scratch[t] = scratch[t] + scratch[t + TILE // 4]
    added = np.float32(0)
    for t in range(TILE // 4):
        added += scratch[t]
    total[r] = total[r] * correction + added
    top[r] = best
    for d in range(sums.shape[0]):
        sums[d] *= correction


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def weigh_run(share, rows, group, ahead, values, run, head_dim, sums):
    """sums[r] += shares of r · values, in the order of tokens. Row r sees the first ahead + r // group + 1 of them. Of
    each 32 dimensions the even ones stand before the odd ones in sums. Four rows at once where all see all.
    """
    token_bytes, target = 2 * head_dim, address(sums)
    r = 0
    while r < rows:
        at_once = 4 if r + 4 <= rows and ahead + r // group + 1 >= run else 1
        seen = min(run, ahead + r // group + 1)
        for d in range(0, head_dim, 2 * LANES):
            at, into = values + 2 * d, target + 4 * (r * head_dim + d)
            if at_once == 4:
                weigh_4x1(at, token_bytes, at, seen, share + 4 * TILE * r, 4 * TILE, into, 4 * head_dim)
            elif seen > 0:
                weigh_1x1(at, token_bytes, at, seen, share + 4 * TILE * r, 4 * TILE, into, 4 * head_dim)
        r += at_once


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def put_sums(sums, factor, target):
    """Sums times factor, in the order of dimensions."""
    for b in range(0, sums.shape[0], 2 * LANES):
        for i in range(LANES):
            target[b + 2 * i] = narrow(sums[b + i] * factor, target[b])
            target[b + 2 * i + 1] = narrow(sums[b + LANES + i] * factor, target[b])


def group_tokens(group):
    """Most tokens of one group, when so many queries share a kv head."""
    return max(ROWS // group, 1)

# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments; the typed face is `native.PairKernels`.
"""CPU kernels for bfloat16 that multiply pairs: matrix products of few rows, and attention of decode rows over their pages.

Import it through `native`. Widths (a row of weights, a head's dimensions) are multiples of 32; for others there are the kernels of `kernels`.
All arrays are C-contiguous except `out`. What is added up for one row never depends on which rows stand beside it.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.attention_chunks import WIDE, attend_chunk, chunk_tasks, pack_context
from pdcluster.engine.kernels.elementwise import VERY_NEGATIVE, exponential, narrow, widen
from pdcluster.engine.kernels.intrinsics import LANES, SUMS_ORDER, address, dots_of, has_pair_product, weigh_pairs_of

__all__ = ["attend_chunk", "attend_rows", "chunk_tasks", "has_chunks", "linear_rows", "pack_context"]

NATIVE = has_pair_product()
has_chunks = NATIVE or WIDE
"""Elsewhere torch's own attention does as well."""
SPAN = 256
"""Tokens whose scores are turned into weights at once."""
ASK_BYTES = 32 << 10
"""How far ahead keys and values are asked for."""
SUM_PLACES = np.argsort(np.array(SUMS_ORDER))
"""Where the sum of each of 32 dimensions stands."""
AHEAD, NEAR_AHEAD = 2048, 1024
"""Bytes by which weights are asked for before they are read: less for one or two rows, with which the CPU itself looks far ahead, and what is asked
for too early keeps it from doing so (a row alone: 25 GB/s at 2048, 30 at 1024; six rows: 26 and 18)."""
NEAR_BYTES = 24 << 10
"""Of rows that are read again and again: three quarters of a usual first cache."""

dots_4x1, dots_4x2, dots_4x3, dots_4x4, dots_4x5, dots_4x6 = (dots_of(4, rows, native=NATIVE) for rows in (1, 2, 3, 4, 5, 6))
half_4x3, half_4x4, half_4x5, half_4x6 = (dots_of(4, rows, native=NATIVE, asked=2) for rows in (3, 4, 5, 6))
dots_2x7, dots_2x8 = (dots_of(2, rows, native=NATIVE) for rows in (7, 8))
dots_8x1, dots_8x2 = (dots_of(8, rows, native=NATIVE) for rows in (1, 2))
weigh_1x1, weigh_2x1, weigh_3x1, weigh_4x1 = (weigh_pairs_of(rows, 1, native=NATIVE) for rows in (1, 2, 3, 4))
weigh_1x2, weigh_2x2, weigh_3x2, weigh_4x2 = (weigh_pairs_of(rows, 2, native=NATIVE) for rows in (1, 2, 3, 4))


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def linear_rows(x, weight, bias, out, lo, hi):
    """out = x · weightᵀ + bias for a few rows: every weight is read from memory once.

    One stream of loads does not fill the memory bus, so the weights are cut in four runs that are read side by side: task i computes the i-th
    weight of every run. Where the number of weights does not divide, runs overlap. At least four weights.

    What is multiplied at once fits the registers: four weights by up to six rows, or two by eight where these stay in the first cache; more rows
    are cut in equal blocks, of which the first two share the asking for what comes next.
    """
    num_rows, step = x.shape[0], weight.shape[0] // 4
    row_bytes = 2 * weight.shape[1]
    run = step * row_bytes
    first, inputs = address(weight), address(x)
    ahead = NEAR_AHEAD if num_rows <= 2 else AHEAD
    sums = np.empty(4 * 8, np.float32)
    at = address(sums)
    blocks = 1 if num_rows in (7, 8) and num_rows * row_bytes <= NEAR_BYTES else (num_rows + 5) // 6
    for n in range(lo, hi):
        begin = first + n * row_bytes
        r = 0
        for block in range(blocks):
            count = (num_rows - r + blocks - block - 1) // (blocks - block)
            rows = inputs + r * row_bytes
            if count > 6:
                for half in range(2):
                    weights = begin + 2 * half * run
                    dots_by_two(count, weights, run, weights + ahead, rows, row_bytes, at + 8 * half)
            elif blocks == 1:
                dots(count, begin, run, begin + ahead, rows, row_bytes, at)
            else:
                dots_of_block(count, begin, run, begin + ahead + 2 * block * run if block < 2 else begin, rows, row_bytes, at)
            for i in range(count):
                for j in range(4):
                    place = n + j * step
                    out[r + i, place] = narrow(sums[4 * i + j] + bias[place], out[r + i, place])
            r += count


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def dots(count, weights, weight_step, coming, rows, row_bytes, out):
    if count == 1:
        dots_4x1(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 2:
        dots_4x2(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 3:
        dots_4x3(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 4:
        dots_4x4(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 5:
        dots_4x5(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    else:
        dots_4x6(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def dots_of_block(count, weights, weight_step, coming, rows, row_bytes, out):
    if count == 3:
        half_4x3(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 4:
        half_4x4(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    elif count == 5:
        half_4x5(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    else:
        half_4x6(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def dots_by_two(count, weights, weight_step, coming, rows, row_bytes, out):
    if count == 7:
        dots_2x7(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)
    else:
        dots_2x8(weights, weight_step, coming, rows, row_bytes, row_bytes, out, 16)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_rows(q, pool, layer, pages, first_page, lengths, scale, out, lo, hi):
    """`kernels.attend_decode` for bfloat16, pages of a multiple of eight tokens and heads of a multiple of 32 dimensions.

    A page's keys of all heads lie behind each other, and so do its values: they are read in that order. Scores of some pages become shares
    together, since what that costs hardly depends on how many they are; shares are rounded to bfloat16, as the values are.
    """
    num_kv_heads, page_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    head_bytes = 2 * page_tokens * head_dim
    side_bytes = num_kv_heads * head_bytes
    page_bytes = pool.shape[1] * 2 * side_bytes
    begin = address(pool) + layer * 2 * side_bytes
    span = max(1, SPAN // page_tokens)
    sums = np.empty((num_kv_heads, group, head_dim), np.float32)
    scores = np.empty((num_kv_heads, group, span * page_tokens), np.float32)
    shares = np.empty((num_kv_heads, group, span * page_tokens), np.uint16)
    top, total = np.empty((num_kv_heads, group), np.float32), np.empty((num_kv_heads, group), np.float32)
    for row in range(lo // num_kv_heads, (hi + num_kv_heads - 1) // num_kv_heads):
        h0, h1 = max(lo - row * num_kv_heads, 0), min(hi - row * num_kv_heads, num_kv_heads)
        sums[:] = np.float32(0)
        top[:] = VERY_NEGATIVE
        total[:] = np.float32(0)
        queries = address(q) + row * num_kv_heads * group * 2 * head_dim
        num_pages = (lengths[row] + page_tokens - 1) // page_tokens
        for p0 in range(0, num_pages, span):
            p1 = min(p0 + span, num_pages)
            first = begin + pages[first_page[row] + p0] * page_bytes
            for p in range(p0, p1):
                keys = begin + pages[first_page[row] + p] * page_bytes
                following = begin + pages[first_page[row] + p + 1] * page_bytes if p + 1 < p1 else first + side_bytes
                count, place = min(page_tokens, lengths[row] - p * page_tokens), (p - p0) * page_tokens
                for h in range(h0, h1):
                    coming = coming_head(keys, following, h, h0, h1, head_bytes)
                    score_page(queries + h * group * 2 * head_dim, group, keys + h * head_bytes, coming, count, 2 * head_dim, scores[h], place)
            tokens = min((p1 - p0) * page_tokens, lengths[row] - p0 * page_tokens)
            for h in range(h0, h1):
                for g in range(group):
                    share_scores(scores[h, g], shares[h, g], tokens, scale, top[h], total[h], g, sums[h, g])
            for p in range(p0, p1):
                values = begin + pages[first_page[row] + p] * page_bytes + side_bytes
                following = begin + pages[first_page[row] + min(p + 1, num_pages - 1)] * page_bytes + (side_bytes if p + 1 < p1 else 0)
                count, place = min(page_tokens, lengths[row] - p * page_tokens), (p - p0) * page_tokens
                for h in range(h0, h1):
                    coming = coming_head(values, following, h, h0, h1, head_bytes)
                    weigh_page(shares[h], place, group, values + h * head_bytes, coming, count, head_dim, sums[h])
        for h in range(h0, h1):
            for g in range(group):
                put_sums(sums[h, g], np.float32(1.0) / total[h, g], out[row, h * group + g])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def coming_head(side, following, h, h0, h1, head_bytes):
    """What is read ASK_BYTES after head h of one page's keys or values, or a whole page later where that is nearer."""
    later = h + min(max(1, ASK_BYTES // head_bytes), h1 - h0)
    return side + later * head_bytes if later < h1 else following + (later - h1 + h0) * head_bytes


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def put_sums(sums, factor, target):
    """Sums times factor, in the order of dimensions."""
    for b in range(0, sums.shape[0], 2 * LANES):
        for i in range(2 * LANES):
            target[b + i] = narrow(sums[b + SUM_PLACES[i]] * factor, target[b])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def score_page(queries, group, keys, coming, count, token_bytes, scores, place):
    """scores[g, place + t] = query g · key t; some keys behind the last one are read, too."""
    step, begin = 4 * scores.shape[1], address(scores) + 4 * place
    for g in range(0, group, 2):
        rows, out = queries + g * token_bytes, begin + g * step
        if g + 1 < group:
            for t in range(0, count, 8):
                dots_8x2(keys + t * token_bytes, token_bytes, coming + t * token_bytes, rows, token_bytes, token_bytes, out + 4 * t, step)
        else:
            for t in range(0, count, 8):
                dots_8x1(keys + t * token_bytes, token_bytes, coming + t * token_bytes, rows, token_bytes, token_bytes, out + 4 * t, step)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def share_scores(scores, shares, count, scale, top, total, g, sums):
    """Turn scores into shares under the new maximum, and correct what was summed under the old one."""
    best = VERY_NEGATIVE
    for t in range(count):
        best = max(best, scores[t])
    best = max(best * scale, top[g])
    added = np.float32(0)
    for t in range(count):
        share = narrow(exponential(scores[t] * scale - best), shares[t])
        shares[t] = share
        added += widen(share)
    if count % 2:
        shares[count] = 0
    if best > top[g]:
        correction = exponential(top[g] - best)
        total[g] *= correction
        top[g] = best
        for d in range(sums.shape[0]):
            sums[d] *= correction
    total[g] += added


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def weigh_page(shares, place, group, values, coming, count, head_dim, sums):
    """sums[g] += shares[g, place:] · values, in the order of `vectors.SUMS_ORDER`. A last odd value is paired with itself, its second share being 0:
    behind it may be anything, and 0 times that need not be 0."""
    token_bytes, begin, share_step = 2 * head_dim, address(shares) + 2 * place, 2 * shares.shape[1]
    for g in range(0, group, 4):
        rows = min(4, group - g)
        share, target = begin + g * share_step, address(sums) + 4 * g * head_dim
        whole = head_dim - head_dim % (4 * LANES)
        for d in range(0, head_dim, 4 * LANES):
            wide = d < whole
            weigh(rows, wide, values + 2 * d, token_bytes, token_bytes, coming + 2 * d, count // 2, share, share_step, target + 4 * d, 4 * head_dim)
            if count % 2:
                last = values + 2 * d + (count - 1) * token_bytes
                weigh(rows, wide, last, 0, 0, last, 1, share + 2 * (count - 1), share_step, target + 4 * d, 4 * head_dim)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def weigh(rows, wide, values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step):
    if wide:
        if rows == 1:
            weigh_1x2(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
        elif rows == 2:
            weigh_2x2(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
        elif rows == 3:
            weigh_3x2(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
        else:
            weigh_4x2(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
    else:
        if rows == 1:
            weigh_1x1(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
        elif rows == 2:
            weigh_2x1(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
        elif rows == 3:
            weigh_3x1(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)
        else:
            weigh_4x1(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step)

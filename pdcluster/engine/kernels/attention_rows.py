# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""Attention of rows that decode, over their pages, in bfloat16.

A head has a multiple of 32 dimensions, a page a multiple of eight tokens. What is added up for one row never depends on
which rows stand beside it.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import VERY_NEGATIVE, exponential, narrow, widen
from pdcluster.engine.kernels.intrinsics import LANES, SUMS_ORDER, address, dots_of, has_pair_product, weigh_pairs_of

NATIVE = has_pair_product()
# Tokens whose scores are turned into weights at once.
SPAN = 256
# How far ahead keys and values are asked for.
ASK_BYTES = 32 << 10
# Where the sum of each of 32 dimensions stands.
SUM_PLACES = np.argsort(np.array(SUMS_ORDER))

dots_8x1, dots_8x2 = (dots_of(8, rows, native=NATIVE) for rows in (1, 2))
weigh_1x1, weigh_2x1, weigh_3x1, weigh_4x1 = (weigh_pairs_of(rows, 1, native=NATIVE) for rows in (1, 2, 3, 4))
weigh_1x2, weigh_2x2, weigh_3x2, weigh_4x2 = (weigh_pairs_of(rows, 2, native=NATIVE) for rows in (1, 2, 3, 4))


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_rows(q, pool, layer, pages, first_page, lengths, scale, out, lo, hi):
    """`elementwise.attend_decode` for bfloat16, pages of a multiple of eight tokens and heads of a multiple of 32
    dimensions.

    A page's keys of all heads lie behind each other, and so do its values. They are read in that order. Scores of some
    pages become shares together, since that costs hardly more than one. Shares are rounded to bfloat16, as the values
    are.
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
                    score_page(
                        queries + h * group * 2 * head_dim,
                        group,
                        keys + h * head_bytes,
                        coming,
                        count,
                        2 * head_dim,
                        scores[h],
                        place,
                    )
            tokens = min((p1 - p0) * page_tokens, lengths[row] - p0 * page_tokens)
            for h in range(h0, h1):
                for g in range(group):
                    share_scores(scores[h, g], shares[h, g], tokens, scale, top[h], total[h], g, sums[h, g])
            for p in range(p0, p1):
                values = begin + pages[first_page[row] + p] * page_bytes + side_bytes
                following = (
                    begin
                    + pages[first_page[row] + min(p + 1, num_pages - 1)] * page_bytes
                    + (side_bytes if p + 1 < p1 else 0)
                )
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
                dots_8x2(
                    keys + t * token_bytes,
                    token_bytes,
                    coming + t * token_bytes,
                    rows,
                    token_bytes,
                    token_bytes,
                    out + 4 * t,
                    step,
                )
        else:
            for t in range(0, count, 8):
                dots_8x1(
                    keys + t * token_bytes,
                    token_bytes,
                    coming + t * token_bytes,
                    rows,
                    token_bytes,
                    token_bytes,
                    out + 4 * t,
                    step,
                )


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
    """sums[g] += shares[g, place:] · values, in the order of `intrinsics.SUMS_ORDER`. A last odd value is paired with
    itself, and its second share is 0. What lies behind it may be no number, and 0 times that need not be 0.
    """
    token_bytes, begin, share_step = 2 * head_dim, address(shares) + 2 * place, 2 * shares.shape[1]
    for g in range(0, group, 4):
        rows = min(4, group - g)
        share, target = begin + g * share_step, address(sums) + 4 * g * head_dim
        whole = head_dim - head_dim % (4 * LANES)
        for d in range(0, head_dim, 4 * LANES):
            wide = d < whole
            weigh(
                rows,
                wide,
                values + 2 * d,
                token_bytes,
                token_bytes,
                coming + 2 * d,
                count // 2,
                share,
                share_step,
                target + 4 * d,
                4 * head_dim,
            )
            if count % 2:
                last = values + 2 * d + (count - 1) * token_bytes
                weigh(
                    rows, wide, last, 0, 0, last, 1, share + 2 * (count - 1), share_step, target + 4 * d, 4 * head_dim
                )


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

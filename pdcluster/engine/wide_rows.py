# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments; the typed face is `native.PairKernels`.
"""What the `attend_rows` of `pair_kernels` does, for CPUs with AVX2 and nothing wider: attention of rows that decode, over their pages.

Queries are widened once, and queries of one kv head share each read of a page. Of each page and head keys are scored, scores become shares and
values are weighed while both lie near, and meanwhile the next head's keys and values are asked for, side by side: one stream of loads does not fill
the memory bus. It holds no product of its own: `row_tiles` has them. Import it through `native`.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels import VERY_NEGATIVE, exponential, narrow, widen
from pdcluster.engine.row_tiles import HALF, TOKENS, score_tile_of, weigh_tile_of
from pdcluster.engine.vectors import address

score_1, score_2 = score_tile_of(1), score_tile_of(2)
weigh_1x4, weigh_2x4 = weigh_tile_of(1, TOKENS), weigh_tile_of(2, TOKENS)
weigh_1x1, weigh_2x1 = weigh_tile_of(1, 1), weigh_tile_of(2, 1)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_rows(q, pool, layer, pages, first_page, lengths, scale, out, lo, hi):
    """Task = row * kv heads + kv head. Pages have a multiple of four tokens, heads a multiple of 16 dimensions."""
    num_kv_heads, page_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    head_bytes = 2 * page_tokens * head_dim
    side_bytes = num_kv_heads * head_bytes
    page_bytes = pool.shape[1] * 2 * side_bytes
    begin = address(pool) + layer * 2 * side_bytes
    queries = np.empty((num_kv_heads, group, head_dim), np.float32)
    sums = np.empty((num_kv_heads, group, head_dim), np.float32)
    scores = np.empty((group, page_tokens), np.float32)
    top, total = np.empty((num_kv_heads, group), np.float32), np.empty((num_kv_heads, group), np.float32)
    for row in range(lo // num_kv_heads, (hi + num_kv_heads - 1) // num_kv_heads):
        h0, h1 = max(lo - row * num_kv_heads, 0), min(hi - row * num_kv_heads, num_kv_heads)
        for h in range(h0, h1):
            for g in range(group):
                take_query(q[row, h * group + g], queries[h, g])
        sums[:] = np.float32(0)
        top[:] = VERY_NEGATIVE
        total[:] = np.float32(0)
        num_pages = (lengths[row] + page_tokens - 1) // page_tokens
        for p in range(num_pages):
            page = begin + pages[first_page[row] + p] * page_bytes
            following = begin + pages[first_page[row] + min(p + 1, num_pages - 1)] * page_bytes
            count = min(page_tokens, lengths[row] - p * page_tokens)
            for h in range(h0, h1):
                keys = page + h * head_bytes
                coming = keys + head_bytes if h + 1 < h1 else following + h0 * head_bytes
                score_page(queries[h], keys, coming, side_bytes, count, scores)
                for g in range(group):
                    share_scores(scores[g], count, scale, top[h], total[h], g, sums[h, g])
                weigh_page(scores, keys + side_bytes, coming + head_bytes // 2, side_bytes, count, sums[h])
        for h in range(h0, h1):
            for g in range(group):
                put_sums(sums[h, g], np.float32(1.0) / total[h, g], out[row, h * group + g])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def take_query(query, target):
    """In the order of `row_tiles`."""
    for b in range(0, query.shape[0], 2 * HALF):
        for i in range(HALF):
            target[b + i] = widen(query[b + 2 * i])
            target[b + HALF + i] = widen(query[b + 2 * i + 1])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def put_sums(sums, factor, target):
    for b in range(0, sums.shape[0], 2 * HALF):
        for i in range(HALF):
            target[b + 2 * i] = narrow(sums[b + i] * factor, target[b])
            target[b + 2 * i + 1] = narrow(sums[b + HALF + i] * factor, target[b])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def score_page(queries, keys, coming, side_bytes, count, scores):
    """scores[g, t] = query g · key t; up to three keys behind the last one are read, too."""
    group, head_dim, step = queries.shape[0], queries.shape[1], 4 * scores.shape[1]
    token_bytes, row_bytes = 2 * head_dim, 4 * head_dim
    for t in range(0, count, TOKENS):
        at = keys + t * token_bytes
        for g in range(0, group, 2):
            rows, out = address(queries) + g * row_bytes, address(scores) + g * step + 4 * t
            asked = coming + t * head_dim if g == 0 else at
            if g + 1 < group:
                score_2(at, token_bytes, rows, row_bytes, head_dim // (2 * HALF), out, step, asked, side_bytes)
            else:
                score_1(at, token_bytes, rows, row_bytes, head_dim // (2 * HALF), out, step, asked, side_bytes)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def share_scores(scores, count, scale, top, total, g, sums):
    """Turn scores into shares under the new maximum, and correct what was summed under the old one."""
    best = VERY_NEGATIVE
    for t in range(count):
        best = max(best, scores[t])
    best = max(best * scale, top[g])
    added = np.float32(0)
    for t in range(count):
        scores[t] = exponential(scores[t] * scale - best)
        added += scores[t]
    if best > top[g]:
        correction = exponential(top[g] - best)
        total[g] *= correction
        top[g] = best
        for d in range(sums.shape[0]):
            sums[d] *= correction
    total[g] += added


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def weigh_page(shares, values, coming, side_bytes, count, sums):
    """sums[g] += shares[g] · values. Values behind the last one may be no numbers, and are not read."""
    group, head_dim, step = sums.shape[0], sums.shape[1], 4 * shares.shape[1]
    token_bytes, row_bytes, turns = 2 * head_dim, 4 * head_dim, head_dim // (2 * HALF)
    whole = count - count % TOKENS
    for t in range(0, whole, TOKENS):
        at = values + t * token_bytes
        for g in range(0, group, 2):
            given, target = address(shares) + g * step + 4 * t, address(sums) + g * row_bytes
            asked = coming + t * head_dim if g == 0 else at
            if g + 1 < group:
                weigh_2x4(at, token_bytes, given, step, turns, target, row_bytes, asked, side_bytes)
            else:
                weigh_1x4(at, token_bytes, given, step, turns, target, row_bytes, asked, side_bytes)
    for t in range(whole, count):
        at = values + t * token_bytes
        for g in range(0, group, 2):
            given, target = address(shares) + g * step + 4 * t, address(sums) + g * row_bytes
            if g + 1 < group:
                weigh_2x1(at, token_bytes, given, step, turns, target, row_bytes, at, 0)
            else:
                weigh_1x1(at, token_bytes, given, step, turns, target, row_bytes, at, 0)

# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments; the typed face is `native.PairKernels`.
"""What the `attend_rows` of `pair_kernels` does, for CPUs with AVX2 and nothing wider: attention of rows that decode, over their pages.

Queries are widened once, and queries of one kv head share each read of a page. Of each page and head keys are scored, scores become shares and
values are weighed while both lie near, and meanwhile the next head's keys and values are asked for, side by side: one stream of loads does not fill
the memory bus. (Eight rows behind 2,048 tokens: 18.0 GB/s; without asking 12.9, asking for one stream 11.3, with all keys of a page before its values
15.2.) It holds no arithmetic of its own: `row_tiles` has it. Import it through `native`.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import VERY_NEGATIVE, narrow, widen
from pdcluster.engine.kernels.intrinsics import address
from pdcluster.engine.kernels.row_tiles import HALF, TOKENS, score_tile_of, share_scores, weigh_tile_of

score_1, score_2 = score_tile_of(1), score_tile_of(2)
weigh_1x4, weigh_2x4 = weigh_tile_of(1, TOKENS), weigh_tile_of(2, TOKENS)
weigh_1x1, weigh_2x1 = weigh_tile_of(1, 1), weigh_tile_of(2, 1)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_rows(q, pool, layer, pages, first_page, lengths, scale, out, lo, hi):
    """Task = row * kv heads + kv head. Pages have a multiple of eight tokens, heads a multiple of 16 dimensions."""
    num_kv_heads, page_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    head_bytes = 2 * page_tokens * head_dim
    side_bytes = num_kv_heads * head_bytes
    page_bytes = pool.shape[1] * 2 * side_bytes
    begin = address(pool) + layer * 2 * side_bytes
    queries, sums = np.empty((num_kv_heads * group, head_dim), np.float32), np.empty((num_kv_heads * group, head_dim), np.float32)
    scores = np.empty((num_kv_heads * group, page_tokens), np.float32)
    top, total = np.empty(num_kv_heads * group, np.float32), np.empty(num_kv_heads * group, np.float32)
    for row in range(lo // num_kv_heads, (hi + num_kv_heads - 1) // num_kv_heads):
        h0, h1 = max(lo - row * num_kv_heads, 0), min(hi - row * num_kv_heads, num_kv_heads)
        for r in range(h0 * group, h1 * group):
            take_query(q[row, r], queries[r])
            top[r], total[r] = VERY_NEGATIVE, np.float32(0)
        sums[:] = np.float32(0)
        num_pages = (lengths[row] + page_tokens - 1) // page_tokens
        for p in range(num_pages):
            page = begin + pages[first_page[row] + p] * page_bytes
            following = begin + pages[first_page[row] + min(p + 1, num_pages - 1)] * page_bytes
            count = min(page_tokens, lengths[row] - p * page_tokens)
            for h in range(h0, h1):
                keys = page + h * head_bytes
                coming = keys + head_bytes if h + 1 < h1 else following + h0 * head_bytes
                score_page(queries, h * group, group, keys, coming, side_bytes, count, scores)
                share_page(scores, h * group, h * group + group, count, scale, top, total, sums)
                weigh_page(scores, h * group, group, keys + side_bytes, coming + head_bytes // 2, side_bytes, count, sums)
        for r in range(h0 * group, h1 * group):
            put_sums(sums[r], np.float32(1.0) / total[r], out[row, r])


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
def score_page(queries, first, group, keys, coming, apart, count, scores):
    """scores[g, t] = query g · key t, for g from `first` on; up to three keys behind the last one are read, too."""
    head_dim, step = queries.shape[1], 4 * scores.shape[1]
    token_bytes, row_bytes, turns = 2 * head_dim, 4 * head_dim, head_dim // (2 * HALF)
    for t in range(0, count, TOKENS):
        at = keys + t * token_bytes
        for g in range(0, group, 2):
            rows, out = address(queries) + (first + g) * row_bytes, address(scores) + (first + g) * step + 4 * t
            asked = coming + t * head_dim if g == 0 else at
            if g + 1 < group:
                score_2(at, token_bytes, rows, row_bytes, turns, out, step, asked, apart)
            else:
                score_1(at, token_bytes, rows, row_bytes, turns, out, step, asked, apart)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def share_page(scores, first, last, count, scale, top, total, sums):
    """Turn scores of rows [first, last) into shares under the new maxima, and correct what was summed under the old ones."""
    vectors = (count + HALF - 1) // HALF
    for r in range(first, last):
        for t in range(count, vectors * HALF):
            scores[r, t] = VERY_NEGATIVE
        best, correction, added = share_scores(address(scores) + 4 * r * scores.shape[1], vectors, scale, top[r], total[r])
        if best > top[r]:
            for d in range(sums.shape[1]):
                sums[r, d] *= correction
        top[r], total[r] = best, added


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def weigh_page(shares, first, group, values, coming, apart, count, sums):
    """sums[g] += shares[g] · values, for g from `first` on. Values behind the last one may be no numbers, and are not read."""
    head_dim, step = sums.shape[1], 4 * shares.shape[1]
    token_bytes, row_bytes, turns = 2 * head_dim, 4 * head_dim, head_dim // (2 * HALF)
    whole = count - count % TOKENS
    for t in range(0, whole, TOKENS):
        at = values + t * token_bytes
        for g in range(0, group, 2):
            given, target = address(shares) + (first + g) * step + 4 * t, address(sums) + (first + g) * row_bytes
            asked = coming + t * head_dim if g == 0 else at
            if g + 1 < group:
                weigh_2x4(at, token_bytes, given, step, turns, target, row_bytes, asked, apart)
            else:
                weigh_1x4(at, token_bytes, given, step, turns, target, row_bytes, asked, apart)
    for t in range(whole, count):
        at = values + t * token_bytes
        for g in range(0, group, 2):
            given, target = address(shares) + (first + g) * step + 4 * t, address(sums) + (first + g) * row_bytes
            if g + 1 < group:
                weigh_2x1(at, token_bytes, given, step, turns, target, row_bytes, at, 0)
            else:
                weigh_1x1(at, token_bytes, given, step, turns, target, row_bytes, at, 0)

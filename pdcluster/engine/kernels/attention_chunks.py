# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""CPU kernels for the attention of a prompt's chunk in bfloat16: causal, behind any cached prefix, straight from the
pages.

`pack_context` lays a row's keys and values out for products of pairs, once per layer. `attend_chunk` goes over them in
blocks of 64 keys with an online softmax. Heads have a multiple of 32 dimensions. Import it through `loader`.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import register_jitable

from pdcluster.engine.kernels.elementwise import VERY_NEGATIVE, exponential, narrow, widen
from pdcluster.engine.kernels.f32_tiles import wide_tile_of
from pdcluster.engine.kernels.intrinsics import (
    LANES,
    address,
    greatest_of,
    has_broad_product,
    has_pair_product,
    has_wide_product,
    tile_of,
)
from pdcluster.engine.kernels.layer_arrays import BLOCK

BROAD = has_broad_product()
# Rows of one product: fewer than the turns of a loop that a sum takes would leave multipliers idle.
F32_TILE = 12 if BROAD else 6

f32_score_tile, f32_add_tile = (
    wide_tile_of(F32_TILE, adds=False),
    wide_tile_of(F32_TILE, adds=True, row_bytes=4 * BLOCK),
)
NATIVE, WIDE = has_pair_product() and not BROAD, has_wide_product() or BROAD
# Elsewhere torch's own attention does as well.
has_chunks = NATIVE or WIDE
# Of queries and shares.
FACTOR = np.float32 if WIDE else np.uint16
# Rows of one product. Of pairs six times four vectors of sums leave registers for what is multiplied.
TILE = F32_TILE if WIDE else 6
# Rows (queries of one kv head) that go over the context together, at least one token's.
ROWS = 48

score_tile = tile_of(TILE, 4, native=NATIVE, adds=False)
add_tile_4 = tile_of(TILE, 4, native=NATIVE, adds=True)
add_tile_2 = tile_of(TILE, 2, native=NATIVE, adds=True)
greatest = greatest_of(BLOCK)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def pack_context(pool, layer, pages, length, keys, values, lo, hi):
    """Blocks of 64 tokens: keys[head, block, pair of dimensions, token] and values[head, block, pair of tokens,
    dimension] hold two bfloat16 each. They are zero behind the row's end. pool is uint32. Task = head * blocks + block.
    """
    page_tokens, num_pairs, num_blocks = pool.shape[4], pool.shape[5], (length + BLOCK - 1) // BLOCK
    for task in range(lo, hi):
        head, block = task // num_blocks, task % num_blocks
        k, v = keys[head, block], values[head, block]
        for t in range(BLOCK):
            token = block * BLOCK + t
            shift = np.uint32(16 * (t % 2))
            if token < length:
                page, offset = pages[token // page_tokens], token % page_tokens
                key, value = pool[page, layer, 0, head, offset], pool[page, layer, 1, head, offset]
                for p in range(num_pairs):
                    k[p, t] = key[p]
                put_value(value, v[t // 2], shift)
            else:
                k[:, t] = np.uint32(0)
                if t % 2 == 0:
                    v[t // 2, :] = np.uint32(0)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def put_value(value, target, shift):
    """One token's values into the lower (shift 0, first) or upper halves of its pair's."""
    for p in range(value.shape[0]):
        low, high = value[p] & np.uint32(0xFFFF), value[p] >> np.uint32(16)
        if shift:
            target[2 * p] |= low << np.uint32(16)
            target[2 * p + 1] |= high << np.uint32(16)
        else:
            target[2 * p], target[2 * p + 1] = low, high


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_chunk(q, keys, values, start, begin, count, scale, out, lo, hi):
    """Tokens [begin, begin + count) of q, at positions from start on, attend to all before them and themselves.

    Task = head * groups of tokens + group of tokens, so many as `chunk_tasks` says."""
    num_kv_heads, head_dim = keys.shape[0], q.shape[2]
    group = q.shape[1] // num_kv_heads
    tokens = max(ROWS // group, 1)
    num_groups = (count + tokens - 1) // tokens
    most = (tokens * group + TILE - 1) // TILE * TILE
    queries = np.zeros((most, head_dim), FACTOR)
    scores = np.empty((most, BLOCK), np.float32)
    shares = np.zeros((most, BLOCK), FACTOR)
    sums = np.empty((most, head_dim), np.float32)
    top, total = np.empty(most, np.float32), np.empty(most, np.float32)
    for task in range(lo, hi):
        head, first = task // num_groups, task % num_groups * tokens
        last = min(first + tokens, count)
        rows = (last - first) * group
        for r in range(rows):
            take(q[begin + first + r // group, head * group + r % group], queries, r)
        sums[:] = np.float32(0)
        top[:] = VERY_NEGATIVE
        total[:] = np.float32(0)
        for block in range((start + last + BLOCK - 1) // BLOCK):
            seen = min(start + last - block * BLOCK, BLOCK)
            multiply_keys(queries, keys[head, block], rows, seen, scores)
            for r in range(rows):
                visible = min(start + first + r // group + 1 - block * BLOCK, BLOCK)
                fold_block(scores, r, visible, scale, top, total, sums, shares)
            multiply_values(shares, values[head, block], rows, seen, sums)
        for r in range(rows):
            inverse = np.float32(1.0) / total[r]
            target = out[begin + first + r // group, head * group + r % group]
            for d in range(head_dim):
                target[d] = narrow(sums[r, d] * inverse, target[d])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def take_query(query, queries, r):
    queries[r] = query


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def block_scores(queries, keys, rows, _, scores):
    width = 2 * queries.shape[1]
    for r in range(0, rows, TILE):
        score_tile(
            address(queries) + r * width,
            width,
            address(keys),
            4 * BLOCK,
            keys.shape[0],
            address(scores) + 4 * BLOCK * r,
            4 * BLOCK,
        )


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def block_sums(shares, values, rows, _, sums):
    width = 4 * sums.shape[1]
    for r in range(0, rows, TILE):
        left, out = address(shares) + 2 * BLOCK * r, address(sums) + width * r
        for d in range(0, sums.shape[1] - sums.shape[1] % BLOCK, BLOCK):
            add_tile_4(left, 2 * BLOCK, address(values) + 4 * d, width, BLOCK // 2, out + 4 * d, width)
        if sums.shape[1] % BLOCK:
            d = sums.shape[1] - BLOCK // 2
            add_tile_2(left, 2 * BLOCK, address(values) + 4 * d, width, BLOCK // 2, out + 4 * d, width)


# On CPUs that multiply floats as fast as pairs, queries and shares are float32.


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def take_wide(query, queries, r):
    """As row r of queries, whose tiles lie interleaved, dimension by dimension."""
    width = query.shape[0]
    first = r // F32_TILE * F32_TILE
    tile = queries[first : first + F32_TILE].reshape(width, F32_TILE)
    for d in range(width):
        tile[d, r - first] = widen(query[d])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def wide_scores(queries, keys, rows, seen, scores):
    """Of the first `seen` keys, and some behind them."""
    for r in range(0, rows, F32_TILE):
        left, out = address(queries) + 4 * r * queries.shape[1], address(scores) + 4 * BLOCK * r
        for t in range(0, seen, LANES):
            f32_score_tile(left, address(keys) + 4 * t, 4 * BLOCK, keys.shape[0], out + 4 * t, 4 * BLOCK)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def wide_sums(shares, values, rows, seen, sums):
    width = 4 * sums.shape[1]
    for r in range(0, rows, F32_TILE):
        left, out = address(shares) + 4 * BLOCK * r, address(sums) + width * r
        for d in range(0, sums.shape[1], LANES):
            f32_add_tile(left, address(values) + 4 * d, width, (seen + 1) // 2, out + 4 * d, width)


# The fourth argument of the latter says how many of a block's keys any of the queries sees.
take, multiply_keys, multiply_values = (
    (take_wide, wide_scores, wide_sums) if WIDE else (take_query, block_scores, block_sums)
)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def fold_block(scores, r, visible, scale, top, total, sums, shares):
    """Row r's scores of a block turned into shares under the new maximum. What was summed under another one is
    corrected.

    The arrays come whole: a view of one row costs as much as the row.
    """
    if visible <= 0:
        for t in range(BLOCK):
            shares[r, t] = np.uint16(0)
        return
    for t in range(visible, BLOCK):
        scores[r, t] = VERY_NEGATIVE
    best = max(greatest(address(scores) + 4 * BLOCK * r) * scale, top[r])
    added = np.float32(0)
    for t in range(BLOCK):
        share = exponential(scores[r, t] * scale - best)
        added += share
        shares[r, t] = narrow(share, shares[r, t])
    for t in range(visible, BLOCK):
        shares[r, t] = np.uint16(0)
    if best > top[r]:
        correction = exponential(top[r] - best)
        total[r] *= correction
        top[r] = best
        for d in range(sums.shape[1]):
            sums[r, d] *= correction
    total[r] += added


@register_jitable
def chunk_tasks(num_heads, num_kv_heads, count):
    """Tasks of attend_chunk."""
    tokens = max(ROWS // (num_heads // num_kv_heads), 1)
    return num_kv_heads * ((count + tokens - 1) // tokens)

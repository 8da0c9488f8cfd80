# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments.
"""What the attention of `chunk_kernels` and `pair_kernels` multiplies by on CPUs with AVX2 and nothing wider: blocks whose sums fit sixteen registers
of eight floats. Queries of a prompt and all shares are float32 there. It holds no loop over blocks or pages: that is theirs."""

from __future__ import annotations

import numba

from pdcluster.engine.kernels import widen
from pdcluster.engine.layer_arrays import BLOCK
from pdcluster.engine.vectors import LANES, PAIR, address, weigh_of
from pdcluster.engine.wide_tiles import wide_tile_of

TILE = 6
WIDE_SUMS_ORDER = *range(0, PAIR, 2), *range(1, PAIR, 2)
"""The dimension of each of 32 sums that `vectors.weigh_of` keeps."""

score_tile, add_tile = wide_tile_of(TILE, adds=False), wide_tile_of(TILE, adds=True, row_bytes=4 * BLOCK)
weigh_1x2, weigh_1x1, weigh_2x1 = weigh_of(1, 2), weigh_of(1, 1), weigh_of(2, 1)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def take_wide(query, queries, r):
    """As row r of queries, whose tiles lie interleaved, dimension by dimension."""
    width = query.shape[0]
    first = r // TILE * TILE
    tile = queries[first : first + TILE].reshape(width, TILE)
    for d in range(width):
        tile[d, r - first] = widen(query[d])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def wide_scores(queries, keys, rows, seen, scores):
    """Of the first `seen` keys, and some behind them."""
    for r in range(0, rows, TILE):
        left, out = address(queries) + 4 * r * queries.shape[1], address(scores) + 4 * BLOCK * r
        for t in range(0, seen, LANES):
            score_tile(left, address(keys) + 4 * t, 4 * BLOCK, keys.shape[0], out + 4 * t, 4 * BLOCK)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def wide_sums(shares, values, rows, seen, sums):
    width = 4 * sums.shape[1]
    for r in range(0, rows, TILE):
        left, out = address(shares) + 4 * BLOCK * r, address(sums) + width * r
        for d in range(0, sums.shape[1], LANES):
            add_tile(left, address(values) + 4 * d, width, (seen + 1) // 2, out + 4 * d, width)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def weigh_wide(shares, place, group, values, coming, count, head_dim, sums):
    """sums[g] += shares[g, place:] · values, in the order of WIDE_SUMS_ORDER."""
    token_bytes, begin, share_step = 2 * head_dim, address(shares) + 4 * place, 4 * shares.shape[1]
    for g in range(0, group, 2):
        share, target = begin + g * share_step, address(sums) + 4 * g * head_dim
        if g + 1 < group:
            for d in range(0, head_dim, PAIR):
                weigh_2x1(values + 2 * d, token_bytes, coming + 2 * d, count, share, share_step, target + 4 * d, 4 * head_dim)
        else:
            for d in range(0, head_dim - PAIR, 2 * PAIR):
                weigh_1x2(values + 2 * d, token_bytes, coming + 2 * d, count, share, share_step, target + 4 * d, 4 * head_dim)
            if head_dim // PAIR % 2:
                d = head_dim - PAIR
                weigh_1x1(values + 2 * d, token_bytes, coming + 2 * d, count, share, share_step, target + 4 * d, 4 * head_dim)

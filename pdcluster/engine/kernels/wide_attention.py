# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments.
"""What the attention of `chunk_kernels` multiplies by on CPUs that multiply floats as fast as pairs (`has_wide_product`, `has_broad_product`): blocks
whose sums fit sixteen registers of eight floats, or 32 of sixteen. Queries and shares are float32 there. It holds no loop over blocks: those do."""

from __future__ import annotations

import numba

from pdcluster.engine.kernels.elementwise import widen
from pdcluster.engine.kernels.f32_tiles import wide_tile_of
from pdcluster.engine.kernels.intrinsics import LANES, address, has_broad_product
from pdcluster.engine.kernels.layer_arrays import BLOCK

TILE = 12 if has_broad_product() else 6
"""Rows of one product: fewer than the turns of a loop that a sum takes would leave multipliers idle."""

score_tile, add_tile = wide_tile_of(TILE, adds=False), wide_tile_of(TILE, adds=True, row_bytes=4 * BLOCK)


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

# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments; the typed face is `native.PairKernels`.
"""What `panel_kernels` does with more than two rows on CPUs that multiply sixteen floats at once and pairs of bfloat16 no faster.

Rows are widened once. The sums of twelve rows by half a panel, or of six by a whole one, fill 24 of the 32 registers; of 26 instructions that go to
the multipliers two widen weights, of 28 four where six rows have a whole panel. Rows that are widened together stay in the second-level cache beside
a panel, for whose next one the first tile asks, in several streams. (Emerald Rapids, 512 rows: 149 GFLOP/s, in pairs 79. Of 17 GB/s that its memory
gives, four rows read 12.8 and twelve 12.0; asking in one stream 11.8 and 10.2.)
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels import narrow, widen
from pdcluster.engine.vectors import address
from pdcluster.engine.wide_tiles import broad_tile_of

PANEL, HALF = 64, 32
TILE = 12
WIDE_BYTES = 384 << 10
"""Of rows that are widened together."""
SOME = 64
"""Inputs of a tile that are widened before the next ones: what they become stays in the first cache meanwhile."""

whole_6 = broad_tile_of(6, PANEL, PANEL, asks=False)
asking_3, asking_4, asking_5, asking_6 = (broad_tile_of(rows, PANEL, PANEL, asks=True) for rows in (3, 4, 5, 6))
half_7, half_8, half_9, half_10, half_11, half_12 = (broad_tile_of(rows, HALF, PANEL, asks=False) for rows in (7, 8, 9, 10, 11, 12))
half_asking_7, half_asking_8, half_asking_9 = (broad_tile_of(rows, HALF, PANEL, asks=True) for rows in (7, 8, 9))
half_asking_10, half_asking_11, half_asking_12 = (broad_tile_of(rows, HALF, PANEL, asks=True) for rows in (10, 11, 12))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_widened(x, panels, bias, out, column, lo, hi):
    """`panel_kernels.multiply_panels` of at least three rows."""
    if lo >= hi:
        return
    num_rows, width = x.shape
    most = max(WIDE_BYTES // (4 * width) // TILE * TILE, TILE)
    parts = (num_rows + most - 1) // most
    rows, sums = np.empty((num_rows + parts - 1) // parts * width, np.float32), np.empty((TILE, PANEL), np.float32)
    begin = 0
    for part in range(parts):
        count = (num_rows - begin + parts - part - 1) // (parts - part)
        widen_rows(x[begin : begin + count], rows)
        multiply_broad(rows, count, panels, bias, sums, out[begin : begin + count], column, lo, hi)
        begin += count


@numba.njit(error_model="numpy", nogil=True, cache=True)
def widen_rows(x, rows):
    """Tile behind tile, each [inputs, rows of the tile]."""
    count, width = x.shape
    num_tiles = (count + TILE - 1) // TILE
    r = 0
    for tile in range(num_tiles):
        tile_rows = (count - r + num_tiles - tile - 1) // (num_tiles - tile)
        target = rows[r * width : (r + tile_rows) * width].reshape(width, tile_rows)
        for begin in range(0, width, SOME):
            end = min(begin + SOME, width)
            for i in range(tile_rows):
                row = x[r + i]
                for k in range(begin, end):
                    target[k, i] = widen(row[k])
        r += tile_rows


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_broad(rows, count, panels, bias, sums, out, column, lo, hi):
    """A function of its own, whose caller holds the arrays: numba frees one after its last use, which an address is not."""
    num_pairs, width, panel_bytes = panels.shape[1], bias.shape[0], 4 * PANEL * panels.shape[1]
    num_tiles = (count + TILE - 1) // TILE
    for n in range(lo, hi):
        weights, begin = address(panels) + n * panel_bytes, n * PANEL
        following = weights + panel_bytes if n + 1 < hi else weights
        some = min(PANEL, width - begin)
        added = bias[begin : begin + some]
        r = 0
        for tile in range(num_tiles):
            tile_rows = (count - r + num_tiles - tile - 1) // (num_tiles - tile)
            multiply_tile(tile == 0, tile_rows, address(rows) + 8 * r * num_pairs, weights, num_pairs, address(sums), following)
            for i in range(tile_rows):
                # Views, whose loops become vectors: of an index made of sums the compiler does not know that it is positive.
                source, target = sums[i], out[r + i, column + begin : column + begin + some]
                for j in range(some):
                    target[j] = narrow(source[j] + added[j], target[j])
            r += tile_rows


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_tile(asks, rows, left, weights, num_pairs, sums, coming):
    """asks: for the next panel."""
    if rows <= 6:
        multiply_whole(asks, rows, left, weights, num_pairs, sums, coming)
        return
    for half in range(2):
        right, place = weights + 4 * HALF * half, sums + 4 * HALF * half
        if asks:
            multiply_asking(rows, left, right, num_pairs, place, coming + 4 * HALF * num_pairs * half)
        else:
            multiply_half(rows, left, right, num_pairs, place)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_whole(asks, rows, left, weights, num_pairs, sums, coming):
    """Rows are cut in equal parts: one that is not the first is of six at least."""
    if not asks:
        whole_6(left, weights, num_pairs, sums, coming)
    elif rows == 6:
        asking_6(left, weights, num_pairs, sums, coming)
    elif rows == 5:
        asking_5(left, weights, num_pairs, sums, coming)
    elif rows == 4:
        asking_4(left, weights, num_pairs, sums, coming)
    else:
        asking_3(left, weights, num_pairs, sums, coming)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_half(rows, left, weights, num_pairs, sums):
    if rows == 12:
        half_12(left, weights, num_pairs, sums, weights)
    elif rows == 11:
        half_11(left, weights, num_pairs, sums, weights)
    elif rows == 10:
        half_10(left, weights, num_pairs, sums, weights)
    elif rows == 9:
        half_9(left, weights, num_pairs, sums, weights)
    elif rows == 8:
        half_8(left, weights, num_pairs, sums, weights)
    else:
        half_7(left, weights, num_pairs, sums, weights)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_asking(rows, left, weights, num_pairs, sums, coming):
    if rows == 12:
        half_asking_12(left, weights, num_pairs, sums, coming)
    elif rows == 11:
        half_asking_11(left, weights, num_pairs, sums, coming)
    elif rows == 10:
        half_asking_10(left, weights, num_pairs, sums, coming)
    elif rows == 9:
        half_asking_9(left, weights, num_pairs, sums, coming)
    elif rows == 8:
        half_asking_8(left, weights, num_pairs, sums, coming)
    else:
        half_asking_7(left, weights, num_pairs, sums, coming)

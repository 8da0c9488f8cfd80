# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""CPU kernels for matrix products in bfloat16 that multiply pairs: few rows by plain weights, any rows by panels.

Widths (of a row of weights) are multiples of 32. Others have the kernels of `elementwise`. All arrays are C-contiguous
except `out`. What is added up for one row never depends on the rows beside it. Import it through `loader`.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import narrow
from pdcluster.engine.kernels.gemm_f32_avx512 import multiply_widened
from pdcluster.engine.kernels.intrinsics import (
    address,
    asking_tile_of,
    dots_of,
    has_broad_product,
    has_matrix_tiles,
    has_pair_product,
    tile_of,
)

NATIVE, BROAD = has_pair_product(), has_broad_product()
# Bytes by which weights are asked for before they are read. Fewer for one or two rows, with which the CPU itself looks
# far ahead. Asking too early keeps it from doing so. (A row alone: 25 GB/s at 2048, 30 at 1024. Six rows: 26 and 18.)
AHEAD, NEAR_AHEAD = 2048, 1024
# Of rows that are read again and again: three quarters of a usual first cache.
NEAR_BYTES = 24 << 10

dots_4x1, dots_4x2, dots_4x3, dots_4x4, dots_4x5, dots_4x6 = (
    dots_of(4, rows, native=NATIVE) for rows in (1, 2, 3, 4, 5, 6)
)
half_4x3, half_4x4, half_4x5, half_4x6 = (dots_of(4, rows, native=NATIVE, asked=2) for rows in (3, 4, 5, 6))
dots_2x7, dots_2x8 = (dots_of(2, rows, native=NATIVE) for rows in (7, 8))


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def linear_rows(x, weight, bias, out, lo, hi):
    """out = x · weightᵀ + bias for a few rows: every weight is read from memory once.

    One stream of loads does not fill the memory bus. So the weights are cut in four runs that are read side by side.
    Task i computes the i-th weight of every run. Where the number of weights does not divide, runs overlap. At least
    four weights.

    What is multiplied at once fits the registers: four weights by up to six rows, or two by eight where these stay in
    the first cache. More rows are cut in equal blocks. The first two share the asking for what comes next.
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
                dots_of_block(
                    count, begin, run, begin + ahead + 2 * block * run if block < 2 else begin, rows, row_bytes, at
                )
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


# CPU kernels for matrix products in bfloat16, on a copy of the weights that is laid out for them.
#
# A panel holds the weights of 64 outputs, pair of inputs by pair of inputs. What is needed next lies next, so the CPU
# asks for it in time. One panel stays in the second-level cache while all rows go over it, six at a time. Their sums
# fill the registers until they are done.
#
# While several tiles of rows go over one panel they ask for the next, so memory need not wait for the products. (Eight
# rows of 0.5 B parameters: 18.5 GB/s without, 25 with it.) One or two rows ask for what lies less than a page of memory
# ahead, across the end of a panel and of a whole weight. There the CPU would begin to look ahead anew. (A row alone
# over 30 M parameters: 28 GB/s without, 35 with it, 38 where the next weight lies behind this one. Two rows: 27 and
# 32.) Farther than a page is of no use (27), nor is asking of use to three to six rows. CPUs that multiply floats
# faster than pairs use `gemm_f32_avx512` on the same panels. Import it through `loader`.

# Elsewhere, as where a CPU multiplies whole tiles, oneDNN is the faster one.
has_panels = BROAD or (NATIVE and not has_matrix_tiles())
PANEL = 64
TILE = 6
# Pairs of one cache line.
LINE = 16
# Bytes by which one row and two ask ahead.
AHEAD_1, AHEAD_2 = 2048, 1024

tile_3, tile_4, tile_5, tile_6 = (tile_of(rows, 4, native=NATIVE, adds=False) for rows in (3, 4, 5, 6))
ahead_1, ahead_2 = (asking_tile_of(rows, 4, 4, native=NATIVE) for rows in (1, 2))
# Two of them ask for a whole panel, whose pairs are four cache lines each.
half_3, half_4, half_5, half_6 = (asking_tile_of(rows, 4, 2, native=NATIVE) for rows in (3, 4, 5, 6))
quarter_4, quarter_5, quarter_6 = (asking_tile_of(rows, 4, 1, native=NATIVE) for rows in (4, 5, 6))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def pack_panels(weight, panels, lo, hi):
    """Pairs of inputs of the outputs [lo, hi), uint32, go to panels[output // 64, pair, output % 64]."""
    num_pairs = panels.shape[1]
    for begin in range(lo, hi, PANEL):
        for line in range(0, num_pairs, LINE):
            for n in range(begin, min(begin + PANEL, hi)):
                row, target, lane = weight[n], panels[n // PANEL], n % PANEL
                for p in range(line, min(line + LINE, num_pairs)):
                    target[p, lane] = row[p]


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def multiply_panels(x, panels, bias, out, column, lo, hi):
    """out[:, column + i] = x · weight i + bias i, for the outputs of panels [lo, hi). A row's sums do not depend on the
    rows beside it."""
    if BROAD:
        multiply_widened(x, panels, bias, out, column, lo, hi)
        return
    num_rows, num_pairs, width = x.shape[0], panels.shape[1], bias.shape[0]
    inputs, row_bytes, panel_bytes = address(x), 4 * num_pairs, 4 * PANEL * num_pairs
    sums = np.empty((TILE, PANEL), np.float32)
    num_tiles = (num_rows + TILE - 1) // TILE
    for panel in range(lo, hi):
        weights, begin = address(panels) + panel * panel_bytes, panel * PANEL
        count = min(PANEL, width - begin)
        added = bias[begin : begin + count]
        following = weights + panel_bytes if panel + 1 < hi else weights
        r = 0
        for tile in range(num_tiles):
            rows = (num_rows - r + num_tiles - tile - 1) // (num_tiles - tile)
            rows_at = inputs + r * row_bytes
            if 1 < num_tiles < 4 and tile < 2:
                multiply_half(
                    rows, rows_at, row_bytes, weights, num_pairs, address(sums), following + tile * (panel_bytes // 2)
                )
            elif num_tiles >= 4 and tile < 4:
                multiply_quarter(
                    rows, rows_at, row_bytes, weights, num_pairs, address(sums), following + tile * (panel_bytes // 4)
                )
            else:
                multiply_tile(rows, rows_at, row_bytes, weights, num_pairs, address(sums))
            for i in range(rows):
                # Views, whose loops become vectors: of an index made of sums the compiler does not know that it is
                # positive.
                source, target = sums[i], out[r + i, column + begin : column + begin + count]
                for j in range(count):
                    target[j] = narrow(source[j] + added[j], target[j])
            r += rows


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def multiply_tile(rows, inputs, row_bytes, weights, num_pairs, sums):
    if rows == 6:
        tile_6(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL)
    elif rows == 5:
        tile_5(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL)
    elif rows == 4:
        tile_4(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL)
    elif rows == 3:
        tile_3(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL)
    elif rows == 2:
        ahead_2(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, weights + AHEAD_2)
    else:
        ahead_1(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, weights + AHEAD_1)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def multiply_half(rows, inputs, row_bytes, weights, num_pairs, sums, coming):
    """Rows are cut in equal parts: of two or three each is of three to six."""
    if rows == 6:
        half_6(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)
    elif rows == 5:
        half_5(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)
    elif rows == 4:
        half_4(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)
    else:
        half_3(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def multiply_quarter(rows, inputs, row_bytes, weights, num_pairs, sums, coming):
    """Of four and more parts each is of four to six rows."""
    if rows == 6:
        quarter_6(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)
    elif rows == 5:
        quarter_5(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)
    else:
        quarter_4(inputs, row_bytes, weights, 4 * PANEL, num_pairs, sums, 4 * PANEL, coming)

# mypy: ignore-errors
# As `kernels`: numba compiles these from the types of their arguments; the typed face is `native.PairKernels`.
"""CPU kernels for matrix products in bfloat16, on a copy of the weights that is laid out for them.

A panel holds the weights of 64 outputs, pair of inputs by pair of inputs: what is needed next lies next, which the CPU sees and asks for in time.
One panel stays in the second-level cache while all rows go over it, six at a time, whose sums fill the registers and leave them when they are done.
While several tiles of rows go over one panel they ask for the next, so that memory need not wait for the products (eight rows of 0.5 B parameters:
18.5 GB/s without, 25 with it). One or two rows ask for what lies less than a page of memory ahead, across the end of a panel and of a whole weight,
where the CPU would begin to look ahead anew: a row alone goes over weights of 30 M parameters at 28 GB/s without, 35 with it, and 38 where the next
weight lies behind this one; two rows at 27 and 32. It is of no use to look farther ahead than a page (27), nor to three to six rows.
CPUs that multiply floats faster than pairs go over the same panels by `broad_panels`. Import it through `native`.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import narrow
from pdcluster.engine.kernels.gemm_floats import multiply_widened
from pdcluster.engine.kernels.intrinsics import address, asking_tile_of, has_broad_product, has_matrix_tiles, has_pair_product, tile_of

NATIVE, BROAD = has_pair_product(), has_broad_product()
has_panels = BROAD or (NATIVE and not has_matrix_tiles())
"""Elsewhere, as where a CPU multiplies whole tiles, oneDNN is the faster one."""
PANEL = 64
TILE = 6
LINE = 16
"""Pairs of one cache line."""
AHEAD_1, AHEAD_2 = 2048, 1024
"""Bytes by which one row and two ask ahead."""

tile_3, tile_4, tile_5, tile_6 = (tile_of(rows, 4, native=NATIVE, adds=False) for rows in (3, 4, 5, 6))
ahead_1, ahead_2 = (asking_tile_of(rows, 4, 4, native=NATIVE) for rows in (1, 2))
half_3, half_4, half_5, half_6 = (asking_tile_of(rows, 4, 2, native=NATIVE) for rows in (3, 4, 5, 6))
"""Two of them ask for a whole panel, whose pairs are four cache lines each."""
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
    """out[:, column + i] = x · weight i + bias i, for the outputs of panels [lo, hi). A row's sums do not depend on the rows beside it."""
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
                multiply_half(rows, rows_at, row_bytes, weights, num_pairs, address(sums), following + tile * (panel_bytes // 2))
            elif num_tiles >= 4 and tile < 4:
                multiply_quarter(rows, rows_at, row_bytes, weights, num_pairs, address(sums), following + tile * (panel_bytes // 4))
            else:
                multiply_tile(rows, rows_at, row_bytes, weights, num_pairs, address(sums))
            for i in range(rows):
                # Views, whose loops become vectors: of an index made of sums the compiler does not know that it is positive.
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

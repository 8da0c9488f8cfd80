# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""Products by weights in panels, for CPUs that multiply sixteen floats at once and pairs of bfloat16 no faster. The
panels are those of `gemm_pairs`.

Rows are widened once. The sums of twelve rows by half a panel, or of six by a whole one, fill 24 of the 32 registers.
Of 26 instructions that go to the multipliers two widen weights, of 28 four where six rows have a whole panel. Rows that
are widened together stay in the second-level cache beside a panel. The first tile asks for the next panel, in several
streams. One or two rows go over runs of panels side by side. (Emerald Rapids, 512 rows: 149 GFLOP/s, in pairs 79. Of 17
GB/s of memory, four rows read 12.8 and twelve 12.0. Asking in one stream: 11.8 and 10.2.) Import it through `loader`.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import narrow
from pdcluster.engine.kernels.f32_tiles import broad_runs_of, broad_tile_of
from pdcluster.engine.kernels.gemm_f32_avx2 import widen_rows
from pdcluster.engine.kernels.intrinsics import address

PANEL, HALF = 64, 32
TILE = 12
# Of rows that are widened together.
WIDE_BYTES = 384 << 10
# Panels that one row and two go over side by side.
RUNS_1, RUNS_2 = 4, 3

one_by_4, two_by_3 = broad_runs_of(1, RUNS_1, PANEL), broad_runs_of(2, RUNS_2, PANEL)
whole_6 = broad_tile_of(6, PANEL, PANEL, asks=False)
asking_1, asking_2, asking_3 = (broad_tile_of(rows, PANEL, PANEL, asks=True) for rows in (1, 2, 3))
asking_4, asking_5, asking_6 = (broad_tile_of(rows, PANEL, PANEL, asks=True) for rows in (4, 5, 6))
half_7, half_8, half_9, half_10, half_11, half_12 = (
    broad_tile_of(rows, HALF, PANEL, asks=False) for rows in (7, 8, 9, 10, 11, 12)
)
half_asking_7, half_asking_8, half_asking_9 = (broad_tile_of(rows, HALF, PANEL, asks=True) for rows in (7, 8, 9))
half_asking_10, half_asking_11, half_asking_12 = (broad_tile_of(rows, HALF, PANEL, asks=True) for rows in (10, 11, 12))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_widened(x, panels, bias, out, column, lo, hi):
    """`gemm_pairs.multiply_panels`."""
    if lo >= hi or x.shape[0] == 0:
        return
    num_rows, width = x.shape
    most = max(WIDE_BYTES // (4 * width) // TILE * TILE, TILE)
    parts = (num_rows + most - 1) // most
    rows, sums = np.empty((num_rows + parts - 1) // parts * width, np.float32), np.empty((TILE, PANEL), np.float32)
    begin = 0
    for part in range(parts):
        count = (num_rows - begin + parts - part - 1) // (parts - part)
        widen_rows(x[begin : begin + count], rows, TILE)
        multiply_broad(rows, count, panels, bias, sums, out[begin : begin + count], column, lo, hi)
        begin += count


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_broad(rows, count, panels, bias, sums, out, column, lo, hi):
    """A function of its own, whose caller holds the arrays. numba frees one after its last use. Taking an
    address does not count as one.
    """
    num_pairs, panel_bytes = panels.shape[1], 4 * PANEL * panels.shape[1]
    num_tiles = (count + TILE - 1) // TILE
    first = lo
    if count <= 2:
        runs = RUNS_1 if count == 1 else RUNS_2
        run = (hi - lo) // runs
        for n in range(lo, lo + run):
            multiply_runs(
                count, address(rows), address(panels) + n * panel_bytes, run * panel_bytes, num_pairs, address(sums)
            )
            for j in range(runs):
                put_outputs(sums[j * count : (j + 1) * count], bias, out, column, n + j * run)
        first += runs * run
    for n in range(first, hi):
        weights = address(panels) + n * panel_bytes
        following = weights + panel_bytes if n + 1 < hi else weights
        r = 0
        for tile in range(num_tiles):
            tile_rows = (count - r + num_tiles - tile - 1) // (num_tiles - tile)
            multiply_tile(
                tile == 0, tile_rows, address(rows) + 8 * r * num_pairs, weights, num_pairs, address(sums), following
            )
            put_outputs(sums[:tile_rows], bias, out[r:], column, n)
            r += tile_rows


@numba.njit(error_model="numpy", nogil=True, cache=True)
def put_outputs(sums, bias, out, column, panel):
    """One panel's, of the first rows of out."""
    begin = panel * PANEL
    some = min(PANEL, bias.shape[0] - begin)
    added = bias[begin : begin + some]
    for i in range(sums.shape[0]):
        # Views, whose loops become vectors: of an index made of sums the compiler does not know that it is positive.
        source, target = sums[i], out[i, column + begin : column + begin + some]
        for j in range(some):
            target[j] = narrow(source[j] + added[j], target[j])


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_runs(rows, left, weights, run_bytes, num_pairs, sums):
    if rows == 1:
        one_by_4(left, weights, run_bytes, num_pairs, sums)
    else:
        two_by_3(left, weights, run_bytes, num_pairs, sums)


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
    elif rows == 3:
        asking_3(left, weights, num_pairs, sums, coming)
    elif rows == 2:
        asking_2(left, weights, num_pairs, sums, coming)
    else:
        asking_1(left, weights, num_pairs, sums, coming)


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

# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""Products by weights in panels for CPUs with AVX2 and nothing wider (`f32_tiles`). A panel holds the weights of 16
outputs, and rows are widened to float32 first.

Rows that are widened together stay in the second-level cache, or near it, while all panels go over them. A panel goes
over all of their tiles while it is near. What is read next is asked for as two streams, since one does not fill the
memory bus. Of several tiles the first one asks alone, as the others have enough to do. One or two rows, whose products
are done before the weights are here, go over runs of panels side by side: streams of loads that do not jump. (Four
rows, of 25 GB/s that this memory gives: 12.3 without asking, 16.4 with one stream, 20.4 with two. One row: 23.5.)
Import it through `loader`.
"""

from __future__ import annotations

import numba
import numpy as np

from pdcluster.engine.kernels.elementwise import widen
from pdcluster.engine.kernels.f32_tiles import asking_panel_of, wide_panel_of, wide_panels_of
from pdcluster.engine.kernels.intrinsics import address, has_wide_product

has_panels = has_wide_product()
PANEL = 16
TILE = 6
# Rows that go over several runs of panels side by side.
MOST_STREAMED = 2
# Of rows that are widened together.
WIDE_BYTES = 384 << 10
# Inputs of a tile that are widened before the next ones: what they become stays in the first cache meanwhile.
SOME = 64
LINE, PAIR_BYTES = 16, 4 * PANEL

one_by_4, two_by_2 = wide_panels_of(1, 4), wide_panels_of(2, 2)
tile_3, tile_4, tile_5, tile_6 = (wide_panel_of(rows) for rows in (3, 4, 5, 6))
asking_1, asking_2, asking_3, asking_4, asking_5, asking_6 = (asking_panel_of(rows) for rows in (1, 2, 3, 4, 5, 6))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def pack_panels(weight, panels, lo, hi):
    """Pairs of inputs of the outputs [lo, hi), uint32, go to panels[output // 16, pair, output % 16]."""
    num_pairs = panels.shape[1]
    for begin in range(lo, hi, PANEL):
        for line in range(0, num_pairs, LINE):
            for n in range(begin, min(begin + PANEL, hi)):
                row, target, lane = weight[n], panels[n // PANEL], n % PANEL
                for p in range(line, min(line + LINE, num_pairs)):
                    target[p, lane] = row[p]


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_panels(x, panels, bias, out, column, lo, hi):
    """out[:, column + i] = x · weight i + bias i, for the outputs of panels [lo, hi). A row's sums do not depend on the
    rows beside it."""
    if lo >= hi or x.shape[0] == 0:
        return
    num_rows, width, outputs = x.shape[0], x.shape[1], bias.shape[0]
    most = max(WIDE_BYTES // (4 * width) // TILE * TILE, TILE)
    parts = (num_rows + most - 1) // most
    rows = np.empty((num_rows + parts - 1) // parts * width, np.float32)
    # What a last panel lacks of a whole one has a place of its own: its biases, and its outputs.
    last, spare = np.zeros(PANEL, np.float32), np.empty((TILE, PANEL), np.float32)
    final = (outputs - 1) // PANEL * PANEL
    last[: outputs - final] = bias[final:]
    begin = 0
    for part in range(parts):
        count = (num_rows - begin + parts - part - 1) // (parts - part)
        widen_rows(x[begin : begin + count], rows, TILE)
        multiply_wide(rows, count, panels, bias, last, spare, out[begin : begin + count], column, lo, hi)
        begin += count


@numba.njit(error_model="numpy", nogil=True, cache=True)
def widen_rows(x, rows, most):
    """Tile behind tile, each [inputs, rows of the tile], of equal parts of at most so many rows."""
    count, width = x.shape
    num_tiles = (count + most - 1) // most
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
def multiply_wide(rows, count, panels, bias, last, spare, out, column, lo, hi):
    """A function of its own, whose caller holds the arrays. numba frees one after its last use. Taking an
    address does not count as one.
    """
    num_pairs, out_bytes = panels.shape[1], 4 * out.shape[1]
    panel_bytes, whole = PAIR_BYTES * num_pairs, min(bias.shape[0] // PANEL, hi)
    inputs, target, weights, biases = address(rows), address(out) + 4 * column, address(panels), address(bias)
    panel = lo
    if count <= MOST_STREAMED:
        streams = 4 if count == 1 else 2
        run = max(whole - lo, 0) // streams
        for n in range(lo, lo + run):
            at, added, results = weights + n * panel_bytes, biases + 4 * PANEL * n, target + 4 * PANEL * n
            multiply_several(
                count, inputs, at, run * panel_bytes, num_pairs, added, results, out_bytes, 4 * PANEL * run
            )
        panel += streams * run
    num_tiles = (count + TILE - 1) // TILE
    for n in range(panel, hi):
        at = weights + n * panel_bytes
        coming, apart = coming_panels(n - panel, at, panel_bytes, hi - n, num_tiles)
        r = 0
        for tile in range(num_tiles):
            tile_rows = (count - r + num_tiles - tile - 1) // (num_tiles - tile)
            left, added, results, step = (
                inputs + 8 * r * num_pairs,
                biases + 4 * PANEL * n,
                target + r * out_bytes + 4 * PANEL * n,
                out_bytes,
            )
            if n >= whole:
                added, results, step = address(last), address(spare), 4 * PANEL
            if tile == 0:
                multiply_asking(tile_rows, left, at, num_pairs, added, results, step, coming, apart)
            else:
                multiply_tile(tile_rows, left, at, num_pairs, added, results, step)
            if n >= whole:
                for i in range(tile_rows):
                    for k in range(n * PANEL, bias.shape[0]):
                        out[r + i, column + k] = spare[i, k - n * PANEL]
            r += tile_rows


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def coming_panels(index, at, panel_bytes, left, num_tiles):
    """What is asked for beside the panel at `at`, of which `left` are left. The first of several tiles asks for the
    halves of the next one. A tile alone asks for the first or the second halves of the two panels after it and its
    neighbour.
    """
    if num_tiles > 1:
        return (at + panel_bytes if left > 1 else at), panel_bytes // 2
    second = index % 2
    begin = at + (2 - second) * panel_bytes + second * (panel_bytes // 2)
    return (begin if left > 3 - second else at), panel_bytes


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_several(count, left, weights, run_bytes, num_pairs, bias, out, out_bytes, column_bytes):
    if count == 1:
        one_by_4(left, weights, run_bytes, num_pairs, bias, out, out_bytes, column_bytes)
    else:
        two_by_2(left, weights, run_bytes, num_pairs, bias, out, out_bytes, column_bytes)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_tile(rows, left, weights, num_pairs, bias, out, out_bytes):
    """Rows are cut in equal parts: of several each is of three to six."""
    if rows == 6:
        tile_6(left, weights, num_pairs, bias, out, out_bytes)
    elif rows == 5:
        tile_5(left, weights, num_pairs, bias, out, out_bytes)
    elif rows == 4:
        tile_4(left, weights, num_pairs, bias, out, out_bytes)
    else:
        tile_3(left, weights, num_pairs, bias, out, out_bytes)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_asking(rows, left, weights, num_pairs, bias, out, out_bytes, coming, apart):
    if rows == 6:
        asking_6(left, weights, num_pairs, bias, out, out_bytes, coming, apart)
    elif rows == 5:
        asking_5(left, weights, num_pairs, bias, out, out_bytes, coming, apart)
    elif rows == 4:
        asking_4(left, weights, num_pairs, bias, out, out_bytes, coming, apart)
    elif rows == 3:
        asking_3(left, weights, num_pairs, bias, out, out_bytes, coming, apart)
    elif rows == 2:
        asking_2(left, weights, num_pairs, bias, out, out_bytes, coming, apart)
    else:
        asking_1(left, weights, num_pairs, bias, out, out_bytes, coming, apart)

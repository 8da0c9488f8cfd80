# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.Int8Kernels`.
"""CPU kernels for weights of eight bits. Rows are quantised, too, so products are sums of integers, which are the same
in any order.

A quantised row is one plane of bytes (127 levels, as oneDNN's product takes it) or two (32,639 levels, as exact as
bfloat16: the high bytes, then the low ones). Bytes are shifted by 128, because the instruction takes unsigned ones. The
weights' sums take that back. Widths are padded to a multiple of 64. Import it through `loader`.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from pdcluster.engine.kernels.elementwise import narrow, widen
from pdcluster.engine.kernels.intrinsics import (
    LANES,
    PAIR,
    WORD,
    WORDS,
    Loop,
    address,
    bytes_of,
    constant_words,
    declared,
    has_wide_product,
    lane_sums,
    load,
    prefetch,
    store,
)

__all__ = ["NATIVE", "dequantize", "finish", "multiply", "quantize"]

NATIVE, WIDE = "+avx512vnni" in cpu_target.target_context.codegen().magic_tuple()[2].split(","), has_wide_product()
AHEAD = 1024
SHIFT = 128
LARGEST, SMALLEST = np.float32(3.39e38), np.float32(1e-34)
ONE_PLANE, TWO_PLANES = np.float32(127.0), np.float32(32639.0)


def byte_product(builder, total, a, b, *, native):
    """total + a · b per lane: WORDS of four bytes each, of a unsigned, of b signed."""
    if native:
        return builder.call(declared(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [WORDS] * 3), [total, a, b])
    for place in range(4):
        unsigned = builder.and_(builder.lshr(a, constant_words(8 * place)), constant_words(255))
        signed = builder.ashr(builder.shl(b, constant_words(24 - 8 * place)), constant_words(24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


SHORTS, HALF_SHORTS = ir.VectorType(ir.IntType(16), PAIR), ir.VectorType(ir.IntType(16), LANES)
HALF_WORDS = ir.VectorType(WORD, LANES // 2)
HALVES = [ir.Constant(WORDS, list(range(begin, begin + LANES))) for begin in (0, LANES)]


def split_bytes(builder, words, *, signed):
    """The even bytes of words and the odd ones, as numbers of 16 bits."""
    shorts, eight = builder.bitcast(words, SHORTS), ir.Constant(SHORTS, [8] * PAIR)
    if signed:
        return builder.ashr(builder.shl(shorts, eight), eight), builder.ashr(shorts, eight)
    return builder.and_(shorts, ir.Constant(SHORTS, [255] * PAIR)), builder.lshr(shorts, eight)


def short_product(builder, total, a, b):
    """total + a · b per lane, of what `split_bytes` gives; AVX2 multiplies numbers of 16 bits and adds each two."""
    function = declared(builder, "llvm.x86.avx2.pmadd.wd", HALF_WORDS, [HALF_SHORTS] * 2)
    for left, right in zip(a, b, strict=True):
        parts = [
            builder.call(function, [builder.shuffle_vector(each, each, half) for each in (left, right)])
            for half in HALVES
        ]
        total = builder.add(total, builder.shuffle_vector(*parts, HALVES[0]))
    return total


def wide_dots_of(num_rows):
    """`dots_of` for CPUs with AVX2 and nothing wider. Two rows by two weights, or one by four, at a time, so that sums
    fit the registers.
    """

    @intrinsic
    def dots(typing_context, weights, weight_step, rows, row_bytes, out):
        def build(context, builder, signature, args):
            weights, weight_step, rows, row_bytes, out = args
            weight_at = [builder.add(weights, builder.mul(weight_step, bytes_of(j))) for j in range(4)]
            row_at = [builder.add(rows, builder.mul(row_bytes, bytes_of(i))) for i in range(num_rows)]
            sums = [None] * (4 * num_rows)
            for first in range(0, num_rows, 2):
                some = range(first, min(first + 2, num_rows))
                for begin, end in ((0, 4),) if len(some) == 1 else ((0, 2), (2, 4)):
                    with Loop(builder, row_bytes, 4 * LANES, [constant_words(0)] * (len(some) * (end - begin))) as loop:
                        x = [
                            split_bytes(builder, load(builder, row_at[i], loop.index, WORDS), signed=False)
                            for i in some
                        ]
                        totals = list(loop.values)
                        for j, at in enumerate(weight_at[begin:end]):
                            if first == 0:
                                prefetch(builder, at, builder.add(loop.index, bytes_of(AHEAD)))
                            w = split_bytes(builder, load(builder, at, loop.index, WORDS), signed=True)
                            for i in range(len(some)):
                                place = i * (end - begin) + j
                                totals[place] = short_product(builder, totals[place], x[i], w)
                        loop.carry(totals)
                    for i in range(len(some)):
                        for j in range(end - begin):
                            sums[4 * (first + i) + begin + j] = loop.values[i * (end - begin) + j]
            lanes = ir.Constant(ir.VectorType(WORD, 4 * num_rows), list(range(4 * num_rows)))
            total = lane_sums(builder, sums)
            store(builder, builder.shuffle_vector(total, total, lanes), out, bytes_of(0))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), build

    return dots


def dots_of(num_rows, *, native):
    """A block for dots(weights, weight_step, rows, row_bytes, out): out[i, j] = row i · weight j of four weights, in
    int32; row_bytes of each."""

    @intrinsic
    def dots(typing_context, weights, weight_step, rows, row_bytes, out):
        def build(context, builder, signature, args):
            weights, weight_step, rows, row_bytes, out = args
            weight_at = [builder.add(weights, builder.mul(weight_step, bytes_of(j))) for j in range(4)]
            row_at = [builder.add(rows, builder.mul(row_bytes, bytes_of(i))) for i in range(num_rows)]
            with Loop(builder, row_bytes, 4 * LANES, [constant_words(0)] * (4 * num_rows)) as loop:
                for at in weight_at:
                    prefetch(builder, at, builder.add(loop.index, bytes_of(AHEAD)))
                w = [load(builder, at, loop.index, WORDS) for at in weight_at]
                totals = []
                for i, at in enumerate(row_at):
                    x = load(builder, at, loop.index, WORDS)
                    totals += [byte_product(builder, loop.values[4 * i + j], x, w[j], native=native) for j in range(4)]
                loop.carry(totals)
            sums = lane_sums(builder, loop.values)
            lanes = ir.Constant(ir.VectorType(WORD, 4 * num_rows), list(range(4 * num_rows)))
            store(builder, builder.shuffle_vector(sums, sums, lanes), out, bytes_of(0))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), build

    return dots


dots_1, dots_2, dots_3, dots_4 = (wide_dots_of(rows) if WIDE else dots_of(rows, native=NATIVE) for rows in (1, 2, 3, 4))


@numba.njit(error_model="numpy", nogil=True, cache=True)
def quantize(x, planes, out, scales, lo, hi):
    """Rows lo … hi of bfloat16 x as bytes of out, `planes` rows each; x ≈ scale × (out − 128). A row with something
    that is no number has a scale that is none."""
    width, levels = x.shape[1], ONE_PLANE if planes == 1 else TWO_PLANES
    for n in range(lo, hi):
        row, largest = x[n], np.uint16(0)
        for i in range(width):
            largest = max(largest, np.uint16(row[i] & np.uint16(0x7FFF)))
        most = widen(largest)
        if not most < LARGEST:
            scales[n] = np.nan
            out[planes * n : planes * (n + 1)] = SHIFT
            continue
        scales[n] = most / levels
        factor = levels / most if most > SMALLEST else np.float32(0.0)
        if planes == 1:
            bytes_ = out[n]
            for i in range(width):
                bytes_[i] = np.uint8(np.int32(np.rint(widen(row[i]) * factor)) + SHIFT)
            bytes_[width:] = SHIFT
        else:
            high, low = out[2 * n], out[2 * n + 1]
            for i in range(width):
                whole = np.int32(np.rint(widen(row[i]) * factor)) + np.int32(SHIFT)
                high[i] = np.uint8((whole >> 8) + SHIFT)
                low[i] = np.uint8(whole & 255)
            high[width:] = SHIFT
            low[width:] = SHIFT


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply(x, planes, weight, scales, sums, bias, out, lo, hi):
    """out = x · (scales × weight)ᵀ + bias for a few rows. Task i computes the i-th weight of four runs, as in
    `gemm_pairs.linear_rows`."""
    if lo >= hi:
        return
    num_rows = x.shape[0]
    quantised, row_scales = np.empty((num_rows * planes, weight.shape[1]), np.uint8), np.empty(num_rows, np.float32)
    quantize(x, planes, quantised, row_scales, 0, num_rows)
    multiply_bytes(quantised, row_scales, planes, weight, scales, sums, bias, out, lo, hi)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def multiply_bytes(x, row_scales, planes, weight, scales, sums, bias, out, lo, hi):
    """A function of its own, whose caller holds x. numba frees an array after its last use. Taking an
    address does not count as one.
    """
    total, row_bytes, step = x.shape[0], weight.shape[1], weight.shape[0] // 4
    inputs, first = address(x), address(weight)
    found = np.empty(16, np.int32)
    at = address(found)
    for n in range(lo, hi):
        for r in range(0, total, 4):
            count = min(4, total - r)
            dots(count, first + n * row_bytes, step * row_bytes, inputs + r * row_bytes, row_bytes, at)
            for i in range(0, count, planes):
                row = (r + i) // planes
                for j in range(4):
                    place = n + j * step
                    shifted = SHIFT * sums[place]
                    value = np.float32(found[4 * i + j] - shifted)
                    if planes == 2:
                        value = value * np.float32(256.0) + np.float32(found[4 * i + 4 + j] - shifted)
                    out[row, place] = narrow(value * (row_scales[row] * scales[place]) + bias[place], out[row, place])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def dots(count, weights, weight_step, rows, row_bytes, out):
    if count == 1:
        dots_1(weights, weight_step, rows, row_bytes, out)
    elif count == 2:
        dots_2(weights, weight_step, rows, row_bytes, out)
    elif count == 3:
        dots_3(weights, weight_step, rows, row_bytes, out)
    else:
        dots_4(weights, weight_step, rows, row_bytes, out)


@numba.njit(error_model="numpy", nogil=True, cache=True)
def finish(sums, row_scales, scales, bias, out, lo, hi):
    """Rows lo … hi of sums, float32 of whole numbers, as the products that they stand for."""
    for n in range(lo, hi):
        row, target, factor = sums[n], out[n], row_scales[n]
        for i in range(row.shape[0]):
            target[i] = narrow(row[i] * (factor * scales[i]) + bias[i], target[i])


@numba.njit(error_model="numpy", nogil=True, cache=True)
def dequantize(weight, scales, out, lo, hi):
    """Weights lo … hi in bfloat16, without what pads them."""
    for n in range(lo, hi):
        row, target, scale = weight[n], out[n], scales[n]
        for i in range(target.shape[0]):
            target[i] = narrow(np.float32(row[i]) * scale, target[i])

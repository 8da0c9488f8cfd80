# mypy: ignore-errors
# As `vectors`: numba gives intrinsics their types at compile time.
"""Building blocks of the attention of rows that decode on CPUs with AVX2: products of one or two float32 queries by four keys or values of bfloat16,
and shares of scores.

Vectors have eight floats, those of one register, since a query's dimensions and sums stand in the order in which words are widened: of each 16
dimensions the eight even ones before the odd ones.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdcluster.engine.kernels.elementwise import LOG2_E, VERY_NEGATIVE
from pdcluster.engine.kernels.intrinsics import (
    LINE_BYTES,
    WORD,
    Loop,
    bytes_of,
    constant_words,
    declared,
    floats_of,
    fused,
    greater,
    high_halves,
    load,
    low_halves,
    prefetch,
    spread,
    store,
    zeros,
)

HALF = 8
FLOATS, WORDS = floats_of(HALF), ir.VectorType(WORD, HALF)
VECTOR_BYTES = 4 * HALF
TOKENS = 4
"""Keys or values of one tile."""


def ask(builder, turn, coming, apart):
    """In each turn a line from `coming` on, and one of what lies `apart`: a turn reads 32 bytes of each of four tokens."""
    line = builder.mul(turn, bytes_of(LINE_BYTES))
    prefetch(builder, coming, line)
    prefetch(builder, coming, builder.add(line, apart))


def score_tile_of(num_rows):
    """A block for tile(keys, key_step, rows, row_step, turns, out, out_step, coming, apart): out[i, j] = row i · key j of four keys, whose dimensions
    are 16 times `turns`; rows and out are float32."""

    @intrinsic
    def tile(typing_context, keys, key_step, rows, row_step, turns, out, out_step, coming, apart):
        def build(context, builder, signature, args):
            keys, key_step, rows, row_step, turns, out, out_step, coming, apart = args
            key_at = [builder.add(keys, builder.mul(key_step, bytes_of(j))) for j in range(TOKENS)]
            row_at = [builder.add(rows, builder.mul(row_step, bytes_of(i))) for i in range(num_rows)]
            with Loop(builder, turns, 1, [zeros(HALF)] * (num_rows * TOKENS)) as loop:
                ask(builder, loop.index, coming, apart)
                offset, place = (builder.mul(loop.index, bytes_of(size)) for size in (VECTOR_BYTES, 2 * VECTOR_BYTES))
                words, totals = [load(builder, at, offset, WORDS) for at in key_at], list(loop.values)
                for half, halves in enumerate((low_halves, high_halves)):
                    queries = [load(builder, at, builder.add(place, bytes_of(half * VECTOR_BYTES)), FLOATS) for at in row_at]
                    for j in range(TOKENS):
                        key = halves(builder, words[j])
                        for i, query in enumerate(queries):
                            totals[i * TOKENS + j] = fused(builder, query, key, totals[i * TOKENS + j])
                loop.carry(totals)
            for i in range(num_rows):
                store(builder, four_sums(builder, loop.values[i * TOKENS : (i + 1) * TOKENS]), out, builder.mul(out_step, bytes_of(i)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    return tile


def four_sums(builder, totals):
    """The sums over the lanes of four vectors: within the halves of a register first, where lanes change places at no cost."""

    def both(a, b, low, high):
        return builder.fadd(*(builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes)) for lanes in (low, high)))

    first, second = (both(a, b, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]) for a, b in (totals[:2], totals[2:]))
    sums = both(first, second, [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15])
    return both(sums, sums, [0, 1, 2, 3], [4, 5, 6, 7])


@intrinsic
def share_scores(typing_context, scores, num_vectors, scale, top, total):
    """share_scores(scores, num_vectors, scale, top, total): scores, eight times num_vectors, become shares under the new maximum. Returned are that
    maximum, what is to be multiplied that was summed under the old one, and the new total of all shares."""

    def build(context, builder, signature, args):
        scores, num_vectors, scale, top, total = args
        with Loop(builder, num_vectors, 1, [spread(builder, constant_float(VERY_NEGATIVE), HALF)]) as loop:
            found = load(builder, scores, builder.mul(loop.index, bytes_of(VECTOR_BYTES)), FLOATS)
            loop.carry([greater(builder, loop.values[0], found)])
        best = greater(builder, builder.fmul(over_lanes(builder, loop.values[0], greater), scale), top)
        factor, subtracted = spread(builder, scale, HALF), spread(builder, builder.fneg(best), HALF)
        with Loop(builder, num_vectors, 1, [zeros(HALF)]) as loop:
            offset = builder.mul(loop.index, bytes_of(VECTOR_BYTES))
            shares = exponentials(builder, fused(builder, load(builder, scores, offset, FLOATS), factor, subtracted))
            store(builder, shares, scores, offset)
            loop.carry([builder.fadd(loop.values[0], shares)])
        correction = exponentials(builder, spread(builder, builder.fsub(top, best), HALF))
        correction = builder.extract_element(correction, ir.Constant(WORD, 0))
        added = over_lanes(builder, loop.values[0], lambda builder, a, b: builder.fadd(a, b))
        total = builder.fadd(builder.fmul(total, correction), added)
        return context.make_tuple(builder, signature.return_type, [best, correction, total])

    return types.UniTuple(types.float32, 3)(types.int64, types.int64, types.float32, types.float32, types.float32), build


def constant_float(value):
    return ir.Constant(ir.FloatType(), float(value))


def over_lanes(builder, vector, both):
    """One float of all lanes: both(builder, a, b) of halves, of their halves and so on."""
    width = HALF
    while width > 1:
        width //= 2
        lanes = [(lane + width) % (2 * width) for lane in range(2 * width)] + [0] * (HALF - 2 * width)
        vector = both(builder, vector, builder.shuffle_vector(vector, vector, ir.Constant(WORDS, lanes)))
    return builder.extract_element(vector, ir.Constant(WORD, 0))


def exponentials(builder, values):
    """`kernels.exponential` of each lane."""

    def all_lanes(value):
        return spread(builder, constant_float(value), HALF)

    scaled = builder.fmul(values, all_lanes(LOG2_E))
    scaled = greater(builder, scaled, all_lanes(-126.0))
    scaled = builder.select(builder.fcmp_ordered("<", scaled, all_lanes(126.0)), scaled, all_lanes(126.0))
    whole = builder.call(declared(builder, "llvm.floor.v8f32", FLOATS, [FLOATS]), [builder.fadd(scaled, all_lanes(0.5))])
    rest = builder.fmul(builder.fsub(scaled, whole), all_lanes(np.float32(math.log(2))))
    series = all_lanes(np.float32(1 / 5040))
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        series = fused(builder, series, rest, all_lanes(np.float32(1 / divisor)))
    biased = builder.add(builder.fptosi(whole, WORDS), constant_words(127, HALF))
    return builder.fmul(series, builder.bitcast(builder.shl(biased, constant_words(23, HALF)), FLOATS))


def weigh_tile_of(num_rows, num_tokens):
    """A block for tile(values, value_step, shares, share_step, turns, sums, sum_step, coming, apart): sums of row i += shares[i, t] * values[t] of
    num_tokens values, whose dimensions are 16 times `turns`; shares and sums are float32."""

    @intrinsic
    def tile(typing_context, values, value_step, shares, share_step, turns, sums, sum_step, coming, apart):
        def build(context, builder, signature, args):
            values, value_step, shares, share_step, turns, sums, sum_step, coming, apart = args
            value_at = [builder.add(values, builder.mul(value_step, bytes_of(t))) for t in range(num_tokens)]
            sum_at = [builder.add(sums, builder.mul(sum_step, bytes_of(i))) for i in range(num_rows)]
            share_at = [builder.add(shares, builder.mul(share_step, bytes_of(i))) for i in range(num_rows)]
            given = [[spread(builder, load(builder, at, bytes_of(4 * t), ir.FloatType()), HALF) for t in range(num_tokens)] for at in share_at]
            with Loop(builder, turns, 1, []) as loop:
                ask(builder, loop.index, coming, apart)
                offset, place = (builder.mul(loop.index, bytes_of(size)) for size in (VECTOR_BYTES, 2 * VECTOR_BYTES))
                words = [load(builder, at, offset, WORDS) for at in value_at]
                for half, halves in enumerate((low_halves, high_halves)):
                    part = builder.add(place, bytes_of(half * VECTOR_BYTES))
                    totals = [load(builder, at, part, FLOATS) for at in sum_at]
                    for t in range(num_tokens):
                        value = halves(builder, words[t])
                        totals = [fused(builder, given[i][t], value, total) for i, total in enumerate(totals)]
                    for at, total in zip(sum_at, totals, strict=True):
                        store(builder, total, at, part)
                loop.carry([])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    return tile

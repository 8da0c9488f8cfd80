# mypy: ignore-errors
# As `vectors`: numba gives intrinsics their types at compile time.
"""Building blocks of the attention of rows that decode on CPUs with AVX2: products of one or two float32 queries by four keys or values of bfloat16.

Vectors have eight floats, those of one register, since a query's dimensions and sums stand in the order in which words are widened: of each 16
dimensions the eight even ones before the odd ones.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdcluster.engine.vectors import LINE_BYTES, WORD, Loop, bytes_of, floats_of, fused, high_halves, load, low_halves, prefetch, spread, store, zeros

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

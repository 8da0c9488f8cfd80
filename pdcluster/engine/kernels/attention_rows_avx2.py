# mypy: ignore-errors
# numba compiles these from the types of their arguments; the typed face is `loader.PairKernels`.
"""The `attend_rows` of `attention_rows` for CPUs with AVX2 and nothing wider: attention of rows that decode, over their
pages.

Queries are widened once, and queries of one kv head share each read of a page. Of each page and head, keys are scored,
scores become shares and values are weighed while both lie near. Meanwhile the next head's keys and values are asked
for, side by side. One stream of loads does not fill the memory bus. (Eight rows behind 2,048 tokens: 18.0 GB/s. Without
asking 12.9. Asking for one stream 11.3. With all keys of a page before its values 15.2.) Import it through `loader`.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdcluster.engine.kernels.elementwise import LOG2_E, VERY_NEGATIVE, narrow, widen
from pdcluster.engine.kernels.intrinsics import (
    LINE_BYTES,
    WORD,
    Loop,
    address,
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

# Building blocks of the attention of rows that decode on CPUs with AVX2. Products of one or two float32 queries by four
# keys or values of bfloat16, and shares of scores.
#
# Vectors have eight floats, those of one register. A query's dimensions and sums stand in the order in which words are
# widened. Of each 16 dimensions the eight even ones stand before the odd ones.

HALF = 8
FLOATS, WORDS = floats_of(HALF), ir.VectorType(WORD, HALF)
VECTOR_BYTES = 4 * HALF
# Keys or values of one tile.
TOKENS = 4


def ask(builder, turn, coming, apart):
    """In each turn a line from `coming` on, and one of what lies `apart`. A turn reads 32 bytes of each of four
    tokens.
    """
    line = builder.mul(turn, bytes_of(LINE_BYTES))
    prefetch(builder, coming, line)
    prefetch(builder, coming, builder.add(line, apart))


def score_tile_of(num_rows):
    """A block for tile(keys, key_step, rows, row_step, turns, out, out_step, coming, apart): out[i, j] = row i · key j
    of four keys, whose dimensions are 16 times `turns`; rows and out are float32."""

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
                    queries = [
                        load(builder, at, builder.add(place, bytes_of(half * VECTOR_BYTES)), FLOATS) for at in row_at
                    ]
                    for j in range(TOKENS):
                        key = halves(builder, words[j])
                        for i, query in enumerate(queries):
                            totals[i * TOKENS + j] = fused(builder, query, key, totals[i * TOKENS + j])
                loop.carry(totals)
            for i in range(num_rows):
                store(
                    builder,
                    four_sums(builder, loop.values[i * TOKENS : (i + 1) * TOKENS]),
                    out,
                    builder.mul(out_step, bytes_of(i)),
                )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    return tile


def four_sums(builder, totals):
    """The sums over the lanes of four vectors. First within the halves of a register, where lanes change places at no
    cost.
    """

    def both(a, b, low, high):
        return builder.fadd(
            *(
                builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes))
                for lanes in (low, high)
            )
        )

    first, second = (
        both(a, b, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]) for a, b in (totals[:2], totals[2:])
    )
    sums = both(first, second, [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15])
    return both(sums, sums, [0, 1, 2, 3], [4, 5, 6, 7])


@intrinsic
def share_scores(typing_context, scores, num_vectors, scale, top, total):
    """share_scores(scores, num_vectors, scale, top, total): scores, eight times num_vectors, become shares under the
    new maximum. Returned are that maximum, what is to be multiplied that was summed under the old one, and the new
    total of all shares."""

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

    return types.UniTuple(types.float32, 3)(
        types.int64, types.int64, types.float32, types.float32, types.float32
    ), build


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
    """`elementwise.exponential` of each lane."""

    def all_lanes(value):
        return spread(builder, constant_float(value), HALF)

    scaled = builder.fmul(values, all_lanes(LOG2_E))
    scaled = greater(builder, scaled, all_lanes(-126.0))
    scaled = builder.select(builder.fcmp_ordered("<", scaled, all_lanes(126.0)), scaled, all_lanes(126.0))
    whole = builder.call(
        declared(builder, "llvm.floor.v8f32", FLOATS, [FLOATS]), [builder.fadd(scaled, all_lanes(0.5))]
    )
    rest = builder.fmul(builder.fsub(scaled, whole), all_lanes(np.float32(math.log(2))))
    series = all_lanes(np.float32(1 / 5040))
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        series = fused(builder, series, rest, all_lanes(np.float32(1 / divisor)))
    biased = builder.add(builder.fptosi(whole, WORDS), constant_words(127, HALF))
    return builder.fmul(series, builder.bitcast(builder.shl(biased, constant_words(23, HALF)), FLOATS))


def weigh_tile_of(num_rows, num_tokens):
    """A block for tile(values, value_step, shares, share_step, turns, sums, sum_step, coming, apart): sums of row i +=
    shares[i, t] * values[t] of num_tokens values, whose dimensions are 16 times `turns`; shares and sums are
    float32."""

    @intrinsic
    def tile(typing_context, values, value_step, shares, share_step, turns, sums, sum_step, coming, apart):
        def build(context, builder, signature, args):
            values, value_step, shares, share_step, turns, sums, sum_step, coming, apart = args
            value_at = [builder.add(values, builder.mul(value_step, bytes_of(t))) for t in range(num_tokens)]
            sum_at = [builder.add(sums, builder.mul(sum_step, bytes_of(i))) for i in range(num_rows)]
            share_at = [builder.add(shares, builder.mul(share_step, bytes_of(i))) for i in range(num_rows)]
            given = [
                [spread(builder, load(builder, at, bytes_of(4 * t), ir.FloatType()), HALF) for t in range(num_tokens)]
                for at in share_at
            ]
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


score_1, score_2 = score_tile_of(1), score_tile_of(2)
weigh_1x4, weigh_2x4 = weigh_tile_of(1, TOKENS), weigh_tile_of(2, TOKENS)
weigh_1x1, weigh_2x1 = weigh_tile_of(1, 1), weigh_tile_of(2, 1)


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True)
def attend_rows(q, pool, layer, pages, first_page, lengths, scale, out, lo, hi):
    """Task = row * kv heads + kv head. Pages have a multiple of eight tokens, heads a multiple of 16 dimensions."""
    num_kv_heads, page_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    head_bytes = 2 * page_tokens * head_dim
    side_bytes = num_kv_heads * head_bytes
    page_bytes = pool.shape[1] * 2 * side_bytes
    begin = address(pool) + layer * 2 * side_bytes
    queries, sums = (
        np.empty((num_kv_heads * group, head_dim), np.float32),
        np.empty((num_kv_heads * group, head_dim), np.float32),
    )
    scores = np.empty((num_kv_heads * group, page_tokens), np.float32)
    top, total = np.empty(num_kv_heads * group, np.float32), np.empty(num_kv_heads * group, np.float32)
    for row in range(lo // num_kv_heads, (hi + num_kv_heads - 1) // num_kv_heads):
        h0, h1 = max(lo - row * num_kv_heads, 0), min(hi - row * num_kv_heads, num_kv_heads)
        for r in range(h0 * group, h1 * group):
            take_query(q[row, r], queries[r])
            top[r], total[r] = VERY_NEGATIVE, np.float32(0)
        sums[:] = np.float32(0)
        num_pages = (lengths[row] + page_tokens - 1) // page_tokens
        for p in range(num_pages):
            page = begin + pages[first_page[row] + p] * page_bytes
            following = begin + pages[first_page[row] + min(p + 1, num_pages - 1)] * page_bytes
            count = min(page_tokens, lengths[row] - p * page_tokens)
            for h in range(h0, h1):
                keys = page + h * head_bytes
                coming = keys + head_bytes if h + 1 < h1 else following + h0 * head_bytes
                score_page(queries, h * group, group, keys, coming, side_bytes, count, scores)
                share_page(scores, h * group, h * group + group, count, scale, top, total, sums)
                weigh_page(
                    scores, h * group, group, keys + side_bytes, coming + head_bytes // 2, side_bytes, count, sums
                )
        for r in range(h0 * group, h1 * group):
            put_sums(sums[r], np.float32(1.0) / total[r], out[row, r])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def take_query(query, target):
    """Of each 16 dimensions the eight even ones before the odd ones."""
    for b in range(0, query.shape[0], 2 * HALF):
        for i in range(HALF):
            target[b + i] = widen(query[b + 2 * i])
            target[b + HALF + i] = widen(query[b + 2 * i + 1])


@numba.njit(error_model="numpy", fastmath=True, nogil=True, cache=True, inline="always")
def put_sums(sums, factor, target):
    for b in range(0, sums.shape[0], 2 * HALF):
        for i in range(HALF):
            target[b + 2 * i] = narrow(sums[b + i] * factor, target[b])
            target[b + 2 * i + 1] = narrow(sums[b + HALF + i] * factor, target[b])


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def score_page(queries, first, group, keys, coming, apart, count, scores):
    """scores[g, t] = query g · key t, for g from `first` on; up to three keys behind the last one are read, too."""
    head_dim, step = queries.shape[1], 4 * scores.shape[1]
    token_bytes, row_bytes, turns = 2 * head_dim, 4 * head_dim, head_dim // (2 * HALF)
    for t in range(0, count, TOKENS):
        at = keys + t * token_bytes
        for g in range(0, group, 2):
            rows, out = address(queries) + (first + g) * row_bytes, address(scores) + (first + g) * step + 4 * t
            asked = coming + t * head_dim if g == 0 else at
            if g + 1 < group:
                score_2(at, token_bytes, rows, row_bytes, turns, out, step, asked, apart)
            else:
                score_1(at, token_bytes, rows, row_bytes, turns, out, step, asked, apart)


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def share_page(scores, first, last, count, scale, top, total, sums):
    """Turn scores of rows [first, last) into shares under the new maxima, and correct what was summed under the old
    ones."""
    vectors = (count + HALF - 1) // HALF
    for r in range(first, last):
        for t in range(count, vectors * HALF):
            scores[r, t] = VERY_NEGATIVE
        best, correction, added = share_scores(
            address(scores) + 4 * r * scores.shape[1], vectors, scale, top[r], total[r]
        )
        if best > top[r]:
            for d in range(sums.shape[1]):
                sums[r, d] *= correction
        top[r], total[r] = best, added


@numba.njit(error_model="numpy", nogil=True, cache=True, inline="always")
def weigh_page(shares, first, group, values, coming, apart, count, sums):
    """sums[g] += shares[g] · values, for g from `first` on. Values behind the last one may be no numbers, and are not
    read."""
    head_dim, step = sums.shape[1], 4 * shares.shape[1]
    token_bytes, row_bytes, turns = 2 * head_dim, 4 * head_dim, head_dim // (2 * HALF)
    whole = count - count % TOKENS
    for t in range(0, whole, TOKENS):
        at = values + t * token_bytes
        for g in range(0, group, 2):
            given, target = address(shares) + (first + g) * step + 4 * t, address(sums) + (first + g) * row_bytes
            asked = coming + t * head_dim if g == 0 else at
            if g + 1 < group:
                weigh_2x4(at, token_bytes, given, step, turns, target, row_bytes, asked, apart)
            else:
                weigh_1x4(at, token_bytes, given, step, turns, target, row_bytes, asked, apart)
    for t in range(whole, count):
        at = values + t * token_bytes
        for g in range(0, group, 2):
            given, target = address(shares) + (first + g) * step + 4 * t, address(sums) + (first + g) * row_bytes
            if g + 1 < group:
                weigh_2x1(at, token_bytes, given, step, turns, target, row_bytes, at, 0)
            else:
                weigh_1x1(at, token_bytes, given, step, turns, target, row_bytes, at, 0)

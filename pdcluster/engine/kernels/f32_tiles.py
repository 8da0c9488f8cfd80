# mypy: ignore-errors
# numba gives intrinsics their types at compile time.
"""Building blocks of CPU kernels that widen: products of float32 rows by weights that stay pairs of bfloat16. For CPUs
that multiply floats as fast.

AVX2 has sixteen registers of eight floats. They hold the sums of six rows by sixteen outputs, two halves of a word's
vector and one number of a row. Broad blocks fill 32 registers of sixteen floats. Callers widen rows once, since each
number is read for every sixteen outputs. Words are widened here, by a shift and a mask for as many rows as are
multiplied. A sum is one chain in the order of inputs in every block. So it does not depend on the number of rows or
vectors.

With AVX2 a core whose other thread is busy takes three instructions a cycle, of which two should multiply. So loops are
unrolled, and only those blocks ask for later data that have to. (Six rows behind such a neighbour: 73 GFLOP/s when all
asked, 79 when one of sixteen does, 83 unrolled.)
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdcluster.engine.kernels.intrinsics import (
    FLOATS,
    LANES,
    LINE_BYTES,
    WORDS,
    Loop,
    bytes_of,
    forget,
    fused,
    high_halves,
    load,
    low_halves,
    prefetch,
    spread,
    store,
    zeros,
)

# Pairs of one turn of a loop over one panel; even, as asking alternates.
TURNS = 4
# Bytes by which weights of several panels are asked for before they are read; a pair of a panel is one line of them, or
# four of a broad one.
AHEAD, BROAD_AHEAD = 1024, 2048


def wide_panels_of(num_rows, num_panels):
    """A block for tile(left, right, panel_step, num_pairs, bias, out, out_step, column_step): out[i, l] behind j column
    steps = left[:, i] · right[j][:, l] + bias[l], in float32.

    left is float32 [inputs, num_rows], right num_panels panels that are panel_step bytes apart, of num_pairs times 16
    words of two bfloat16; bias is float32 and has the column steps of out. Of each panel what is read AHEAD bytes later
    is asked for.
    """

    @intrinsic
    def tile(typing_context, left, right, panel_step, num_pairs, bias, out, out_step, column_step):
        def build(context, builder, signature, args):
            left, right, panel_step, num_pairs, bias, out, out_step, column_step = args
            panels = [builder.add(right, builder.mul(panel_step, bytes_of(j))) for j in range(num_panels)]

            def ask(pair, _):
                for panel in panels:
                    prefetch(builder, panel, builder.add(builder.mul(pair, bytes_of(LINE_BYTES)), bytes_of(AHEAD)))

            begin = [zeros()] * (num_rows * num_panels)
            totals = add_products(
                builder, left, (4 * num_rows, 4), panels, bytes_of(LINE_BYTES), num_pairs, begin, ask, turns=1
            )
            for j in range(num_panels):
                column = builder.mul(column_step, bytes_of(j))
                put_outputs(
                    builder, totals[j::num_panels], builder.add(bias, column), builder.add(out, column), out_step
                )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


def wide_panel_of(num_rows):
    """A block for tile(left, right, num_pairs, bias, out, out_step): `wide_panels_of` one panel, which asks for
    nothing."""

    @intrinsic
    def tile(typing_context, left, right, num_pairs, bias, out, out_step):
        def build(context, builder, signature, args):
            left, right, num_pairs, bias, out, out_step = args
            totals = add_products(
                builder, left, (4 * num_rows, 4), [right], bytes_of(LINE_BYTES), num_pairs, [zeros()] * num_rows
            )
            put_outputs(builder, totals, bias, out, out_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return tile


def asking_panel_of(num_rows):
    """A block for tile(left, right, num_pairs, bias, out, out_step, coming, apart): `wide_panel_of` that asks for
    others: for each two pairs for a line from `coming` on and one of what lies `apart`, as far as whole turns go."""

    @intrinsic
    def tile(typing_context, left, right, num_pairs, bias, out, out_step, coming, apart):
        def build(context, builder, signature, args):
            left, right, num_pairs, bias, out, out_step, coming, apart = args
            sides = coming, builder.add(coming, apart)

            def ask(first, turn):
                line = builder.add(builder.mul(first, bytes_of(LINE_BYTES // 2)), bytes_of(turn // 2 * LINE_BYTES))
                prefetch(builder, sides[turn % 2], line)

            totals = add_products(
                builder, left, (4 * num_rows, 4), [right], bytes_of(LINE_BYTES), num_pairs, [zeros()] * num_rows, ask
            )
            put_outputs(builder, totals, bias, out, out_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


def broad_tile_of(num_rows, outputs, panel, *, asks):
    """A block for tile(left, right, num_pairs, sums, coming): sums[i, :outputs] = left[:, i] · right[:, :outputs].

    left is float32 [2 * num_pairs, num_rows], right words of two bfloat16 and sums float32, both in rows of `panel`;
    asks: for as many words from `coming` on as are multiplied, in as many streams as there are vectors.
    """
    vectors = range(outputs // LANES)

    @intrinsic
    def tile(typing_context, left, right, num_pairs, sums, coming):
        def build(context, builder, signature, args):
            left, right, num_pairs, sums, coming = args
            columns = [builder.add(right, bytes_of(LINE_BYTES * j)) for j in vectors]

            begin = [zeros()] * (num_rows * len(vectors))
            with Loop(builder, num_pairs, 1, begin) as loop:
                for j in vectors if asks else ():
                    line = builder.add(builder.mul(num_pairs, bytes_of(j)), loop.index)
                    prefetch(builder, coming, builder.mul(line, bytes_of(LINE_BYTES)))
                loop.carry(
                    add_pair_by_rows(builder, left, num_rows, columns, bytes_of(4 * panel), loop.index, loop.values)
                )
            places = [bytes_of(4 * panel * i + LINE_BYTES * j) for i in range(num_rows) for j in vectors]
            for place, total in zip(places, loop.values, strict=True):
                store(builder, total, sums, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), build

    return tile


def broad_runs_of(num_rows, num_runs, panel):
    """A block for tile(left, right, run_bytes, num_pairs, sums): sums[j, i] = left[:, i] · panel j, whose words are j
    times run_bytes behind right. Of each panel what is read BROAD_AHEAD bytes later is asked for.

    left is float32 [2 * num_pairs, num_rows], sums float32 [num_runs, num_rows, panel].
    """
    vectors = range(panel // LANES)

    @intrinsic
    def tile(typing_context, left, right, run_bytes, num_pairs, sums):
        def build(context, builder, signature, args):
            left, right, run_bytes, num_pairs, sums = args
            panels = [builder.add(right, builder.mul(run_bytes, bytes_of(j))) for j in range(num_runs)]
            per_panel = num_rows * len(vectors)
            with Loop(builder, num_pairs, 1, [zeros()] * (num_runs * per_panel)) as loop:
                pair_bytes, totals = builder.mul(loop.index, bytes_of(4 * panel)), []
                for j, at in enumerate(panels):
                    for k in vectors:
                        prefetch(builder, at, builder.add(pair_bytes, bytes_of(BROAD_AHEAD + LINE_BYTES * k)))
                    columns = [builder.add(at, bytes_of(LINE_BYTES * k)) for k in vectors]
                    some = loop.values[j * per_panel : (j + 1) * per_panel]
                    totals += add_pair_by_rows(builder, left, num_rows, columns, bytes_of(4 * panel), loop.index, some)
                loop.carry(totals)
            for place, total in enumerate(loop.values):
                store(builder, total, sums, bytes_of(LINE_BYTES * place))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), build

    return tile


def put_outputs(builder, totals, bias, out, out_step):
    """One panel's, of each row."""
    added = load(builder, bias, bytes_of(0), FLOATS)
    for i, total in enumerate(totals):
        store(builder, builder.fadd(total, added), out, builder.mul(out_step, bytes_of(i)))


def wide_tile_of(num_rows, *, adds, row_bytes=None):
    """A block for tile(left, right, right_step, num_pairs, out, out_step): out[i, :16] (+)= left[:, i] · right[:, :16].

    left is float32 [2 * num_pairs, num_rows], or rows that are row_bytes apart; right holds words of two bfloat16 in
    rows that are right_step bytes apart; out is float32, and adds: to what it holds.
    """

    @intrinsic
    def tile(typing_context, left, right, right_step, num_pairs, out, out_step):
        def build(context, builder, signature, args):
            left, right, right_step, num_pairs, out, out_step = args
            rows = [builder.mul(out_step, bytes_of(i)) for i in range(num_rows)]
            begin = [load(builder, out, row, FLOATS) if adds else zeros() for row in rows]
            steps = (4 * num_rows, 4) if row_bytes is None else (4, row_bytes)
            totals = add_products(builder, left, steps, [right], right_step, num_pairs, begin)
            for row, total in zip(rows, totals, strict=True):
                store(builder, total, out, row)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return tile


def add_products(builder, left, left_steps, columns, right_step, num_pairs, begin, ask=None, turns=TURNS):
    """Totals of each row by each of right's vectors.

    left_steps: bytes from a row's number to its next, and to the next row's.
    columns: where each of right's vectors begins. Its next pair is right_step bytes on.
    ask(first, turn): in each of the turns that pairs from `first` on share.
    """
    whole = builder.and_(num_pairs, bytes_of(-turns))
    with Loop(builder, whole, turns, begin) as loop:
        totals = loop.values
        for turn in range(turns):
            if ask is not None:
                ask(loop.index, turn)
            pair = builder.add(loop.index, bytes_of(turn))
            totals = add_pair(builder, left, left_steps, columns, right_step, pair, totals)
        loop.carry(totals)
    with Loop(builder, builder.sub(num_pairs, whole), 1, loop.values) as rest:
        rest.carry(
            add_pair(builder, left, left_steps, columns, right_step, builder.add(whole, rest.index), rest.values)
        )
    return rest.values


def add_pair(builder, left, left_steps, columns, right_step, pair, totals):
    number_bytes, row_bytes = left_steps
    num_rows, num_columns, totals = len(totals) // len(columns), len(columns), list(totals)
    offset, place = builder.mul(pair, right_step), builder.mul(pair, bytes_of(2 * number_bytes))
    for half, halves in enumerate((low_halves, high_halves)):
        for j, at in enumerate(columns):
            vector = halves(builder, load(builder, at, offset, WORDS))
            for i in range(num_rows):
                one = spread(
                    builder,
                    load(
                        builder, left, builder.add(place, bytes_of(half * number_bytes + i * row_bytes)), ir.FloatType()
                    ),
                )
                totals[i * num_columns + j] = fused(builder, one, vector, totals[i * num_columns + j])
            forget(builder)
    return totals


def add_pair_by_rows(builder, left, num_rows, columns, right_step, pair, totals):
    """`add_pair` where registers hold all of right's vectors beside the sums. Rows are interleaved, and each of their
    numbers is read once.
    """
    totals, offset, place = list(totals), builder.mul(pair, right_step), builder.mul(pair, bytes_of(8 * num_rows))
    for half, halves in enumerate((low_halves, high_halves)):
        vectors = [halves(builder, load(builder, at, offset, WORDS)) for at in columns]
        for i in range(num_rows):
            one = spread(
                builder, load(builder, left, builder.add(place, bytes_of(4 * (half * num_rows + i))), ir.FloatType())
            )
            for j, vector in enumerate(vectors):
                totals[i * len(columns) + j] = fused(builder, one, vector, totals[i * len(columns) + j])
        forget(builder)
    return totals

# mypy: ignore-errors
# numba gives intrinsics their types at compile time; their callers are the kernels beside this file.
"""Building blocks of CPU kernels that the compiler's own vectoriser does not find: dot products of bfloat16 rows and
sums over lanes.

Written as LLVM vectors of 16 floats, which LLVM cuts down to what the CPU has. So all of them run anywhere. Only the
product of bfloat16 pairs differs. CPUs with AVX512-BF16 have an instruction for it. Elsewhere, and where that is slow,
both halves are widened and multiplied in float32.

Addresses are plain integers (`address`). A block reads and writes what its caller vouches for.
"""

from __future__ import annotations

from functools import partial, reduce

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LANES = 16
# Of a cache line.
LINE_BYTES = 64
# bfloat16 elements of one vector: rows are this, or a multiple of it, long.
PAIR = 2 * LANES

# LLVM's names of CPUs whose product of pairs takes four times as long as one of floats. So half as many numbers are
# multiplied a second (86 and 176 GFLOP/s of an Emerald Rapids). They multiply bfloat16 by tiles, which a virtual
# machine may hide.
SLOW_PAIRS = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d")

WORD = ir.IntType(32)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(WORD, LANES)


class _BFloat(ir.Type):
    """llvmlite has no name for LLVM's type."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), PAIR)
ELEMENTS = ir.VectorType(ir.IntType(16), PAIR)

# Elements of the 128 bits within which x86 interleaves two vectors by one instruction.
_QUARTER = PAIR // 4


def _interleaving(begin):
    """Of two vectors a, b: a[i], b[i] for half of the elements of each quarter, from `begin` on."""
    chosen = [quarter + begin + i for quarter in range(0, PAIR, _QUARTER) for i in range(_QUARTER // 2)]
    return ir.Constant(WORDS_OF_PAIR, [place for i in chosen for place in (i, PAIR + i)])


WORDS_OF_PAIR = ir.VectorType(WORD, PAIR)
INTERLEAVED = _interleaving(0), _interleaving(_QUARTER // 2)
# The dimension of each of 32 sums that `weigh_pairs_of` keeps.
SUMS_ORDER = tuple(
    quarter + begin + i
    for begin in (0, _QUARTER // 2)
    for quarter in range(0, PAIR, _QUARTER)
    for i in range(_QUARTER // 2)
)


def has_pair_product() -> bool:
    """Whether numba compiles for a CPU that multiplies pairs of bfloat16 in one instruction. NUMBA_CPU_NAME,
    NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX may name a lesser one. For that, LLVM ends the process when it meets the
    instruction.
    """
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512bf16" in features.split(",")


def has_matrix_tiles() -> bool:
    """Whether that CPU multiplies whole tiles of bfloat16."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+amx-bf16" in features.split(",")


def has_wide_product() -> bool:
    """Whether that CPU multiplies and adds eight floats at once and no more. Its sixteen registers hold half of what a
    block is written for.
    """
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+avx2", "+fma"} <= set(features.split(",")) and "+avx512f" not in features.split(",")


def has_broad_product() -> bool:
    """Whether that CPU multiplies and adds sixteen floats at once and has nothing faster: no tiles, and no fast
    instruction for pairs.
    """
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return (
        "+avx512f" in features.split(",") and not has_matrix_tiles() and (not has_pair_product() or name in SLOW_PAIRS)
    )


# ------------------------------------------------------------ pieces of LLVM code


def declared(builder, name, returned, taken):
    """An LLVM function by its name."""
    return builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(returned, taken), name)


def floats_of(lanes):
    return ir.VectorType(ir.FloatType(), lanes)


def constant_words(value, lanes=LANES):
    return ir.Constant(ir.VectorType(WORD, lanes), [value] * lanes)


def zeros(lanes=LANES):
    return ir.Constant(floats_of(lanes), [0.0] * lanes)


def pointer(builder, address, offset_bytes, kind):
    """A typed pointer to address + offset_bytes, both of LLVM's int64."""
    return builder.inttoptr(builder.add(address, offset_bytes), kind.as_pointer())


def load(builder, address, offset_bytes, kind):
    value = builder.load(pointer(builder, address, offset_bytes, kind))
    value.align = 2
    return value


def store(builder, value, address, offset_bytes, *, align=4):
    builder.store(value, pointer(builder, address, offset_bytes, value.type), align=align)


def bytes_of(count):
    return ir.Constant(ir.IntType(64), count)


def low_halves(builder, words):
    """float32 of the first bfloat16 of each pair."""
    lanes = words.type.count
    return builder.bitcast(builder.shl(words, constant_words(16, lanes)), floats_of(lanes))


def high_halves(builder, words):
    lanes = words.type.count
    return builder.bitcast(builder.and_(words, constant_words(0xFFFF0000, lanes)), floats_of(lanes))


def spread(builder, value, lanes=LANES):
    """One float or word in all lanes."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, first, constant_words(0, lanes))


def fused(builder, a, b, c):
    """a * b + c."""
    kind = c.type
    return builder.call(declared(builder, f"llvm.fma.v{kind.count}f32", kind, [kind] * 3), [a, b, c])


def greater(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def pair_product(builder, total, a, b, *, native):
    """total + a · b per lane, a and b being WORDS that hold two bfloat16 each."""
    if not native:
        total = fused(builder, low_halves(builder, a), low_halves(builder, b), total)
        return fused(builder, high_halves(builder, a), high_halves(builder, b), total)
    function = declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, PAIRS, PAIRS])
    return builder.call(function, [total, builder.bitcast(a, PAIRS), builder.bitcast(b, PAIRS)])


def forget(builder):
    """Let the compiler believe that memory changed here, so that it loads again what it would keep. That costs next to
    nothing. What it keeps takes registers from sums, whose way through memory is slow.
    """
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def prefetch(builder, address, offset_bytes):
    """Ask for the cache line, into the second level; harmless wherever it points."""
    function = declared(builder, "llvm.prefetch.p0", ir.VoidType(), [ir.IntType(8).as_pointer(), WORD, WORD, WORD])
    read, second_level, data = (ir.Constant(WORD, value) for value in (0, 2, 1))
    builder.call(function, [pointer(builder, address, offset_bytes, ir.IntType(8)), read, second_level, data])


def lane_sums(builder, totals, *, exact=False):
    """The sums over the lanes of up to 16 vectors, in the first lanes of one. exact: in the order written here,
    whatever is beside. Vectors of whole numbers have one sum.
    """
    width, flags = LANES, () if exact else ("reassoc",)
    plus = builder.add if totals[0].type == WORDS else partial(builder.fadd, flags=flags)
    while width > 1:
        half = width // 2
        starts = range(0, LANES, width)
        low = [start + lane for start in starts for lane in range(half)]
        both = [
            low + [LANES + lane for lane in low],
            [lane + half for lane in low] + [LANES + lane + half for lane in low],
        ]
        masks = [ir.Constant(WORDS, lanes) for lanes in both]
        pairs = [(totals[i], totals[min(i + 1, len(totals) - 1)]) for i in range(0, len(totals), 2)]
        totals = [
            plus(builder.shuffle_vector(a, b, masks[0]), builder.shuffle_vector(a, b, masks[1])) for a, b in pairs
        ]
        width = half
    return totals[0]


class Loop:
    """for index in range(begin, end, step), whose body carries vectors from turn to turn: `with Loop(…) as loop: …;
    loop.carry(new)`."""

    def __init__(self, builder, end, step, carried):
        self._builder, self._end, self._step, self._first = builder, end, step, carried

    def __enter__(self):
        builder = self._builder
        before = builder.block
        self._head, self._body, self._after = (builder.append_basic_block() for _ in range(3))
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.index = builder.phi(self._end.type)
        self.values = [builder.phi(value.type) for value in self._first]
        self.index.add_incoming(ir.Constant(self._end.type, 0), before)
        for phi, value in zip(self.values, self._first, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", self.index, self._end), self._body, self._after)
        builder.position_at_end(self._body)
        return self

    def carry(self, values):
        builder = self._builder
        self.index.add_incoming(builder.add(self.index, ir.Constant(self._end.type, self._step)), builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)

    def __exit__(self, *_):
        self._builder.branch(self._head)
        self._builder.position_at_end(self._after)


# ------------------------------------------------------------ what kernels call


@intrinsic
def address(typing_context, array):
    """Where a C-contiguous array's memory begins."""

    def build(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), build


@intrinsic
def publish(typing_context, place, value):
    """Store a whole number of 64 bits at an address, for another thread. A reader there finds all that was stored
    before it, too.
    """

    def build(context, builder, signature, args):
        place, value = args
        builder.store_atomic(value, builder.inttoptr(place, value.type.as_pointer()), ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), build


def greatest_of(count):
    """A block for greatest(place): the greatest of `count` floats, a multiple of 16, from an address on. Left to itself
    the compiler takes one after the other, each of which waits for the one before."""

    @intrinsic
    def greatest(typing_context, place):
        def build(context, builder, signature, args):
            found = [load(builder, args[0], bytes_of(4 * LANES * j), FLOATS) for j in range(count // LANES)]
            best = reduce(partial(greater, builder), found)
            width = LANES
            while width > 1:
                width //= 2
                lanes = ir.Constant(WORDS, [(lane + width) % LANES for lane in range(LANES)])
                best = greater(builder, best, builder.shuffle_vector(best, best, lanes))
            return builder.extract_element(best, ir.Constant(WORD, 0))

        return types.float32(types.int64), build

    return greatest


def dots_of(num_weights, num_rows, *, native, exact=False, asked=None):
    """A block for dots(weights, weight_step, coming, rows, row_step, row_bytes, out, out_step): out[i, j] = row i ·
    weight j, in float32.

    Weights and rows are bfloat16, row_bytes (a multiple of 64) long and so many bytes apart as the steps say. coming:
    weights that are read next, and are asked for now: with several rows the loop is too long for the CPU to look far
    enough ahead itself. asked: only so many of them are. exact: in a caller without fastmath one product's order of
    sums is the same in blocks of any size.
    """

    @intrinsic
    def dots(typing_context, weights, weight_step, coming, rows, row_step, row_bytes, out, out_step):
        def build(context, builder, signature, args):
            weights, weight_step, coming, rows, row_step, row_bytes, out, out_step = args
            weight_at, coming_at = (
                [builder.add(at, builder.mul(weight_step, bytes_of(j))) for j in range(num_weights)]
                for at in (weights, coming)
            )
            row_at = [builder.add(rows, builder.mul(row_step, bytes_of(i))) for i in range(num_rows)]
            found = [None] * (num_weights * num_rows)
            for some_weights, some_rows in fitting(num_weights, num_rows, native=native):
                starts = [zeros()] * (len(some_weights) * len(some_rows))
                with Loop(builder, row_bytes, 2 * PAIR, starts) as loop:
                    for j in some_weights if some_rows[0] == 0 else ():
                        if asked is None or j < asked:
                            prefetch(builder, coming_at[j], loop.index)
                    loop.carry(
                        add_dots(
                            builder,
                            loop,
                            [weight_at[j] for j in some_weights],
                            [row_at[i] for i in some_rows],
                            native=native,
                        )
                    )
                for place, total in enumerate(loop.values):
                    found[
                        some_rows[place // len(some_weights)] * num_weights + some_weights[place % len(some_weights)]
                    ] = total
            for first in range(0, num_rows, LANES // num_weights):
                rows_here = range(first, min(first + LANES // num_weights, num_rows))
                sums = lane_sums(builder, found[first * num_weights : (rows_here[-1] + 1) * num_weights], exact=exact)
                for place, i in enumerate(rows_here):
                    lanes = ir.Constant(
                        ir.VectorType(WORD, num_weights), [place * num_weights + j for j in range(num_weights)]
                    )
                    store(builder, builder.shuffle_vector(sums, sums, lanes), out, builder.mul(out_step, bytes_of(i)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return dots


def fitting(num_weights, num_rows, *, native):
    """Weights and rows that are multiplied together so that their sums fit the registers: all of them, or blocks of
    some.
    """
    if native or not has_wide_product():
        return [(range(num_weights), range(num_rows))]
    found = []
    for some in fitting_rows(num_rows):
        step = 4 // len(some)
        found += [(range(j, min(j + step, num_weights)), some) for j in range(0, num_weights, step)]
    return found


def fitting_rows(num_rows):
    """All of them, or by two."""
    return [range(i, min(i + 2, num_rows)) for i in range(0, num_rows, 2)] if has_wide_product() else [range(num_rows)]


def add_dots(builder, loop, weight_at, row_at, *, native):
    """One turn of a loop of `dots_of`."""
    count, totals = len(weight_at), list(loop.values)
    if native or not has_wide_product():
        w = [load(builder, at, loop.index, WORDS) for at in weight_at]
        for i, at in enumerate(row_at):
            x = load(builder, at, loop.index, WORDS)
            for j in range(count):
                totals[i * count + j] = pair_product(builder, totals[i * count + j], w[j], x, native=native)
        return totals
    for j, place in enumerate(weight_at):
        w = load(builder, place, loop.index, WORDS)
        for i, at in enumerate(row_at):
            totals[i * count + j] = pair_product(
                builder, totals[i * count + j], w, load(builder, at, loop.index, WORDS), native=False
            )
        forget(builder)
    return totals


def weigh_of(num_rows, num_blocks):
    """A block for weigh(values, value_step, coming, count, shares, share_step, sums, sum_step): sums of row i +=
    shares[i, t] * values[t], t < count.

    Values are num_blocks * 32 bfloat16, shares float32; coming: values that are read next. Sums are float32, of each 32
    dimensions the even ones before the odd ones.
    """

    @intrinsic
    def weigh(typing_context, values, value_step, coming, count, shares, share_step, sums, sum_step):
        def build(context, builder, signature, args):
            values, value_step, coming, count, shares, share_step, sums, sum_step = args
            for some in fitting_rows(num_rows):
                rows = [builder.add(sums, builder.mul(sum_step, bytes_of(i))) for i in some]
                places = [(at, bytes_of(4 * LANES * half)) for at in rows for half in range(2 * num_blocks)]
                begin = [load(builder, at, offset, FLOATS) for at, offset in places]
                with Loop(builder, count, 1, begin) as loop:
                    at = builder.mul(loop.index, value_step)
                    halves = []
                    for block in range(num_blocks):
                        prefetch(builder, coming, builder.add(at, bytes_of(2 * PAIR * block)))
                        words = load(builder, values, builder.add(at, bytes_of(2 * PAIR * block)), WORDS)
                        halves += [low_halves(builder, words), high_halves(builder, words)]
                    totals = []
                    for i in some:
                        offset = builder.add(builder.mul(share_step, bytes_of(i)), builder.mul(loop.index, bytes_of(4)))
                        share = spread(builder, load(builder, shares, offset, ir.FloatType()))
                        totals += [
                            fused(builder, half, share, loop.values[len(totals) + k]) for k, half in enumerate(halves)
                        ]
                    loop.carry(totals)
                for (at, offset), total in zip(places, loop.values, strict=True):
                    store(builder, total, at, offset)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return weigh


def weigh_pairs_of(num_rows, num_blocks, *, native):
    """A block for weigh(values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step): sums of row
    i += shares[i, 2t] * values[2t] + shares[i, 2t + 1] * values[2t + 1], t < num_pairs.

    Values are num_blocks * 32 bfloat16 and value_step bytes apart, a pair's second one `second` bytes behind its first;
    shares are bfloat16. coming: values that are read next. Sums are float32; of each 32 dimensions they stand as
    `SUMS_ORDER` says.
    """

    @intrinsic
    def weigh(typing_context, values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step):
        def build(context, builder, signature, args):
            values, value_step, second, coming, num_pairs, shares, share_step, sums, sum_step = args
            places = [
                (builder.add(sums, builder.mul(sum_step, bytes_of(i))), bytes_of(4 * LANES * half))
                for i in range(num_rows)
                for half in range(2 * num_blocks)
            ]
            begin = [load(builder, at, offset, FLOATS) for at, offset in places]
            with Loop(builder, num_pairs, 1, begin) as loop:
                at = builder.mul(loop.index, builder.mul(value_step, bytes_of(2)))
                pairs = []
                for block in range(num_blocks):
                    offset = builder.add(at, bytes_of(2 * PAIR * block))
                    prefetch(builder, coming, offset)
                    prefetch(builder, coming, builder.add(offset, value_step))
                    first, other = (
                        load(builder, values, place, ELEMENTS) for place in (offset, builder.add(offset, second))
                    )
                    pairs += [
                        builder.bitcast(builder.shuffle_vector(first, other, mask), WORDS) for mask in INTERLEAVED
                    ]
                totals = []
                for i in range(num_rows):
                    offset = builder.add(builder.mul(share_step, bytes_of(i)), builder.mul(loop.index, bytes_of(4)))
                    share = spread(builder, load(builder, shares, offset, WORD))
                    totals += [
                        pair_product(builder, loop.values[2 * num_blocks * i + k], share, pair, native=native)
                        for k, pair in enumerate(pairs)
                    ]
                loop.carry(totals)
            for (at, offset), total in zip(places, loop.values, strict=True):
                store(builder, total, at, offset)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    return weigh


def tile_of(num_rows, num_vectors, *, native, adds):
    """A block for tile(left, left_step, right, right_step, num_pairs, out, out_step): out[i, :] (+)= Σ_k left[i, k] ·
    right[k, :].

    left and right hold pairs of bfloat16: of left one at a time is multiplied by num_vectors * 16 of right. out is
    float32; adds: to what it holds.
    """

    @intrinsic
    def tile(typing_context, left, left_step, right, right_step, num_pairs, out, out_step):
        def build(context, builder, signature, args):
            build_tile(builder, args, num_rows, num_vectors, native=native, adds=adds)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), build

    return tile


def asking_tile_of(num_rows, num_vectors, lines, *, native):
    """A block for tile(left, left_step, right, right_step, num_pairs, out, out_step, coming): `tile_of` that asks for
    what is read later, so many cache lines from `coming` on for each pair."""

    @intrinsic
    def tile(typing_context, left, left_step, right, right_step, num_pairs, out, out_step, coming):
        def build(context, builder, signature, args):
            def ask(pair):
                for line in range(lines):
                    prefetch(
                        builder,
                        args[7],
                        builder.add(builder.mul(pair, bytes_of(LINE_BYTES * lines)), bytes_of(LINE_BYTES * line)),
                    )

            build_tile(builder, args[:7], num_rows, num_vectors, native=native, adds=False, ask=ask)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


def build_tile(builder, args, num_rows, num_vectors, *, native, adds, ask=None):
    left, left_step, right, right_step, num_pairs, out, out_step = args
    left_at = [builder.add(left, builder.mul(left_step, bytes_of(i))) for i in range(num_rows)]
    out_at = [builder.add(out, builder.mul(out_step, bytes_of(i))) for i in range(num_rows)]
    places = [(at, bytes_of(4 * LANES * j)) for at in out_at for j in range(num_vectors)]
    begin = [load(builder, at, offset, FLOATS) if adds else zeros() for at, offset in places]
    with Loop(builder, num_pairs, 1, begin) as loop:
        if ask is not None:
            ask(loop.index)
        row = builder.mul(loop.index, right_step)
        vectors = [load(builder, right, builder.add(row, bytes_of(4 * LANES * j)), WORDS) for j in range(num_vectors)]
        word = builder.mul(loop.index, bytes_of(4))
        totals = []
        for i, at in enumerate(left_at):
            one = spread(builder, load(builder, at, word, WORD))
            totals += [
                pair_product(builder, loop.values[i * num_vectors + j], one, vectors[j], native=native)
                for j in range(num_vectors)
            ]
        loop.carry(totals)
    for (at, offset), total in zip(places, loop.values, strict=True):
        store(builder, total, at, offset)

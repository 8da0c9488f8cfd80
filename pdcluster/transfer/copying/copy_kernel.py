"""The inner loop of `copy`, compiled by numba so that it runs without the GIL. Only `copy` imports it. C functions are
called by address.

The digest is XXH3 (64 bits, no seed, the default secret). It equals the xxhash package's digest of the same bytes;
tests compare both. The package cannot copy, so it would read from memory what the copy then reads again. This loop
loads each cache line once, digests it and stores it.

Vectors of eight words become whatever the processor has. Functions without a signature are compiled into those that
have one, so that a warm start loads little.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import xxhash
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

WORD, NUMBER = ir.IntType(64), ir.IntType(32)
LINE = ir.VectorType(WORD, 8)
LINE_BYTES = 64
STREAM_LINES = 4
# memmove does shorter copies.
STREAM_BYTES = 4096
# Prefetch distances. The processor predicts neither the next page nor where another run begins, so the loop prefetches
# ahead. FAR applies to runs of at most SHORT_RUN_BYTES after which the source jumps. If a whole run moves before the
# next one's bytes can arrive, the loop prefetches the run after the next.
AHEAD_BYTES, FAR_AHEAD_BYTES = 1024, 4096
SHORT_RUN_BYTES = 32 << 10

# ---------------------------------------------------------------- one instruction each


def _type_call(typing_context: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call a C function of three words. Narrower parameters ignore the upper bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(WORD, [WORD] * 3).as_pointer())
        return builder.call(pointer, arguments[1:])

    return types.uintp(types.uintp, types.uintp, types.uintp, types.uintp), generate


def _load(builder: Any, address: Any, offset: int) -> Any:
    """Load a cache line's worth of words from any address."""
    line = builder.load(builder.inttoptr(builder.add(address, WORD(offset)), LINE.as_pointer()))
    line.align = 1
    return line


def _store(builder: Any, line: Any, address: Any, offset: int, *, past_caches: bool) -> None:
    """Store a cache line. past_caches: bypass the caches, because nobody here reads the copy again; the address must
    then be a multiple of LINE_BYTES.
    """
    store = builder.store(line, builder.inttoptr(builder.add(address, WORD(offset)), LINE.as_pointer()))
    store.align = LINE_BYTES if past_caches else 1
    if past_caches:
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(NUMBER, 1)]))


def _type_stream(typing_context: Any, target: Any, source: Any, ahead: Any) -> Any:
    """Copy STREAM_LINES past the caches and prefetch those ahead."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, ahead = arguments
        for offset in range(0, STREAM_LINES * LINE_BYTES, LINE_BYTES):
            _prefetch(builder, ahead, offset, is_kept=False)
        for offset in range(0, STREAM_LINES * LINE_BYTES, LINE_BYTES):
            _store(builder, _load(builder, source, offset), target, offset, past_caches=True)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp), generate


def _type_fence(typing_context: Any) -> Any:
    """Make all stores past the caches visible before later ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _prefetch(builder: Any, address: Any, offset: int, *, is_kept: bool) -> None:
    """Prefetch a cache line; a bad address does nothing. is_kept: others read the line again soon. Otherwise it comes
    only as far as the second cache, which can wait for more lines at a time.
    """
    byte = ir.IntType(8).as_pointer()
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, NUMBER, NUMBER, NUMBER])
    )
    builder.call(
        prefetch,
        [builder.inttoptr(builder.add(address, WORD(offset)), byte), NUMBER(0), NUMBER(3 if is_kept else 2), NUMBER(1)],
    )  # read, locality, data


def _type_touch(typing_context: Any, address: Any) -> Any:
    """Look up a page's address before its bytes are needed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0], 0, is_kept=True)
        return context.get_dummy_value()

    return types.void(types.uintp), generate


_call: Any = intrinsic(_type_call)
_touch: Any = intrinsic(_type_touch)
_stream: Any = intrinsic(_type_stream)
_fence: Any = intrinsic(_type_fence)

# ---------------------------------------------------------------- digests

# From the XXH3 specification.
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)
# Read once: numpy creates objects for every read.
SECRET_ADDRESS = SECRET.ctypes.data
STRIPE_BYTES = LINE_BYTES
BLOCK_STRIPES = 16
BLOCK_BYTES = BLOCK_STRIPES * STRIPE_BYTES
# XXH3 is another function up to this size. The package computes it from the first bytes, which the state keeps.
SHORT_BYTES = 240
# Offsets in the secret for the last stripe and the final sum.
LAST_SECRET, SUM_SECRET = 121, 11
PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIMES_64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
START = (PRIMES_32[2], *PRIMES_64[:4], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0])

# Words of a state after its eight sums:
# - stripes digested in this block;
# - pending bytes;
# - total bytes;
# - the last digested stripe, then 1 to 64 pending bytes, because the very last stripe is treated differently;
# - the first SHORT_BYTES.
STRIPE, PENDING, TOTAL, LAST, HEAD, STATE_WORDS = 8, 9, 10, 16, 32, 64


FRESH = np.array([*START, *[0] * (STATE_WORDS - len(START))], dtype=np.uint64)


def new_state() -> NDArray[np.uint64]:
    return FRESH.copy()


def finished(state: NDArray[np.uint64]) -> int:
    """The digest of all bytes so far. More may follow afterwards."""
    total = int(state[TOTAL])
    if total <= SHORT_BYTES:
        return int(xxhash.xxh3_64_intdigest(state[HEAD:].tobytes()[:total]))
    return int(_finished(state, SECRET_ADDRESS))


def _all(value: int) -> Any:
    return ir.Constant(LINE, [value] * 8)


def _with_stripe(builder: Any, sums: Any, line: Any, key: Any) -> Any:
    mixed = builder.xor(line, key)
    product = builder.mul(builder.and_(mixed, _all(0xFFFFFFFF)), builder.lshr(mixed, _all(32)))
    swapped = builder.shuffle_vector(line, line, ir.Constant(ir.VectorType(NUMBER, 8), [1, 0, 3, 2, 5, 4, 7, 6]))
    return builder.add(builder.add(sums, swapped), product)


def _scrambled(builder: Any, sums: Any, secret: Any) -> Any:
    mixed = builder.xor(sums, builder.lshr(sums, _all(47)))
    return builder.mul(builder.xor(mixed, _load(builder, secret, SECRET.size - STRIPE_BYTES)), _all(PRIMES_32[0]))


def _stripes(count: int, *, store: bool = False, past_caches: bool = False, scramble: bool = False) -> Any:
    """Build `function(sums, secret, first, target, source, ahead)`. It digests and stores `count` stripes of a block,
    starting with number `first`, and prefetches as many from `ahead`.
    """

    def type_stripes(
        typing_context: Any, sums: Any, secret: Any, first: Any, target: Any, source: Any, ahead: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, secret, first, target, source, ahead = arguments
            sums, keys = _load(builder, address, 0), builder.add(secret, builder.mul(first, WORD(8)))
            for stripe in range(count):
                _prefetch(builder, ahead, stripe * STRIPE_BYTES, is_kept=not past_caches)
                line = _load(builder, source, stripe * STRIPE_BYTES)
                sums = _with_stripe(builder, sums, line, _load(builder, keys, 8 * stripe))
                if store:
                    _store(builder, line, target, stripe * STRIPE_BYTES, past_caches=past_caches)
            _store(builder, _scrambled(builder, sums, secret) if scramble else sums, address, 0, past_caches=False)
            return context.get_dummy_value()

        return types.void(*[types.uintp] * 6), generate

    return intrinsic(type_stripes)


def _type_folded(typing_context: Any, first: Any, second: Any) -> Any:
    """XOR of both halves of the product of two words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(each, wide) for each in arguments))
        return builder.xor(builder.trunc(product, WORD), builder.trunc(builder.lshr(product, wide(64)), WORD))

    return types.uintp(types.uintp, types.uintp), generate


def _type_word(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], WORD.as_pointer()))
        word.align = 1
        return word

    return types.uintp(types.uintp), generate


_folded: Any = intrinsic(_type_folded)
_word: Any = intrinsic(_type_word)
_stripe, _stored_stripe = _stripes(1), _stripes(1, store=True)
_block, _stored_block = _stripes(BLOCK_STRIPES, scramble=True), _stripes(BLOCK_STRIPES, store=True, scramble=True)
_streamed_block = _stripes(BLOCK_STRIPES, store=True, past_caches=True, scramble=True)
_passed_block = _stripes(BLOCK_STRIPES, past_caches=True, scramble=True)
_scramble = _stripes(0, scramble=True)


@numba.njit(nogil=True)
def _next_stripe(sums: Any, secret: Any, stripe: Any) -> Any:
    """The number of the following stripe. A full block is scrambled."""
    if stripe + np.uint64(1) < np.uint64(BLOCK_STRIPES):
        return stripe + np.uint64(1)
    _scramble(sums, secret, np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0))
    return np.uint64(0)


@numba.njit(nogil=True)
def _ahead(source: Any, at: Any, nbytes: Any, following: Any, distance: Any) -> Any:
    """The address to prefetch when `at` of `nbytes` are moved. following: where the next run begins."""
    coming = at + distance
    return source + coming if coming < nbytes else following + (coming - nbytes)


class Stretch(NamedTuple):
    """Contiguous bytes, by address. target 0: only digest. following: what is read next; distance: how far ahead to
    prefetch.
    """

    target: Any
    source: Any
    nbytes: Any
    following: Any
    distance: Any


@numba.njit(nogil=True)
def _digest(calls: NDArray[np.uint64], state: NDArray[np.uint64], stretch: Stretch, more: bool, past: bool) -> None:
    """Digest bytes, and copy them unless target is 0. Each byte is loaded once, so the digest is of what was stored
    even if another process writes to the source.
    calls: see `move`.
    more: other bytes follow at once, so no stripe here is the very last.
    past: bypass the caches; a source that is only digested does not fill them either.
    """
    memmove, secret = calls[0], calls[2]
    target, source, nbytes, following, distance = (
        stretch.target,
        stretch.source,
        stretch.nbytes,
        stretch.following,
        stretch.distance,
    )
    zero, one, line, block = np.uint64(0), np.uint64(1), np.uint64(STRIPE_BYTES), np.uint64(BLOCK_BYTES)
    sums = np.uint64(state.ctypes.data)
    last = sums + np.uint64(8 * LAST)
    stripe, pending, total = state[STRIPE], state[PENDING], state[TOTAL]
    state[TOTAL] = total + nbytes
    count = min(line - pending, nbytes) if pending else zero
    if count:
        _call(memmove, last + line + pending, source, count)
        if target:
            _call(memmove, target, last + line + pending, count)
    pending += count
    if pending and (count < nbytes or (more and pending == line)):
        _stripe(sums, secret, stripe, zero, last + line, last)
        stripe, pending = _next_stripe(sums, secret, stripe), zero
        _call(memmove, last, last + line, line)
    at, kept = count, zero if more else one
    past = past and (target + at) % line == zero
    while nbytes - at >= line + kept:
        if stripe == zero and nbytes - at >= block + kept:
            for _ in range(zero, (nbytes - at - kept) // block):
                ahead = _ahead(source, at, nbytes, following, distance)
                if target and past:
                    _streamed_block(sums, secret, zero, target + at, source + at, ahead)
                elif target:
                    _stored_block(sums, secret, zero, target + at, source + at, ahead)
                elif past:
                    _passed_block(sums, secret, zero, zero, source + at, ahead)
                else:
                    _block(sums, secret, zero, zero, source + at, ahead)
                at += block
        else:
            ahead = _ahead(source, at, nbytes, following, distance)
            if target:
                _stored_stripe(sums, secret, stripe, target + at, source + at, ahead)
            else:
                _stripe(sums, secret, stripe, zero, source + at, ahead)
            stripe = _next_stripe(sums, secret, stripe)
            at += line
    if at > count:
        _call(memmove, last, source + at - line, line)
    if at < nbytes:
        pending = nbytes - at
        _call(memmove, last + line, source + at, pending)
        if target:
            _call(memmove, target + at, last + line, pending)
    if total < np.uint64(SHORT_BYTES):
        _call(
            memmove,
            sums + np.uint64(8 * HEAD) + total,
            target if target else source,
            min(nbytes, np.uint64(SHORT_BYTES) - total),
        )
    state[STRIPE], state[PENDING] = stripe, pending


@numba.njit("uint64(uint64[::1],uint64)", nogil=True, cache=True)
def _finished(state: NDArray[np.uint64], secret: Any) -> Any:
    """The digest of more than SHORT_BYTES."""
    sums, zero = state[:8].copy(), np.uint64(0)
    last = np.uint64(state.ctypes.data) + np.uint64(8 * LAST) + state[PENDING]
    _stripe(np.uint64(sums.ctypes.data), secret + np.uint64(LAST_SECRET), zero, zero, last, last)
    result = state[TOTAL] * np.uint64(PRIMES_64[0])
    for lane in range(0, 8, 2):
        key = secret + np.uint64(SUM_SECRET + 8 * lane)
        result += _folded(sums[lane] ^ _word(key), sums[lane + 1] ^ _word(key + np.uint64(8)))
    result = (result ^ (result >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
    return result ^ (result >> np.uint64(32))


# ---------------------------------------------------------------- the loop


@numba.njit("int64(int64[:,::1],uint64[::1],uint64[:,::1])", nogil=True, cache=True)
def tabulate(rows: NDArray[np.int64], memories: NDArray[np.uint64], table: NDArray[np.uint64]) -> Any:
    """Fill `table` for `move` from checked offsets; see `copy.copies_inside`.
    rows: (source, target, nbytes), offsets.
    memories: address and bytes of the source, then of the target.
    Returns the bytes of all runs, or -1 when one is empty or outside.
    """
    total, zero = 0, 0
    source_bytes, target_bytes = np.int64(memories[1]), np.int64(memories[3])
    for row in range(rows.shape[0]):
        source, target, nbytes = rows[row, 0], rows[row, 1], rows[row, 2]
        if nbytes <= zero or source < zero or target < zero or nbytes > source_bytes or nbytes > target_bytes:
            return -1
        if source > source_bytes - nbytes or target > target_bytes - nbytes:
            return -1
        table[row, 0] = memories[2] + np.uint64(target)
        table[row, 1] = memories[0] + np.uint64(source)
        table[row, 2] = np.uint64(nbytes)
        total += nbytes
    return total


@numba.njit(nogil=True)
def _copy_past_caches(memmove: Any, stretch: Stretch) -> None:
    target, source, nbytes, following, distance = (
        stretch.target,
        stretch.source,
        stretch.nbytes,
        stretch.following,
        stretch.distance,
    )
    line, several = np.uint64(LINE_BYTES), np.uint64(STREAM_LINES * LINE_BYTES)
    if nbytes < np.uint64(STREAM_BYTES):
        _call(memmove, target, source, nbytes)
        return
    head = (line - target % line) % line
    _call(memmove, target, source, head)
    done = head + (nbytes - head) // several * several
    for at in range(head, done, several):
        _stream(target + at, source + at, _ahead(source, at, nbytes, following, distance))
    _call(memmove, target + done, source + done, nbytes - done)


@numba.njit("void(uint64[:,::1],uint64[::1],uint64,uint64[::1],uint64[::1],boolean)", nogil=True, cache=True)
def move(
    table: NDArray[np.uint64],
    cursor: NDArray[np.uint64],
    left: int,
    calls: NDArray[np.uint64],
    state: NDArray[np.uint64],
    past: bool,
) -> None:
    """Move up to `left` bytes; see `copy.Payload`.
    table: rows of (target, source, nbytes) addresses; target 0 means: only digest the source.
    cursor: row, offset in it, and the seconds and nanoseconds when this call ended.
    calls: addresses of memmove, clock_gettime and SECRET.
    state: empty means: no digest.
    past: as in `_digest`.
    """
    row, offset = cursor[0], cursor[1]
    zero = np.uint64(0)
    digests = len(state) > 0
    while left > zero and row < table.shape[0]:
        target, source, nbytes = table[row, 0], table[row, 1] + offset, table[row, 2] - offset
        target = target + offset if target else zero
        following = table[row + np.uint64(1), 1] if row + np.uint64(1) < table.shape[0] else source + nbytes
        far = past and table[row, 2] <= np.uint64(SHORT_RUN_BYTES) and following != source + nbytes
        count = min(left, nbytes)
        if count < nbytes:
            following = source + count
        distance = np.uint64(FAR_AHEAD_BYTES if far else AHEAD_BYTES)
        if far and count == nbytes and count <= distance and row + np.uint64(2) < table.shape[0]:
            following, distance = table[row + np.uint64(2), 1], count
        _touch(following)
        stretch = Stretch(target, source, count, following, distance)
        if digests:
            more = left > count and row + np.uint64(1) < table.shape[0]
            _digest(calls, state, stretch, more, past)
        elif target and past:
            _copy_past_caches(calls[0], stretch)
        elif target:
            _call(calls[0], target, source, count)
        left -= count
        offset += count
        if count == nbytes:
            row += np.uint64(1)
            offset = zero
    cursor[0], cursor[1] = row, offset
    _fence()
    _call(calls[1], np.uint64(1), np.uint64(cursor.ctypes.data) + np.uint64(16), zero)

"""The inner loop of `moving`, compiled by numba so that it holds no GIL. Imported only there; it calls C functions by their addresses."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

WORD = ir.IntType(64)
LINE = ir.VectorType(WORD, 8)
LINE_BYTES = 64
STREAM_BYTES = 4096
"""Shorter copies are memmove's."""
AHEAD_BYTES = 2048
"""Of the next run, asked for while this one is moved: the processor foresees the bytes after those it reads, not where another run begins."""


def _type_call(typing_context: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call a C function of three words; narrower ones ignore the upper bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(WORD, [WORD] * 3).as_pointer())
        return builder.call(pointer, arguments[1:])

    return types.uintp(types.uintp, types.uintp, types.uintp, types.uintp), generate


_call: Any = intrinsic(_type_call)


def _type_stream(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy one cache line past the caches: a copied page is not read here again, and its old bytes need not be fetched first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = builder.load(builder.inttoptr(arguments[1], LINE.as_pointer()))
        line.align = 1
        store = builder.store(line, builder.inttoptr(arguments[0], LINE.as_pointer()))
        store.align = LINE_BYTES
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


def _type_fence(typing_context: Any) -> Any:
    """What was stored past the caches is visible before whatever follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _type_prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for a cache line; a hint, which does nothing for an address that is not there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number]))
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte), number(0), number(3), number(1)])  # to read, often, data
        return context.get_dummy_value()

    return types.void(types.uintp), generate


_stream: Any = intrinsic(_type_stream)
_prefetch: Any = intrinsic(_type_prefetch)
_fence: Any = intrinsic(_type_fence)


@numba.njit("void(uint64,uint64,uint64,uint64)", nogil=True, cache=True)
def _copy_past_caches(memmove: int, target: int, source: int, nbytes: int) -> None:
    line = np.uint64(LINE_BYTES)
    if nbytes < np.uint64(STREAM_BYTES):
        _call(memmove, target, source, nbytes)
        return
    head = (line - target % line) % line
    _call(memmove, target, source, head)
    body = (nbytes - head) // (np.uint64(4) * line) * (np.uint64(4) * line)
    for start in range(head, head + body, np.uint64(4) * line):
        for offset in range(4):
            _stream(target + start + np.uint64(offset) * line, source + start + np.uint64(offset) * line)
    done = head + body
    _call(memmove, target + done, source + done, nbytes - done)


@numba.njit("void(uint64[:,::1],uint64[::1],uint64,uint64[::1],uint64,boolean,uint64)", nogil=True, cache=True)
def move(table: NDArray[np.uint64], cursor: NDArray[np.uint64], left: int, calls: NDArray[np.uint64], state: int, after: bool, block: int) -> None:
    """See `moving.Payload`. table: (target, source, nbytes) addresses, target 0: only digest (the source). cursor: row, offset in it, seconds and
    nanoseconds when this ended. calls: addresses of memmove, XXH3_64bits_update, clock_gettime, and of the cursor's clock. state: 0: no digest."""
    row, offset = cursor[0], cursor[1]
    zero = np.uint64(0)
    while left > zero and row < table.shape[0]:
        target, source, nbytes = table[row, 0], table[row, 1], table[row, 2]
        if offset == zero and row + np.uint64(1) < table.shape[0]:
            start, length = table[row + np.uint64(1), 1], min(table[row + np.uint64(1), 2], np.uint64(AHEAD_BYTES))
            if start != source + nbytes:
                for line in range(zero, length, np.uint64(LINE_BYTES)):
                    _prefetch(start + line)
        count = min(left, nbytes - offset, np.uint64(block))
        if state and not after:
            _call(calls[1], np.uint64(state), source + offset, count)
        if target and after:
            _call(calls[0], target + offset, source + offset, count)
            if state:
                _call(calls[1], np.uint64(state), target + offset, count)
        elif target:
            _copy_past_caches(calls[0], target + offset, source + offset, count)
        left -= count
        offset += count
        if offset == nbytes:
            row += np.uint64(1)
            offset = zero
    cursor[0], cursor[1] = row, offset
    _fence()
    _call(calls[2], np.uint64(1), calls[3], zero)

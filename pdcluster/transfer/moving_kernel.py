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


def _type_call(typing_context: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call a C function of three words; narrower ones ignore the upper bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(WORD, [WORD] * 3).as_pointer())
        return builder.call(pointer, arguments[1:])

    return types.uintp(types.uintp, types.uintp, types.uintp, types.uintp), generate


_call: Any = intrinsic(_type_call)


@numba.njit("void(uint64[:,::1],uint64[::1],uint64,uint64[::1],uint64,boolean,uint64)", nogil=True, cache=True)
def move(table: NDArray[np.uint64], cursor: NDArray[np.uint64], left: int, calls: NDArray[np.uint64], state: int, after: bool, block: int) -> None:
    """See `moving.Payload`. table: (target, source, nbytes) addresses, target 0: only digest. cursor: row, offset in it, seconds and nanoseconds
    when this ended. calls: addresses of memmove, XXH3_64bits_update, clock_gettime, and of the cursor's clock. state: 0 for no digest."""
    row, offset = cursor[0], cursor[1]
    zero = np.uint64(0)
    while left > zero and row < table.shape[0]:
        target, source, nbytes = table[row, 0], table[row, 1], table[row, 2]
        count = min(left, nbytes - offset, np.uint64(block))
        if state and not after:
            _call(calls[1], np.uint64(state), source + offset, count)
        if target:
            _call(calls[0], target + offset, source + offset, count)
        if state and after:
            _call(calls[1], np.uint64(state), target + offset, count)
        left -= count
        offset += count
        if offset == nbytes:
            row += np.uint64(1)
            offset = zero
    cursor[0], cursor[1] = row, offset
    _call(calls[2], np.uint64(1), calls[3], zero)

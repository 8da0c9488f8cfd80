"""KV over tcp between nodes with a cluster key, beside the same without one: `bench.transfer --sealed`.

Sealed and plain transfers take turns, each end on a core of its own. `sealed.tcp` is the speed of a whole hand-over.
`sealed.itl` and `sealed.stall` are of an engine that decodes 8 rows in the reader's process while 64 MiB come in:
the 99th percentile of the gaps between its steps, and by how much a sleep of a millisecond lasts too long there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from bench.harness.report import Row, row_of_turns
from bench.parts.transfer_ends import PAGE_TOKENS, Decode, Decoded, Near, plain
from bench.parts.transfer_load import has_two_cores, pin, unpin

PAGE_BYTES = 64 << 10
SIZES_MIB = (1, 16, 64)
SPEED_GOAL, ITL_GOAL = 0.4, 1 / 1.1
STALL_LIMIT_MS = 2.0
# Transfers behind each other while an engine decodes.
MOVES = 4


def tokens_of(mebibytes: int) -> int:
    return (mebibytes << 20) // PAGE_BYTES * PAGE_TOKENS


def speeds(ends: dict[str, Near], turns: int) -> Iterator[Row]:
    for size in SIZES_MIB:
        found: dict[str, list[float]] = {name: [] for name in ends}
        for _ in range(turns + 1):
            for name, near in ends.items():
                near.move(tokens_of(size))
                found[name].append((size << 20) / near.move(tokens_of(size)) / 1e9)
        sealed, clear = (found[name][1:] for name in ("sealed", "plain"))
        yield row_of_turns(
            "sealed.tcp", f"{size} MiB, digests on", sealed, "GB/s", against="plain tcp", other=clear, goal=SPEED_GOAL
        )


def beside_decoding(near: Near) -> tuple[float, float]:
    """p99 of the gaps between steps, and of stalls, in ms, of MOVES transfers."""
    near.pipe.send(Decode(True))
    time.sleep(0.2)
    begin = time.perf_counter()
    for _ in range(MOVES):
        near.move(tokens_of(64))
    end = time.perf_counter()
    near.pipe.send(Decode(False))
    answer = near.pipe.receive()
    if not isinstance(answer, Decoded):
        raise RuntimeError(f"the reader process answered {answer!r} instead of its steps")
    ends = np.array(answer.ends)
    inside = (ends[1:] >= begin) & (ends[:-1] <= end)
    return 1e3 * float(np.percentile(np.diff(ends)[inside], 99)), 1e3 * float(np.percentile(answer.stalls, 99))


def decoding(ends: dict[str, Near], turns: int) -> Iterator[Row]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ends}
    for _ in range(turns + 1):
        for name, near in ends.items():
            found[name].append(beside_decoding(near))
    for index, metric in enumerate(("sealed.itl", "sealed.stall")):
        sealed, clear = ([each[index] for each in found[name][1:]] for name in ("sealed", "plain"))
        goal = ITL_GOAL if metric == "sealed.itl" else None
        case = f"p99 beside {MOVES} transfers of 64 MiB"
        yield row_of_turns(metric, case, sealed, "ms", against="plain tcp", other=clear, better="less", goal=goal)
    stall = sum(each[1] for each in found["sealed"][1:]) / turns
    yield Row(
        "sealed.stall",
        "mean of p99",
        stall,
        "ms",
        against="limit",
        against_value=STALL_LIMIT_MS,
        better="less",
        goal=1.0,
    )


def rows(turns: int) -> Iterator[Row]:
    cores = os.sched_getaffinity(0)
    with (
        closing(Near(plain("tcp", PAGE_BYTES, 1024, digests=True))) as clear,
        closing(Near(plain("tcp", PAGE_BYTES, 1024, digests=True, is_sealed=True))) as sealed,
    ):
        ends = {"plain": clear, "sealed": sealed}
        for near in ends.values():
            near.move(tokens_of(64))  # all its threads run
            if has_two_cores():
                pin(near.child_pid, 1)
        if has_two_cores():
            pin(os.getpid(), 0)
        try:
            yield from speeds(ends, turns)
            yield from decoding(ends, max(turns // 4, 1))
        finally:
            unpin(cores)

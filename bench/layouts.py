"""Bandwidth between nodes of different ranks and page sizes, beside that of equal layouts, in one run; the bytes that
land are checked.

    python -m bench.layouts [--quick] [--json FILE] [--backends shm,tcp]

The same KV (Qwen3-0.6B in bfloat16: 28 layers, 8 heads of 128 dims) goes between two processes in one layout after the
other, turn by turn, so that all meet the same neighbours on the machine. Seconds are the whole protocol's, digests on,
from the ticket's arrival at the writer to the reader's CommitAck; a ratio is the median over the turns. What is
checked: the reader's pages against tensors cut by numpy, not by `geometry`.

Each end is one process with the pools of all its ranks, or, where the row says so, a process per rank, as a node has
them (`bench.harness.rank_ends`): with rank 0's session, a transfer endpoint per rank, and links between them. Both are
compared with one process at each end, which is what the goal is about; nodes of several processes also with equal ones
of several (`layouts.BACKEND.processes`), which tells what differing layouts cost from what processes do. Where there
are two cores, all of an end's processes share one, so a node of several ranks has no more of the machine than one of a
single rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.report import Row, add_output_flags, print_rows, row, row_of_turns, save
from bench.parts import transfer_load
from bench.parts.transfer_ends import Near, Shape
from pdcluster.transfer.layout.geometry import PageShape

BACKENDS = ("shm", "tcp")
GOAL = 0.6
QWEN3 = PageShape(page_tokens=32, num_layers=28, planes=2, heads=8, cell_bytes=128 * 2)


@dataclass(frozen=True, slots=True)
class Pair:
    """Ranks and tokens in a page of the prefill and of the decode node."""

    ranks: tuple[int, int]
    page_tokens: tuple[int, int] = (32, 32)
    processes: bool = False

    @property
    def name(self) -> str:
        ranks, tokens = self.ranks, self.page_tokens
        same = (
            f"pages of {tokens[0]} tokens" if tokens[0] == tokens[1] else f"pages of {tokens[0]} → {tokens[1]} tokens"
        )
        return f"P TP {ranks[0]} → D TP {ranks[1]}, {same}" + (", a process per rank" if self.processes else "")

    def shape(self, backend: str, num_tokens: int) -> Shape:
        near, far = (
            replace(QWEN3, ranks=ranks, page_tokens=tokens)
            for ranks, tokens in zip(self.ranks, self.page_tokens, strict=True)
        )
        return Shape(backend, near, far, num_tokens, digests=True, processes=self.processes)


EQUAL = Pair((1, 1))
OTHERS = (
    Pair((2, 1)),
    Pair((1, 2)),
    Pair((2, 4)),
    Pair((4, 2)),
    Pair((1, 1), (16, 64)),
    Pair((1, 1), (64, 16)),
    Pair((2, 4), (16, 64)),
)
RANKS = tuple(Pair(ranks, processes=True) for ranks in ((2, 1), (1, 2), (2, 4), (4, 2), (2, 2)))
# No more processes than any pair that is compared with it, but for those with a single rank on one side.
EQUAL_PROCESSES = Pair((2, 2), processes=True)


def measure(backend: str, num_tokens: int, turns: int, others: tuple[Pair, ...]) -> Iterator[Row]:
    pairs = (EQUAL, *others)
    with ExitStack() as stack:
        ends = [stack.enter_context(closing(Near(pair.shape(backend, num_tokens)))) for pair in pairs]
        for pair, near in zip(pairs, ends, strict=True):
            if wrong := near.wrong_bytes():
                raise RuntimeError(f"{backend}, {pair.name}: {wrong} bytes are wrong")
            if transfer_load.has_two_cores():
                pin_end(os.getpid(), 0, {each.child_pid for each in ends})
                pin_end(near.child_pid, 1)
        seconds = [[_typical(near, num_tokens) for near in ends] for _ in range(turns)]
    nbytes = ends[0].shape.nbytes
    rates = [[nbytes / each[index] / 1e9 for each in seconds] for index in range(len(pairs))]
    case = f"{num_tokens} tokens"
    yield row(f"layouts.{backend}", f"{case}, {EQUAL.name}", rates[0], "GB/s")
    for index, pair in enumerate(others, 1):
        yield row_of_turns(
            f"layouts.{backend}",
            f"{case}, {pair.name}",
            rates[index],
            "GB/s",
            against="equal",
            other=rates[0],
            goal=GOAL,
        )
    if EQUAL_PROCESSES in pairs:
        yield from _beside_equal_processes(backend, case, pairs, rates)


def _beside_equal_processes(
    backend: str, case: str, pairs: tuple[Pair, ...], rates: list[list[float]]
) -> Iterator[Row]:
    """rates: of each pair, turn by turn."""
    base = rates[pairs.index(EQUAL_PROCESSES)]
    for pair, speeds in zip(pairs, rates, strict=True):
        if pair.processes and pair.ranks[0] != pair.ranks[1]:
            metric = f"layouts.{backend}.processes"
            yield row_of_turns(metric, f"{case}, {pair.name}", speeds, "GB/s", against="TP 2 → 2", other=base)


def pin_end(pid: int, core: int, others: Collection[int] = ()) -> None:
    """A process and its children, but for these, on one core."""
    transfer_load.pin(pid, core)
    children = {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }
    for child in children - set(others):
        pin_end(child, core)


def _typical(near: Near, num_tokens: int) -> float:
    """Of a few transfers in a row, the first of which finds the caches full of another pair's pages and code."""
    return statistics.median(near.move(num_tokens) for _ in range(3))


def run(backends: tuple[str, ...], *, quick: bool) -> Iterator[Row]:
    cores = os.sched_getaffinity(0)
    for backend in backends:
        for num_tokens in (512,) if quick else (512, 2048):
            try:
                for others in (OTHERS, RANKS):
                    yield from measure(backend, num_tokens, 5 if quick else 9, others)
            finally:
                transfer_load.unpin(cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns")
    add_output_flags(parser)
    parser.add_argument(
        "--backends", default=",".join(BACKENDS), help="comma-separated; any that `pdcluster node --transfer` knows"
    )
    options = parser.parse_args()
    rows = list(run(tuple(options.backends.split(",")), quick=options.quick))
    print_rows(rows)
    save(rows, options)


if __name__ == "__main__":
    main()

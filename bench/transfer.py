"""How near a KV transfer comes to its medium: logical KV bytes per second between two processes, beside the ceiling
measured in the same run.

    python -m bench.transfer [--quick] [--json FILE] [--backends shm,tcp,mooncake] [--sealed]

`protocol` is the whole of it, from the ticket's arrival at the writer to the reader's CommitAck, with everything pushed
at once; so small sizes show the fixed cost of a hand-over, and with digests both ends read all bytes once more; of 16
MiB it says where the time goes. `backend` is the medium's part of the same, see `bench.parts.transfer_seam`. Both are
judged by the same goal. Ceilings, for the same number of bytes, each time at the next place of memory as large as the
pool, as a transfer's pages are:

    shm       one memmove between pools of the same kind and size, touched before tcp       a plain loopback socket
    between the two processes, sendall → recv_into, one answer byte; beside it (`digest`) the same socket when both ends
    digest each piece after they sent or received it, and (`unpaced`) the same plain socket with the congestion control
    that `tcp` takes inside of a host, where the system's own may pace mooncake  the engine alone, 4 MiB entries, 8 in
    flight, no copies to or from staging; beside it, with nothing of ours around it, what is left when the reader copies
    each entry and both ends digest it (`bound`), when it is gathered at the writer, too (`gathered`), when the reader
    copies and nobody digests (`copied`), and with a copy at the writer alone (`staging`), see
    `bench.parts.mooncake_bound`

Each end has a core of its own where there are two. Transfers and ceilings take turns, so that all meet the same
neighbours on the machine: two of each, of which the first, which meets what the others left in the caches, does not
count. A ratio is the median over these pairs, its spread from their tenth to their ninetieth percentile, and `95 % of
it` where the median of all such pairs is with that certainty. Then the same with a busy engine beside it, see
`bench.parts.transfer_load`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from bench.harness.report import Row, add_output_flags, print_rows, row, row_of_turns, save
from bench.parts import mooncake_bound, transfer_load, transfer_sealed
from bench.parts.transfer_ends import HOST, PAGE_TOKENS, Address, Near, Sink, digest_only, plain
from pdcluster.transfer.backends.tcp import DIGEST_BYTES
from pdcluster.transfer.backends.tcp_links import send_unpaced

BACKENDS = ("shm", "tcp", "mooncake")
# Least share of the ceiling that was promised, from GOAL_BYTES on.
GOALS = {("shm", False): 0.85, ("shm", True): 0.65, ("tcp", True): 0.9, ("mooncake", True): 0.9}
GOAL_BYTES, LONG_BYTES = 16 << 20, 1 << 30
# Of a transfer and its ceiling: neighbours on the machine change both by tens of percent from one to the next.
PAIRS = 41
# Of mooncake, whose turns have seven times as many moves, from the second size on that has a goal.
SLOW_PAIRS = 21
# Of a transfer so long that one says as much as several short ones.
LONG_PAIRS = 9


@dataclass(frozen=True, slots=True)
class Case:
    """page_bytes: 32 tokens of some model. name: what a person calls it."""

    name: str
    page_bytes: int
    num_pages: int

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS


def sizes(*mebibytes: float) -> list[Case]:
    return [
        Case(f"{int(size * 1024)} KiB" if size < 1 else f"{int(size)} MiB", 64 << 10, int(size * 16))
        for size in mebibytes
    ]


def prompts(*tokens: int) -> list[Case]:
    """Qwen3-0.6B in bfloat16: 28 layers × K, V × 8 heads × 128 dims."""
    return [Case(f"Qwen3-0.6B, {count} tokens", 28 * 2 * 8 * 128 * 2 * 32, count // 32) for count in tokens]


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return sizes(1 / 16, 1, 16, 64) + prompts(512)
    return [*sizes(1 / 16, 1 / 4, 1, 4, 16, 64, 256), Case("1 GiB", 4 << 20, 256), *prompts(128, 512, 2048)]


# ---------------------------------------------------------------- ceilings


def places(near: Near, nbytes: int) -> Iterator[int]:
    """Where a ceiling reads and writes next, in memory as large as the pool: what a transfer meets in the caches and
    page tables, it meets too."""
    return itertools.cycle(range(0, near.pools[0].bytes.size - nbytes + 1, nbytes))


def memmove_seconds(near: Near, nbytes: int) -> Generator[float]:
    """Of one memmove after the other, each when it is asked for."""
    source, target = near.pools[0].bytes.ctypes.data, near.spare.bytes.ctypes.data
    for start in places(near, nbytes):
        begin = time.perf_counter()
        ctypes.memmove(target + start, source + start, nbytes)
        yield time.perf_counter() - begin


def socket_seconds(near: Near, nbytes: int, *, digests: bool = False, is_paced: bool = True) -> Generator[float]:
    """The same of sends over one connection. digests: both ends digest each piece when it was sent or received, with
    the product's own loop, and the other end's comes back. is_paced: if the system's congestion control does that."""
    near.pipe.send(Sink("digested" if digests else "socket", nbytes, 0))
    address = near.pipe.receive()
    assert isinstance(address, Address)
    pool = near.pools[0].bytes
    with socket.create_connection((HOST, address.number)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not is_paced:
            send_unpaced(sock)
        for start in places(near, nbytes):
            data = pool[start : start + nbytes]
            begin = time.perf_counter()
            if digests:
                send_and_digest(sock, data.data, data.ctypes.data)
            else:
                sock.sendall(data.data)
                sock.recv(1)
            yield time.perf_counter() - begin


def send_and_digest(sock: socket.socket, data: memoryview, address: int) -> None:
    payload = digest_only(address, len(data))
    for start in range(0, len(data), DIGEST_BYTES):
        piece = data[start : start + DIGEST_BYTES]
        sock.sendall(piece)
        payload.advance(len(piece))
    if sock.recv(8, socket.MSG_WAITALL) != payload.digest().to_bytes(8, "little"):
        raise RuntimeError("the two ends of the ceiling digested different bytes")


# What else is measured beside tcp with digests, and how.
BOUNDS = {
    "digest.tcp": ("socket and a digest at both ends", partial(socket_seconds, digests=True)),
    "unpaced.tcp": ("socket without pacing", partial(socket_seconds, is_paced=False)),
}
CEILINGS = {"shm": "memmove", "tcp": "loopback socket", "mooncake": "engine alone"}


@dataclass(frozen=True, slots=True)
class Tops:
    """A case's ceiling, and what else is measured beside it: what it is, and seconds; each when it is asked for.
    engines: of mooncake."""

    ceiling: Generator[float]
    bounds: dict[str, tuple[str, Generator[float]]]
    engines: mooncake_bound.Bench | None = None


def tops_of(near: Near, case: Case, stack: ExitStack) -> Tops:
    backend, digests, nbytes = near.shape.backend, near.shape.digests, case.nbytes
    if backend == "shm":
        return Tops(memmove_seconds(near, nbytes), {})
    if backend == "tcp":
        wanted = BOUNDS if digests and nbytes >= GOAL_BYTES else {}
        return Tops(
            socket_seconds(near, nbytes),
            {metric: (what, seconds(near, nbytes)) for metric, (what, seconds) in wanted.items()},
        )
    engines = stack.enter_context(closing(mooncake_bound.Bench(near)))
    ways = [way for way in mooncake_bound.WAYS if nbytes >= GOAL_BYTES and way.digests <= digests]
    bounds = {way.metric: (way.what, engines.seconds(nbytes, way, places(near, nbytes))) for way in ways}
    return Tops(engines.seconds(nbytes, mooncake_bound.ALONE, places(near, nbytes)), bounds, engines)


# ---------------------------------------------------------------- the runs


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of a transfer, of one at the backend's seam, of the ceiling, and of each of what else is measured beside
    it."""

    moved: float
    alone: float
    stages: tuple[float, float, float]
    top: float
    bounds: dict[str, float]


def take_turns(near: Near, case: Case, tops: Tops) -> list[Turn]:
    return [take_turn(near, case, tops) for _ in range(pairs_of(near.shape.backend, case) + 1)][1:]


def pairs_of(backend: str, case: Case) -> int:
    if case.nbytes >= LONG_BYTES:
        return LONG_PAIRS
    return SLOW_PAIRS if backend == "mooncake" and case.nbytes > GOAL_BYTES else PAIRS


def take_turn(near: Near, case: Case, tops: Tops) -> Turn:
    _, moved = near.move(case.num_tokens), near.move(case.num_tokens)
    stages = near.stages
    _, alone = near.move_alone(case.num_tokens), near.move_alone(case.num_tokens)
    top = second_of(tops.ceiling)
    return Turn(moved, alone, stages, top, {metric: second_of(seconds) for metric, (_, seconds) in tops.bounds.items()})


def second_of(seconds: Iterator[float]) -> float:
    return [next(seconds) for _ in range(2)][1]


def measure(near: Near, case: Case) -> list[Row]:
    """Rows of one case on one pair of processes."""
    near.move(case.num_tokens)  # warm: connection, page tables
    with ExitStack() as stack:
        tops = tops_of(near, case, stack)
        for each in (tops.ceiling, *(seconds for _, seconds in tops.bounds.values())):
            stack.enter_context(closing(each))
        turns = take_turns(near, case, tops)
    shape = near.shape
    goal = GOALS.get((shape.backend, shape.digests)) if case.nbytes >= GOAL_BYTES else None
    label = f"{case.name}, digests {'on' if shape.digests else 'off'}"
    moved, alone, top = (
        [each(turn) for turn in turns] for each in (attrgetter("moved"), attrgetter("alone"), attrgetter("top"))
    )
    against = CEILINGS[shape.backend]
    rows = [
        beside(f"protocol.{shape.backend}", label, case, moved, against, top, goal),
        beside(f"backend.{shape.backend}", label, case, alone, against, top, goal),
    ]
    if case.nbytes == GOAL_BYTES:
        rows += where_time_goes(label, [turn.stages for turn in turns])
    bounds = {metric: [turn.bounds[metric] for turn in turns] for metric in tops.bounds}
    rows += [
        beside(metric, f"{case.name}, {tops.bounds[metric][0]}", case, seconds, against, top)
        for metric, seconds in bounds.items()
    ]
    if (own := mooncake_bound.bound_of(case.page_bytes).metric) in bounds:
        rows.append(beside("backend.mooncake", label, case, alone, own, bounds[own]))
    if tops.engines is not None and goal is not None:
        rows += tops.engines.core_rows(case.name)
    if case.nbytes <= 1 << 20:
        rows.append(row(f"handover.{shape.backend}", label, [each * 1e3 for each in moved], "ms"))
    return rows


def beside(
    metric: str,
    label: str,
    case: Case,
    samples: list[float],
    against: str,
    tops: list[float],
    goal: float | None = None,
) -> Row:
    """A speed beside what was measured in the same turns; samples, tops: seconds, one of each turn."""
    own, other = ([case.nbytes / seconds / 1e9 for seconds in each] for each in (samples, tops))
    return row_of_turns(metric, label, own, "GB/s", against=against, other=other, goal=goal)


def where_time_goes(label: str, stages: list[tuple[float, float, float]]) -> list[Row]:
    """What is not bytes on their way costs the same whatever the size: code that has left the caches since the last
    transfer."""
    names = ("ticket → writes begun", "writes begun → Commit", "Commit → CommitAck")
    return [row(f"  {name}", label, [each[index] * 1e3 for each in stages], "ms") for index, name in enumerate(names)]


def run(backends: tuple[str, ...], *, quick: bool) -> Iterator[Row]:
    wanted = cases(quick=quick)
    for backend in backends:
        for digests in (True, False):
            for page_bytes in dict.fromkeys(case.page_bytes for case in wanted):
                group = [case for case in wanted if case.page_bytes == page_bytes]
                num_pages = max(case.num_pages for case in group)
                near = Near(plain(backend, page_bytes, num_pages + num_pages % 2, digests=digests))
                try:
                    yield from measure_group(near, group)
                finally:
                    near.close()
        if transfer_load.has_two_cores():
            yield from transfer_load.rows(backend)


def measure_group(near: Near, group: list[Case]) -> Iterator[Row]:
    cores = os.sched_getaffinity(0)
    near.move(group[0].num_tokens)  # all its threads run
    if transfer_load.has_two_cores():
        transfer_load.pin(os.getpid(), 0)
        transfer_load.pin(near.child_pid, 1)
    try:
        for case in group:
            yield from measure(near, case)
    finally:
        transfer_load.unpin(cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    add_output_flags(parser)
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated, of " + ", ".join(BACKENDS))
    parser.add_argument("--sealed", action="store_true", help="only tcp with a cluster key, beside tcp without")
    options = parser.parse_args()
    chosen = tuple(options.backends.split(","))
    if unknown := set(chosen) - set(BACKENDS):
        parser.error(f"unknown backends {sorted(unknown)}; choose from {', '.join(BACKENDS)}")
    rows = list(
        transfer_sealed.rows(5 if options.quick else 21) if options.sealed else run(chosen, quick=options.quick)
    )
    print_rows(rows)
    save(rows, options)


if __name__ == "__main__":
    main()

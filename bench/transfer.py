"""How near a KV transfer comes to its medium: logical KV bytes per second between two processes, beside the ceiling measured in the same run.

    python -m bench.transfer [--quick] [--json FILE] [--backends shm,tcp,mooncake]

`protocol` is the whole of it, from the ticket's arrival at the writer to the reader's CommitAck, with everything pushed at once; so small sizes
show the fixed cost of a hand-over, and with digests both ends read all bytes once more; of 16 MiB it says where the time goes. `backend` is the
medium's part of the same, see `bench.transfer_seam`. Both are judged by the same goal.
Ceilings, for the same number of bytes, each time at the
next place of memory as large as the pool, as a transfer's pages are:

    shm       one memmove between pools of the same kind and size, touched before
    tcp       a plain loopback socket between the two processes, sendall → recv_into, one answer byte; beside it (`digest`) the same socket
              when both ends digest each piece after they sent or received it, and (`unpaced`) the same plain socket with the congestion
              control that `tcp` takes inside of a host, where the system's own may pace
    mooncake  the engine alone, 4 MiB entries, 8 in flight, no copies to or from staging; beside it (`staging`) what is left when
              each entry is copied at the writer, which any staging costs, and (`bound`) what is left of it when the reader copies
              each entry and both ends digest it, with nothing of ours around it, see `bench.mooncake_bound`

Each end has a core of its own where there are two. Transfers and ceilings take turns, so that all meet the same neighbours on the machine: two of
each, of which the first, which meets what the others left in the caches, does not count. A ratio is the median over these
pairs, its spread from their tenth to their ninetieth percentile. (Of mooncake's ceiling each turn has several, as it costs a new engine.) Then the
same with a busy engine beside it, see `bench.transfer_load`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench import mooncake_bound, transfer_load
from bench.report import Row, paired, print_rows, row, write_json
from bench.transfer_ends import HOST, PAGE_TOKENS, Address, Near, Sink, digest_only, plain
from pdcluster.transfer.base import WriteStatus
from pdcluster.transfer.links import send_unpaced
from pdcluster.transfer.tcp import DIGEST_BYTES

BACKENDS = ("shm", "tcp", "mooncake")
GOALS = {("shm", False): 0.85, ("shm", True): 0.65, ("tcp", True): 0.9, ("mooncake", True): 0.9}
"""Least share of the ceiling that was promised, from GOAL_BYTES on."""
GOAL_BYTES, LONG_BYTES = 16 << 20, 1 << 30
ENTRY_BYTES = 4 << 20
ENTRIES = 8
TURNS = 3
"""Of mooncake."""
PAIRS = 41
"""Of a transfer and its ceiling, of all other media: neighbours on the machine change both by tens of percent from one to the next."""
LONG_PAIRS, LONG_REPEATS = 9, 2
"""Of a transfer so long that one says as much as several short ones."""


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
    return [Case(f"{int(size * 1024)} KiB" if size < 1 else f"{int(size)} MiB", 64 << 10, int(size * 16)) for size in mebibytes]


def prompts(*tokens: int) -> list[Case]:
    """Qwen3-0.6B in bfloat16: 28 layers × K, V × 8 heads × 128 dims."""
    return [Case(f"Qwen3-0.6B, {count} tokens", 28 * 2 * 8 * 128 * 2 * 32, count // 32) for count in tokens]


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return sizes(1 / 16, 1, 16, 64) + prompts(512)
    return [*sizes(1 / 16, 1 / 4, 1, 4, 16, 64, 256), Case("1 GiB", 4 << 20, 256), *prompts(128, 512, 2048)]


# ---------------------------------------------------------------- ceilings


def places(near: Near, nbytes: int) -> Iterator[int]:
    """Where a ceiling reads and writes next, in memory as large as the pool: what a transfer meets in the caches and page tables, it meets too."""
    return itertools.cycle(range(0, near.pools[0].bytes.size - nbytes + 1, nbytes))


def memmove_seconds(near: Near, nbytes: int) -> Generator[float]:
    """Of one memmove after the other, each when it is asked for."""
    source, target = near.pools[0].bytes.ctypes.data, near.spare.bytes.ctypes.data
    for start in places(near, nbytes):
        begin = time.perf_counter()
        ctypes.memmove(target + start, source + start, nbytes)
        yield time.perf_counter() - begin


def socket_seconds(near: Near, nbytes: int, *, digests: bool = False, is_paced: bool = True) -> Generator[float]:
    """The same of sends over one connection. digests: both ends digest each piece when it was sent or received, with the product's own loop, and the
    other end's comes back. is_paced: if the system's congestion control does that."""
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


def seconds_of_engine(near: Near, nbytes: int, repeats: int, *, packed: bool = False) -> list[float]:
    """packed: each entry is copied to where the engine reads it, as whoever stages must; nothing is copied at the other end."""
    from pdcluster.transfer.mooncake import MooncakeEngine
    from pdcluster.transfer.staging import StagedSettings

    near.pipe.send(Sink("mooncake", nbytes, repeats))
    address = near.pipe.receive()
    assert isinstance(address, Address)
    source, pool = near.spare.bytes, near.pools[0].bytes.ctypes.data
    engine = MooncakeEngine(StagedSettings(host=HOST))
    engine.register(source.ctypes.data, source.size)

    def move(start: int) -> float:
        begin = time.perf_counter()
        left = [(offset, min(ENTRY_BYTES, nbytes - offset)) for offset in range(0, nbytes, ENTRY_BYTES)]
        flying: list[int] = []
        while left or flying:
            while left and len(flying) < ENTRIES:
                offset, count = left.pop()
                if packed:
                    ctypes.memmove(source.ctypes.data + start + offset, pool + start + offset, count)
                batch = engine.submit(address.text, source.ctypes.data + start + offset, address.number + start + offset, count)
                if batch is None:
                    raise RuntimeError("Mooncake refused a write of the ceiling")
                flying.append(batch)
            states = {batch: engine.check(batch) for batch in flying}
            if not {WriteStatus.DONE, WriteStatus.PENDING}.issuperset(states.values()):
                raise RuntimeError("Mooncake failed a write of the ceiling")
            flying = [batch for batch in flying if states[batch] is WriteStatus.PENDING]
            time.sleep(0.0001)
        return time.perf_counter() - begin

    times = [move(start) for start, _ in zip(places(near, nbytes), range(repeats + 1), strict=False)][1:]
    near.pipe.send(Address("done", 0))
    engine.close()
    return times


BOUNDS = {
    "digest.tcp": ("socket and a digest at both ends", partial(socket_seconds, digests=True)),
    "unpaced.tcp": ("socket without pacing", partial(socket_seconds, is_paced=False)),
}
"""What else is measured beside tcp with digests, and how."""
CEILINGS = {"shm": "memmove", "tcp": "loopback socket", "mooncake": "engine alone"}
PAIRED: dict[str, Callable[[Near, int], Generator[float]]] = {"shm": memmove_seconds, "tcp": socket_seconds}
"""Ceilings that are taken one by one."""


# ---------------------------------------------------------------- the runs


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of a few transfers, of as many at the backend's seam, of as many runs of the ceiling, and of one of each of BOUNDS."""

    moves: list[float]
    alone: list[float]
    stages: list[tuple[float, float, float]]
    tops: list[float]
    bounds: dict[str, float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.tops) / statistics.median(self.moves)

    @property
    def ratio_alone(self) -> float:
        return statistics.median(self.tops) / statistics.median(self.alone)


def take_turns(near: Near, case: Case, repeats: int) -> list[Turn]:
    shape, is_long = near.shape, case.nbytes >= LONG_BYTES
    if shape.backend not in PAIRED:
        return [take_turn(near, case, min(repeats, LONG_REPEATS) if is_long else repeats) for _ in range(TURNS)]
    has_bounds = shape.backend == "tcp" and shape.digests and case.nbytes >= GOAL_BYTES
    with ExitStack() as stack:
        top = stack.enter_context(closing(PAIRED[shape.backend](near, case.nbytes)))
        wanted = BOUNDS if has_bounds else {}
        bounds = {metric: stack.enter_context(closing(measure(near, case.nbytes))) for metric, (_, measure) in wanted.items()}
        return [take_pair(near, case, top, bounds) for _ in range((LONG_PAIRS if is_long else PAIRS) + 1)][1:]


def take_pair(near: Near, case: Case, top: Iterator[float], bounds: Mapping[str, Iterator[float]]) -> Turn:
    _, moved = near.move(case.num_tokens), near.move(case.num_tokens)
    _, alone = near.move_alone(case.num_tokens), near.move_alone(case.num_tokens)
    return Turn([moved], [alone], [near.stages], [second_of(top)], {metric: second_of(seconds) for metric, seconds in bounds.items()})


def second_of(seconds: Iterator[float]) -> float:
    return [next(seconds) for _ in range(2)][1]


def take_turn(near: Near, case: Case, repeats: int) -> Turn:
    moved = [(near.move(case.num_tokens), near.stages) for _ in range(repeats + 1)][1:]
    alone = [near.move_alone(case.num_tokens) for _ in range(repeats + 1)][1:]
    return Turn([seconds for seconds, _ in moved], alone, [each for _, each in moved], seconds_of_engine(near, case.nbytes, repeats), {})


def measure(near: Near, case: Case, repeats: int) -> list[Row]:
    """Rows of one case on one pair of processes."""
    near.move(case.num_tokens)  # warm: connection, page tables
    turns = take_turns(near, case, repeats)
    shape = near.shape
    goal = GOALS.get((shape.backend, shape.digests)) if case.nbytes >= GOAL_BYTES else None
    label = f"{case.name}, digests {'on' if shape.digests else 'off'}"
    samples = [seconds for turn in turns for seconds in turn.moves]
    top = statistics.median(seconds for turn in turns for seconds in turn.tops)
    alone = [seconds for turn in turns for seconds in turn.alone]
    rows = []
    for name, seconds, ratios in (("protocol", samples, [turn.ratio for turn in turns]), ("backend", alone, [turn.ratio_alone for turn in turns])):
        speed, ratio = beside(f"{name}.{shape.backend}", label, case, seconds, shape.backend, top), paired(ratios)
        rows.append(replace(speed, ratio=ratio.median, spread=ratio.spread, goal=goal, holds=None if goal is None else ratio.median >= goal))
    if case.nbytes == GOAL_BYTES:
        rows += where_time_goes(label, [each for turn in turns for each in turn.stages])
    rows += [bound_row(metric, case, turns, top) for metric in turns[0].bounds]
    if goal is not None and shape.backend == "mooncake":
        packs = seconds_of_engine(near, case.nbytes, repeats, packed=True)
        rows.append(beside("staging.mooncake", f"{case.name}, engine and a copy at the writer", case, packs, shape.backend, top))
        rows += mooncake_bound.rows(near, case.name, case.nbytes, TURNS * repeats)
    if case.nbytes <= 1 << 20:
        rows.append(row(f"handover.{shape.backend}", label, [each * 1e3 for each in samples], "ms"))
    return rows


def bound_row(metric: str, case: Case, turns: list[Turn], top: float) -> Row:
    what, _ = BOUNDS[metric]
    speed = beside(metric, f"{case.name}, {what}", case, [turn.bounds[metric] for turn in turns], "tcp", top)
    ratio = paired([statistics.median(turn.tops) / turn.bounds[metric] for turn in turns])
    return replace(speed, ratio=ratio.median, spread=ratio.spread)


def beside(metric: str, label: str, case: Case, samples: list[float], backend: str, top: float) -> Row:
    """A speed beside the ceiling; samples, top: seconds."""
    rates = [case.nbytes / seconds / 1e9 for seconds in samples]
    return row(metric, label, rates, "GB/s", against=CEILINGS[backend], against_value=case.nbytes / top / 1e9)


def where_time_goes(label: str, stages: list[tuple[float, float, float]]) -> list[Row]:
    """What is not bytes on their way costs the same whatever the size: code that has left the caches since the last transfer."""
    names = ("ticket → writes begun", "writes begun → Commit", "Commit → CommitAck")
    return [row(f"  {name}", label, [each[index] * 1e3 for each in stages], "ms") for index, name in enumerate(names)]


def run(backends: tuple[str, ...], *, quick: bool) -> Iterator[Row]:
    wanted = cases(quick=quick)
    repeats = 3 if quick else 5
    for backend in backends:
        for digests in (True, False):
            for page_bytes in dict.fromkeys(case.page_bytes for case in wanted):
                group = [case for case in wanted if case.page_bytes == page_bytes]
                num_pages = max(case.num_pages for case in group)
                near = Near(plain(backend, page_bytes, num_pages + num_pages % 2, digests=digests))
                try:
                    yield from measure_group(near, group, repeats)
                finally:
                    near.close()
        if transfer_load.has_two_cores():
            yield from transfer_load.rows(backend)


def measure_group(near: Near, group: list[Case], repeats: int) -> Iterator[Row]:
    cores = os.sched_getaffinity(0)
    near.move(group[0].num_tokens)  # all its threads run
    if transfer_load.has_two_cores():
        transfer_load.pin(os.getpid(), 0)
        transfer_load.pin(near.child_pid, 1)
    try:
        for case in group:
            yield from measure(near, case, repeats)
    finally:
        transfer_load.unpin(cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated, of " + ", ".join(BACKENDS))
    options = parser.parse_args()
    chosen = tuple(options.backends.split(","))
    if unknown := set(chosen) - set(BACKENDS):
        parser.error(f"unknown backends {sorted(unknown)}; choose from {', '.join(BACKENDS)}")
    rows = list(run(chosen, quick=options.quick))
    print_rows(rows)
    if options.json is not None:
        write_json(rows, options.json)


if __name__ == "__main__":
    main()

"""What a busy engine does to a transfer: the same transfers with an engine's steps running and without, in turns, in
one run. For `bench.transfer`.

Two cases. Other core: the engine is a process of its own on core 1, both ends of the transfer share core 0. Shared
core: the engine is a thread of the writer's process, so that it shares core 0 *and* the GIL with the mover; the reader
has core 1. There the elapsed time says little, so the figures are the bytes that the mover threads move per second of
their own CPU time, and how long they wait for the GIL after each stretch that they ran without it. Beside the other
core's case stands what its engine takes from a memmove, and from a copy that is digested twice as a transfer's bytes
are, with nothing of a transfer around it: a transfer that keeps as much of its speed as the latter loses it to the
memory.

    python -m bench.parts.transfer_load FD     the engine process: it steps until its end of the socket closes
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bench.harness.report import Row, row, row_of_turns
from bench.parts.engine_steps import EngineThread, Steps
from bench.parts.transfer_ends import PAGE_TOKENS, Near, plain
from pdcluster.transfer.backends.shm import TOLD_BYTES
from pdcluster.transfer.copying.copy import Payload, table_of

PAGE_BYTES = 64 << 10
CASE_BYTES = 64 << 20
CASE_TOKENS = CASE_BYTES // PAGE_BYTES * PAGE_TOKENS
BUSY_GOAL = 0.8
GIL_GOAL_S = 0.010
MOVER_THREADS = ("kv-copy", "kv-send", "kv-mooncake")


def pin(pid: int, core: int) -> None:
    """All threads of a process on one core; threads that it starts later too."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def unpin(cores: set[int]) -> None:
    """Let all threads of this process run on these cores again."""
    for thread in os.listdir(f"/proc/{os.getpid()}/task"):
        os.sched_setaffinity(int(thread), cores)


def has_two_cores() -> bool:
    return {0, 1} <= os.sched_getaffinity(0)


class EngineProcess:
    """Steps in a process of its own, stopped but for `resume`."""

    def __init__(self, core: int) -> None:
        self._sock, there = socket.socketpair()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.parts.transfer_load", str(there.fileno())], pass_fds=[there.fileno()]
        )
        there.close()
        if self._sock.recv(1) != b"r":
            raise RuntimeError("the engine process did not start")
        pin(self._child.pid, core)
        self.pause()

    def pause(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._sock.close()
        self.resume()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one transfer: elapsed, CPU time of the mover threads."""

    seconds: float
    mover_seconds: float


def mover_cpu() -> float:
    movers = [
        thread for thread in threading.enumerate() if thread.name.startswith(MOVER_THREADS) and thread.ident is not None
    ]
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in movers if thread.ident is not None
    )


def sample(near: Near) -> Sample:
    before = mover_cpu()
    seconds = near.move(CASE_TOKENS)
    return Sample(seconds, mover_cpu() - before)


def start(backend: str, far_core: int) -> Near:
    near = Near(plain(backend, PAGE_BYTES, CASE_BYTES // PAGE_BYTES, digests=True))
    near.move(CASE_TOKENS)
    pin(os.getpid(), 0)
    pin(near.child_pid, far_core)
    near.move(CASE_TOKENS)
    return near


def other_core(backend: str, repeats: int) -> Iterator[Row]:
    near, engine = start(backend, 0), EngineProcess(1)
    idle: list[list[float]] = []
    busy: list[list[float]] = []
    try:
        for _ in range(repeats):
            idle.append(seconds_of_all(near))
            engine.resume()
            time.sleep(0.02)
            busy.append(seconds_of_all(near))
            engine.pause()
    finally:
        engine.close()
        near.close()
    cases = (
        (f"busy.{backend}", "engine on the other core", BUSY_GOAL),
        ("  busy.memmove", f"the same of a copy, beside {backend}", None),
        ("  busy.digested", f"of a copy that both ends digest, in one thread, beside {backend}", None),
    )
    for index, (metric, case, goal) in enumerate(cases):
        yield other_core_row(metric, case, [each[index] for each in idle], [each[index] for each in busy], goal)


def seconds_of_all(near: Near) -> list[float]:
    """Of a transfer, of a memmove of as many bytes, and of what such a transfer does with the memory by itself: how
    much of a loss is the memory's, which the cores share."""
    return [near.move(CASE_TOKENS), seconds_of(lambda: copy(near)), seconds_of(lambda: copy_and_digest(near))]


def seconds_of(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def copy(near: Near) -> None:
    ctypes.memmove(near.spare.bytes.ctypes.data, near.pools[0].bytes.ctypes.data, CASE_BYTES)


def copy_and_digest(near: Near) -> None:
    """What both ends of a transfer over shm do on the core that they share here, piece by piece: copy and digest, then
    digest the copy."""
    source, target = near.pools[0].bytes.ctypes.data, near.spare.bytes.ctypes.data
    written, read = (
        Payload(table_of([(to, each, CASE_BYTES)]), digests=True) for to, each in ((target, source), (0, target))
    )
    for _ in range(0, CASE_BYTES, TOLD_BYTES):
        written.advance(TOLD_BYTES)
        read.advance(TOLD_BYTES)
    if written.digest() != read.digest():
        raise RuntimeError("the copy that is to be compared with differs from its source")


def other_core_row(metric: str, case: str, idle: list[float], busy: list[float], goal: float | None) -> Row:
    """Seconds of turns; in each one idle and one busy."""
    own, other = ([CASE_BYTES / each / 1e9 for each in seconds] for seconds in (busy, idle))
    return row_of_turns(metric, case, own, "GB/s", against="idle", other=other, goal=goal)


def shared_core(backend: str, repeats: int) -> Iterator[Row]:
    near, engine = start(backend, 1), EngineThread()
    idle: list[Sample] = []
    busy: list[Sample] = []
    waits: list[float] = []
    try:
        for _ in range(repeats):
            idle.append(sample(near))
            near.gil_waits.seconds.clear()
            engine.going.set()
            time.sleep(0.02)
            busy.append(sample(near))
            engine.going.clear()
            waits += near.gil_waits.seconds
            time.sleep(0.05)  # the engine's last step ends
    finally:
        engine.close()
        near.close()
    efficiency = [CASE_BYTES / each.mover_seconds / 1e9 for each in busy]
    usual = float(np.median([CASE_BYTES / each.mover_seconds / 1e9 for each in idle]))
    yield row(
        f"busy.{backend}",
        "engine on the mover's core",
        efficiency,
        "GB/CPU s",
        against="idle",
        against_value=usual,
        goal=BUSY_GOAL,
    )
    elapsed = [CASE_BYTES / each.seconds / 1e9 for each in busy]
    idle_elapsed = float(np.median([CASE_BYTES / each.seconds / 1e9 for each in idle]))
    yield row(
        f"busy.{backend}",
        "engine on the mover's core, elapsed",
        elapsed,
        "GB/s",
        against="idle",
        against_value=idle_elapsed,
    )
    for quantile in (50, 99):
        seconds = float(np.percentile(waits, quantile))
        metric, case = f"gil.{backend}", f"mover's wait, p{quantile} of {len(waits)}"
        if quantile == 99:
            limit_ms = GIL_GOAL_S * 1e3
            yield Row(
                metric, case, seconds * 1e3, "ms", against="limit", against_value=limit_ms, better="less", goal=1.0
            )
        else:
            yield Row(metric, case, seconds * 1e3, "ms")


def rows(backend: str) -> Iterator[Row]:
    repeats = 21
    cores = os.sched_getaffinity(0)
    try:
        yield from other_core(backend, repeats)
        yield from shared_core(backend, repeats)
    finally:
        unpin(cores)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        steps = Steps()
        sock.send(b"r")
        sock.setblocking(False)
        while True:
            steps.step()
            try:
                sock.recv(1)
                return
            except BlockingIOError:
                continue


if __name__ == "__main__":
    main()

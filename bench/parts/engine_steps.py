"""An engine that decodes all the time, beside which other things are measured: in a thread, timed or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLEEP_S = 0.001


class Steps:
    """A real engine that decodes 8 rows of 512 tokens, over and over."""

    def __init__(self) -> None:
        from bench.engine import CACHE, PAGE_TOKENS, decode_plan, random_checkpoint
        from pdcluster.engine.engine import Engine, EngineConfig

        checkpoint = random_checkpoint(CACHE / "bench-engine-30m")
        self._engine = Engine(
            EngineConfig(checkpoint, CACHE / "kernels", page_tokens=PAGE_TOKENS, num_pages=256, threads=1)
        )
        self._engine.warmup()
        self._plan = decode_plan(self._engine, 8, 512)
        self.count = 0

    def step(self) -> None:
        self._engine.step(self._plan)
        self.count += 1


class EngineThread:
    """Steps in a thread of this process, while `going` is set."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.going = threading.Event()
        self.on_step: Callable[[], object] = lambda: None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="bench-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            self.going.wait()
            self.steps.step()
            self.on_step()

    def close(self) -> None:
        self._ending = True
        self.going.set()
        self._thread.join()


class TimedEngine:
    """Steps in a thread of this process, each timed; and a thread that only sleeps, to see how late it wakes."""

    def __init__(self) -> None:
        self._engine = EngineThread()
        self._ends: list[float] = []
        self._stalls: list[float] = []
        self._sleeping: threading.Thread | None = None
        self._engine.on_step = lambda: self._ends.append(time.perf_counter())

    def begin(self) -> None:
        self._ends.clear()
        self._stalls.clear()
        self._engine.going.set()
        self._sleeping = threading.Thread(target=self._sleep, name="bench-sleeper", daemon=True)
        self._sleeping.start()

    def end(self) -> tuple[list[float], list[float]]:
        """When steps ended, and by how many seconds too long each sleep of SLEEP_S was."""
        self._engine.going.clear()
        assert self._sleeping is not None
        self._sleeping.join()
        return list(self._ends), list(self._stalls)

    def _sleep(self) -> None:
        while self._engine.going.is_set():
            begin = time.perf_counter()
            time.sleep(SLEEP_S)
            self._stalls.append(time.perf_counter() - begin - SLEEP_S)

"""A thread that computes one step at a time, and the descriptor that says when one is done.

Requirements:

1. Whatever the computation raises is raised by `collect`, once, with its traceback. The thread goes on.
2. `done_fd` becomes readable no later than `collect` can return. After that it is not readable unless the next step is
   done, too.
3. Steps are computed and collected in the order of their launch, at most PLACES between launch and collect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from pdcluster.core.errors import DeadlineExceeded, IntegrityError
from pdcluster.core.step import StepPlan, StepResult

log = logging.getLogger(__name__)

# One step runs, one waits behind it, so that the thread has something to do when the first is done.
PLACES = 2

# How long `close` waits for a running step.
CLOSE_S = 10.0


class EngineWorker:
    """launch, collect and close from one thread, the owner's."""

    def __init__(self, compute: Callable[[StepPlan], StepResult], threads: int) -> None:
        self._compute = compute
        self._threads = threads
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        # Steps that were launched and not collected.
        self.num_in_flight = 0
        self._closed = False
        # Whether the thread outlived `close`.
        self.is_stuck = False
        self.done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def require_place(self) -> None:
        """Raises IntegrityError when a step cannot be launched now."""
        if self._closed:
            raise IntegrityError("launch on a closed engine")
        if self.num_in_flight == PLACES:
            raise IntegrityError(f"launch while {PLACES} steps are in flight; collect one first")

    def launch(self, plan: StepPlan) -> None:
        self.require_place()
        self.num_in_flight += 1
        self._plans.put(plan)

    def collect(self, timeout: float | None) -> StepResult:
        if not self.num_in_flight:
            raise IntegrityError("collect without a launched step")
        try:
            outcome = self._outcomes.get(timeout=timeout)
        except queue.Empty:
            raise DeadlineExceeded(
                f"the step is not done after {timeout} s; collect it later", stage="liveness"
            ) from None
        os.eventfd_read(self.done_fd)
        self.num_in_flight -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Wait for the steps in flight, up to CLOSE_S, then stop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._plans.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.is_stuck = True
            log.error("the engine's thread did not end its step within %g s", CLOSE_S)
        else:
            os.close(self.done_fd)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a name for tools that look at threads
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("engine")
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while (plan := self._plans.get()) is not None:
                outcome = self._outcome(plan)
                # Before the outcome is there to be collected, so that collect always finds the event it has to clear
                # (2).
                os.eventfd_write(self.done_fd, 1)
                self._outcomes.put(outcome)

    def _outcome(self, plan: StepPlan) -> StepResult | Exception:
        try:
            return self._compute(plan)
        except Exception as error:
            log.exception("the engine failed in a step of %d rows", len(plan.rows))
            return error

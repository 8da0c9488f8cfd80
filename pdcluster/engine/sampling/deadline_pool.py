"""Jobs that must answer in time, done one after the other in a thread of their own.

A job that takes too long is left behind, with its thread, which nobody can end from outside. It goes on at the lowest
priority and answers nobody. It keeps no other from being done. But the more are left, the less patience there is with
the next. Jobs are turned away only while as many as are allowed go on.

For calls of libraries that release the GIL and whose time depends on what a stranger sent.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# Priority of a thread that may take any time.
LOWEST = 19


@dataclass(frozen=True, slots=True)
class MissedDeadline:
    """The answer of a job that was left behind. is_starved: it had less than half of its time on a CPU, so the machine
    may be slow.
    """

    is_starved: bool = False


class PoolFull:
    """What a job answers that was not begun: too many were left behind."""


TURNED_AWAY = PoolFull()

# Threads that may go on behind; each has a stack, and whatever its job has taken.
MAX_LEFT = 16
# Share of its time that a job gets, however many were left behind. All of them together hold up nobody for much more
# than MAX_LEFT / 3 times it.
LEAST_PATIENCE = 0.25


def yield_to_others(native_id: int = 0, priority: int = LOWEST) -> None:
    """The thread (0: this one) computes when nobody else wants to. Linux has a priority for each thread; elsewhere
    nothing is changed."""
    try:
        os.setpriority(os.PRIO_PROCESS, native_id, priority)
    except OSError as error:
        log.debug("the priority of a thread stays as it is: %s", error)


class DeadlinePool(Generic[Answer]):
    """run and close from one thread, num_left from any."""

    def __init__(
        self,
        name: str,
        limit_s: float,
        max_left: int = MAX_LEFT,
        answers: Callable[[], queue.SimpleQueue[Answer]] = queue.SimpleQueue,
    ) -> None:
        """limit_s: of each job. answers: makes the queue whose `get` waits for one."""
        self._max_left = max_left
        self._new_answers = answers
        self._name = name
        self._limit_s = limit_s
        self._helper: _Helper[Answer] | None = None
        self._left: list[_Helper[Answer]] = []

    @property
    def num_left(self) -> int:
        """Threads that were left behind and still compute."""
        return sum(helper.thread.is_alive() for helper in self._left)

    def run(
        self, jobs: Sequence[Callable[[], Answer]], kinds: Sequence[Hashable] | None = None
    ) -> list[Answer | MissedDeadline | PoolFull]:
        """Their answers, in their order. What a job raises is a bug: its thread ends, and it is late. kinds: of a kind
        that was late no other job of these is begun; None: each is its own."""
        kinds = range(len(jobs)) if kinds is None else kinds
        late: dict[Hashable, MissedDeadline] = {}
        answers: list[Answer | MissedDeadline | PoolFull] = []
        while (done := len(answers)) < len(jobs):
            if kinds[done] in late:
                answers.append(late[kinds[done]])
                continue
            num_left = self.num_left
            if num_left >= self._max_left:
                return answers + [late.get(kind, TURNED_AWAY) for kind in kinds[done:]]
            limit_s = self._limit_s * max(1 / (1 + num_left), LEAST_PATIENCE)
            until = next((place for place in range(done, len(jobs)) if kinds[place] in late), len(jobs))
            helper = self._helper = self._helper or _Helper[Answer](self._name, self._new_answers())
            answers += helper.run(jobs[done:until], limit_s)
            if len(answers) < until:
                late[kinds[len(answers)]] = word = MissedDeadline(is_starved=helper.used_s < limit_s / 2)
                answers.append(word)
                self._leave(helper)
        return answers

    def close(self) -> None:
        """Waits for nobody. Idempotent."""
        if self._helper is not None:
            self._helper.leave()
            self._helper = None

    def _leave(self, helper: _Helper[Answer]) -> None:
        helper.leave()
        if helper.thread.native_id is not None:
            yield_to_others(helper.thread.native_id)
        self._left = [*(each for each in self._left if each.thread.is_alive()), helper]
        self._helper = None


class _Helper(Generic[Answer]):
    """A job is begun only while nobody has left: what it changes may be another helper's to change from then on."""

    def __init__(self, name: str, answers: queue.SimpleQueue[Answer]) -> None:
        self._jobs: queue.SimpleQueue[Sequence[Callable[[], Answer]]] = queue.SimpleQueue()
        self._answers = answers
        self._leaving = threading.Lock()
        self._is_left = False
        self._began_s = 0.0
        # CPU seconds it had used when a job that was left answered. The system says nothing of a thread that ended.
        self._ended_s = math.inf
        # On a CPU, of the job that was late.
        self.used_s = 0.0
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def run(self, jobs: Sequence[Callable[[], Answer]], limit_s: float) -> list[Answer]:
        """Fewer answers than jobs when one is late; then the others are not begun."""
        self._jobs.put(jobs)
        answers: list[Answer] = []
        for _ in jobs:
            try:
                answers.append(self._answers.get(timeout=limit_s))
            except queue.Empty:
                with self._leaving:
                    self._is_left = self._answers.empty()
                if self._is_left:
                    self.used_s = min(_cpu_s(self.thread), self._ended_s) - self._began_s
                    break
                answers.append(self._answers.get())  # it came at the last moment
        return answers

    def leave(self) -> None:
        self._is_left = True
        self._jobs.put(())

    def _work(self) -> None:
        while not self._is_left:
            for job in self._jobs.get():
                answer = job()
                with self._leaving:
                    if self._is_left:
                        self._ended_s = time.thread_time()
                        return
                    self._began_s = time.thread_time()  # of the next job, which may get no CPU to begin with
                    self._answers.put(answer)


def _cpu_s(thread: threading.Thread) -> float:
    """What another thread used of a CPU since its start. Endless where the system does not tell, or the thread has
    ended.
    """
    try:
        told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    except OSError:
        return math.inf
    return int(told.split()[0]) / 1e9

"""Jobs beside the steps: their answers in order, and one that never ends holds up nobody.

A job says itself when its time is over (`Patience`), so that no load of the machine makes another one late.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pdcluster.engine.sampling import deadline_pool
from pdcluster.engine.sampling.deadline_pool import (
    LEAST_PATIENCE,
    MAX_LEFT,
    TURNED_AWAY,
    DeadlinePool,
    MissedDeadline,
)

# Of a job that waits, and computes nothing.
LATE = MissedDeadline(is_starved=True)
LIMIT_S = 0.2


class Patience:
    """Time limits that end when a job says so. limits_s: of each wait for an answer."""

    def __init__(self) -> None:
        self.limits_s: list[float] = []
        self._is_over, self._may_end = threading.Event(), threading.Event()

    def hang(self) -> bool:
        """A job that waits until the end of the test."""
        self.run_out()
        return self._may_end.wait(60)

    def compute(self) -> bool:
        """A job that computes for longer than its time, and until the end of the test."""
        until = time.thread_time() + LIMIT_S
        while time.thread_time() < until:
            sum(range(100))
        self.run_out()
        while not self._may_end.is_set():
            sum(range(100))
        return True

    def run_out(self) -> None:
        self._is_over.set()

    def release(self) -> None:
        self._may_end.set()

    def wait(self, get: Callable[[float], object], limit_s: float) -> object:
        """What `get` returns, unless the time is over before there is anything."""
        self.limits_s.append(limit_s)
        while not self._is_over.wait(0.001):
            with contextlib.suppress(queue.Empty):
                return get(0.01)
        with contextlib.suppress(queue.Empty):
            return get(0.0)  # of a job before the one that said so
        self._is_over.clear()
        raise queue.Empty


class PatientQueue(queue.SimpleQueue):
    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        if timeout is None:
            return super().get(block)
        return self._patience.wait(lambda wait_s: super(PatientQueue, self).get(timeout=wait_s), timeout)


@pytest.fixture
def patience() -> Iterator[Patience]:
    patience = Patience()
    yield patience
    patience.release()


@pytest.fixture
def open_pool(patience: Patience) -> Iterator[Callable[..., DeadlinePool]]:
    pools = []

    def opened(max_left: int = MAX_LEFT) -> DeadlinePool:
        pools.append(DeadlinePool("test", LIMIT_S, max_left, answers=lambda: PatientQueue(patience)))
        return pools[-1]

    yield opened
    for pool in pools:
        pool.close()


def await_end_of(pool: DeadlinePool) -> None:
    """Those that were left have ended, within the time of the test."""
    while pool.num_left:
        time.sleep(0.002)


def test_answers_come_in_the_order_of_the_jobs(open_pool):
    pool = open_pool()
    for _ in range(3):
        assert pool.run([lambda number=number: number for number in range(5)]) == list(range(5))
    assert pool.run([]) == []


def test_a_job_is_late_when_its_seconds_are_over(patience):
    pool = DeadlinePool[bool]("test", 0.05)
    try:
        assert pool.run([patience.hang]) == [LATE] and pool.num_left == 1
    finally:
        pool.close()


def test_a_late_job_is_left_behind_and_those_behind_it_are_done(patience, open_pool):
    pool = open_pool()
    assert pool.run([lambda: "a", patience.hang, lambda: "b"]) == ["a", LATE, "b"]
    assert pool.num_left == 1
    assert pool.run([lambda: "c"]) == ["c"]
    patience.release()
    await_end_of(pool)
    assert pool.run([lambda: "d"]) == ["d"]


def test_no_more_threads_than_allowed_are_left_behind(patience, open_pool):
    pool = open_pool(max_left=2)
    assert pool.run([patience.hang] * 5) == [LATE, LATE, TURNED_AWAY, TURNED_AWAY, TURNED_AWAY] and pool.num_left == 2
    assert pool.run([lambda: True]) == [TURNED_AWAY] and pool.num_left == 2
    patience.release()
    await_end_of(pool)
    assert pool.run([lambda: True]) == [True]


def test_of_a_kind_that_was_late_no_other_job_is_begun(patience, open_pool):
    pool, begun = open_pool(), []

    def job(name: str, *, hangs: bool = False) -> Callable[[], str]:
        def work() -> str:
            begun.append(name)
            if hangs:
                patience.hang()
            return name

        return work

    jobs = [
        job("a"),
        job("slow", hangs=True),
        job("b"),
        job("slow too", hangs=True),
        job("c"),
        job("slow again", hangs=True),
    ]
    assert pool.run(jobs, ["x", "s", "x", "s", "y", "s"]) == ["a", LATE, "b", LATE, "c", LATE]
    assert begun == ["a", "slow", "b", "c"] and pool.num_left == 1


def test_a_job_of_a_kind_that_was_late_is_late_too_and_not_turned_away(patience, open_pool):
    """It was told to come back later, and hung in another place then."""
    pool = open_pool(max_left=1)
    assert pool.run([patience.hang] * 4, ["x", "y", "x", "y"]) == [LATE, TURNED_AWAY, LATE, TURNED_AWAY]


def test_the_more_are_left_the_less_time_the_next_one_gets(patience, open_pool):
    """All together hold up nobody for more than a few times what one may take."""
    assert open_pool().run([patience.hang] * (MAX_LEFT + 1)) == [LATE] * MAX_LEFT + [TURNED_AWAY]
    limits_s = patience.limits_s
    assert len(limits_s) == MAX_LEFT and limits_s == sorted(limits_s, reverse=True)
    assert limits_s[0] == LIMIT_S and limits_s[-1] == LIMIT_S * LEAST_PATIENCE
    assert sum(limits_s) < MAX_LEFT / 2.5 * LIMIT_S


def test_its_thread_ends_with_it():
    threads = set(threading.enumerate())
    pool = DeadlinePool[int]("test", 30.0)
    pool.run([lambda: 1])
    (thread,) = set(threading.enumerate()) - threads
    pool.close()
    pool.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_job_that_computes_is_told_from_one_that_gets_no_cpu(patience, open_pool):
    assert open_pool().run([patience.compute, patience.hang, lambda: True]) == [
        MissedDeadline(is_starved=False),
        LATE,
        True,
    ]


def test_a_starved_job_that_ends_just_when_it_is_left_is_told_by_what_it_used(patience, open_pool, monkeypatch):
    cpu_s = deadline_pool._cpu_s

    def cpu_s_of_ended(thread: threading.Thread) -> float:
        patience.release()
        thread.join(60)
        return cpu_s(thread)

    monkeypatch.setattr(deadline_pool, "_cpu_s", cpu_s_of_ended)
    assert open_pool().run([patience.hang]) == [LATE]


class SlowToHear(queue.SimpleQueue):
    """An answer that comes at the last moment: once whoever waits for it has given up, it is there, and the next job
    has begun."""

    def __init__(self, has_begun: threading.Event) -> None:
        self.has_begun = has_begun

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        if timeout is not None and not self.has_begun.is_set():
            self.has_begun.wait(60)
            raise queue.Empty
        return super().get(block, timeout)


def test_no_job_is_done_twice_when_the_one_before_it_answers_at_the_last_moment():
    has_begun, done = threading.Event(), []
    pool = DeadlinePool[str]("test", 30.0, answers=lambda: SlowToHear(has_begun))

    def second() -> str:
        has_begun.set()
        done.append("second")
        return "second"

    try:
        assert pool.run([lambda: "first", second]) == ["first", "second"]
        assert done == ["second"] and pool.num_left == 0
    finally:
        pool.close()

"""Jobs beside the steps: their answers in order, and one that never ends holds up nobody."""

import queue
import threading
import time
from collections.abc import Callable

from pdcluster.engine.sampling import deadline_pool as aside_module
from pdcluster.engine.sampling.deadline_pool import (
    LEAST_PATIENCE,
    MAX_LEFT,
    TURNED_AWAY,
    DeadlinePool,
    MissedDeadline,
    PoolFull,
)

# Of a job that waits, and computes nothing.
LATE = MissedDeadline(is_starved=True)


def test_answers_come_in_the_order_of_the_jobs():
    aside = DeadlinePool[int]("test", 30.0)
    try:
        for _ in range(3):
            assert aside.run([lambda number=number: number for number in range(5)]) == list(range(5))
        assert aside.run([]) == []
    finally:
        aside.close()


def test_a_late_job_is_left_behind_and_those_behind_it_are_done():
    aside, may_end = DeadlinePool[str]("test", 0.1), threading.Event()

    def hangs() -> str:
        may_end.wait(60)
        return "nobody hears this"

    try:
        assert aside.run([lambda: "a", hangs, lambda: "b"]) == ["a", LATE, "b"]
        assert aside.num_left == 1
        assert aside.run([lambda: "c"]) == ["c"]
        (left,) = aside._left
        may_end.set()
        left.thread.join(60)
        assert aside.num_left == 0 and aside.run([lambda: "d"]) == ["d"]
    finally:
        may_end.set()
        aside.close()


def test_no_more_threads_than_allowed_are_left_behind():
    aside, may_end = DeadlinePool[bool]("test", 0.05, max_left=2), threading.Event()
    try:
        hangs = [lambda: may_end.wait(60)] * 5
        assert aside.run(hangs) == [LATE, LATE, TURNED_AWAY, TURNED_AWAY, TURNED_AWAY] and aside.num_left == 2
        assert aside.run([lambda: True]) == [TURNED_AWAY] and aside.num_left == 2
        left = list(aside._left)
        may_end.set()
        for helper in left:
            helper.thread.join(60)
        assert aside.run([lambda: True]) == [True] and aside.num_left == 0
    finally:
        may_end.set()
        aside.close()


def test_of_a_kind_that_was_late_no_other_job_is_begun():
    aside, may_end, begun = DeadlinePool[str]("test", 0.1), threading.Event(), []

    def job(name: str, *, hangs: bool = False) -> Callable[[], str]:
        def work() -> str:
            begun.append(name)
            if hangs:
                may_end.wait(60)
            return name

        return work

    try:
        jobs = [
            job("a"),
            job("slow", hangs=True),
            job("b"),
            job("slow too", hangs=True),
            job("c"),
            job("slow again", hangs=True),
        ]
        assert aside.run(jobs, ["x", "s", "x", "s", "y", "s"]) == ["a", LATE, "b", LATE, "c", LATE]
        assert begun == ["a", "slow", "b", "c"] and aside.num_left == 1
    finally:
        may_end.set()
        aside.close()


def test_a_job_of_a_kind_that_was_late_is_late_too_and_not_turned_away():
    """It was told to come back later, and hung in another place then."""
    aside, may_end = DeadlinePool[bool]("test", 0.1, max_left=1), threading.Event()
    try:
        assert aside.run([lambda: may_end.wait(60)] * 4, ["x", "y", "x", "y"]) == [LATE, TURNED_AWAY, LATE, TURNED_AWAY]
    finally:
        may_end.set()
        aside.close()


def test_the_more_are_left_the_less_time_the_next_one_gets(monkeypatch):
    """All together hold up nobody for more than a few times what one may take."""
    aside, may_end, limits = DeadlinePool[bool]("test", 0.08), threading.Event(), []
    run = aside_module._Helper.run
    monkeypatch.setattr(
        aside_module._Helper, "run", lambda self, jobs, limit_s: (limits.append(limit_s), run(self, jobs, limit_s))[1]
    )
    try:
        assert aside.run([lambda: may_end.wait(60)] * (MAX_LEFT + 1)) == [LATE] * MAX_LEFT + [TURNED_AWAY]
        assert limits[0] == 0.08 and limits == sorted(limits, reverse=True) and limits[-1] == 0.08 * LEAST_PATIENCE
        assert sum(limits) < MAX_LEFT / 2.5 * 0.08
    finally:
        may_end.set()
        aside.close()


def test_its_thread_ends_with_it():
    aside = DeadlinePool[int]("test", 30.0)
    aside.run([lambda: 1])
    helper = aside._helper
    aside.close()
    aside.close()
    assert helper is not None
    helper.thread.join(60)
    assert not helper.thread.is_alive()


def test_a_job_that_computes_is_told_from_one_that_gets_no_cpu():
    """On a machine that gives the first one nothing either, not at every try."""
    may_end = threading.Event()

    def computes() -> bool:
        until = time.monotonic() + 60
        while not may_end.is_set() and time.monotonic() < until:
            sum(range(100))
        return may_end.is_set()

    def told() -> list[bool | MissedDeadline | PoolFull]:
        aside = DeadlinePool[bool]("test", 0.2)
        try:
            return aside.run([computes, lambda: may_end.wait(60), lambda: True])
        finally:
            aside.close()

    try:
        assert any(told() == [MissedDeadline(is_starved=False), LATE, True] for _ in range(10))
    finally:
        may_end.set()


def test_a_starved_job_that_ends_just_when_it_is_left_is_told_by_what_it_used(monkeypatch):
    may_end, told = threading.Event(), aside_module._cpu_s

    def told_late(thread: threading.Thread) -> float:
        may_end.set()
        thread.join(60)
        return told(thread)

    monkeypatch.setattr(aside_module, "_cpu_s", told_late)
    aside = DeadlinePool[bool]("test", 0.2)
    try:
        assert aside.run([lambda: may_end.wait(60)]) == [LATE]
    finally:
        may_end.set()
        aside.close()


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
    aside, has_begun, done = DeadlinePool[str]("test", 30.0), threading.Event(), []

    def second() -> str:
        has_begun.set()
        done.append("second")
        return "second"

    try:
        aside.run([lambda: "to make the helper"])
        assert aside._helper is not None
        aside._helper._answers = SlowToHear(has_begun)
        assert aside.run([lambda: "first", second]) == ["first", "second"]
        assert done == ["second"] and aside.num_left == 0
    finally:
        aside.close()

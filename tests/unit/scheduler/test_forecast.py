"""What a refusal says about coming back: told from the rows that run and the steps that ran."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, make_sequence

from pdcluster.core.errors import Overloaded
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.forecast import LONGEST_S, SHORTEST_S
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits

PAGE = 4
DEFAULT_S = 0.5


class Node:
    """A step takes `step_s`."""

    def __init__(self, num_pages: int = 64, step_s: float = 0.01, **limits: int) -> None:
        self.now = 0.0
        self.step_s = step_s
        chosen = {"token_budget": 16, "max_rows": 2, "max_waiting": 2, "max_len": 200, "reserve_tokens": 4, **limits}
        self.scheduler = Scheduler(
            PagePool(num_pages, PAGE, PAGE), SchedulerLimits(**chosen, retry_after_s=DEFAULT_S), clock=lambda: self.now
        )
        self.engine = FakeEngine(num_pages, PAGE)

    def add(self, key: str, length: int = 8, max_tokens: int = 10, base: int = 0, **options: object) -> None:
        self.scheduler.add(
            make_sequence(list(range(base, base + length)), key=key, max_tokens=max_tokens, ignore_eos=True, **options)
        )

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.now += self.step_s
        self.scheduler.update(plan, self.engine.run(plan))

    def refused_s(self, length: int = 8) -> float:
        with pytest.raises(Overloaded) as caught:
            self.scheduler.reserve(make_sequence(list(range(100, 100 + length)), key="slot", max_tokens=10))
        return caught.value.retry_after_s


def test_without_rows_the_first_one_that_ends_decides() -> None:
    node = Node()
    node.add("long", max_tokens=100)
    node.add("short", max_tokens=21)
    node.step()
    assert node.refused_s() == pytest.approx(0.2), "20 more steps of 10 ms"
    node.step()
    assert node.refused_s() == pytest.approx(0.19)


def test_slower_steps_are_a_longer_wait_and_an_end_far_off_is_not_waited_for() -> None:
    slow = Node(step_s=0.1)
    slow.add("a", max_tokens=6)
    slow.add("b", max_tokens=6)
    slow.step()
    assert slow.refused_s() == pytest.approx(0.5)
    far = Node(step_s=1.0)
    far.add("a", max_tokens=100)
    far.add("b", max_tokens=100)
    far.step()
    assert far.refused_s() == LONGEST_S


def test_a_step_that_took_no_time_still_leaves_a_pause() -> None:
    node = Node(step_s=0.0)
    node.add("a")
    node.add("b")
    node.step()
    assert node.refused_s() == SHORTEST_S


def test_without_pages_as_many_rows_must_end_as_it_takes() -> None:
    node = Node(num_pages=16, max_rows=8)
    node.add("first", length=12, max_tokens=11)
    node.add("second", length=12, max_tokens=31, base=50)
    for _ in range(3):
        node.step()
    early, late = node.refused_s(length=36), node.refused_s(length=52)
    assert early == pytest.approx(0.08, abs=0.03), "the first row's pages are enough"
    assert late == pytest.approx(0.28, abs=0.03), "both are needed"


def test_what_does_not_end_by_itself_is_asked_again_after_the_default() -> None:
    """Slots wait for other nodes: nothing that runs here says when they end."""
    node = Node()
    for key in ("a", "b"):
        node.scheduler.reserve(make_sequence(list(range(8)), key=key, max_tokens=9))
    assert node.refused_s() == DEFAULT_S


def test_a_full_queue_moves_when_the_prompts_before_it_are_computed() -> None:
    node = Node(max_rows=4, max_waiting=1, token_budget=16)
    node.add("a", length=160, max_tokens=2)
    node.step()
    node.add("b")
    with pytest.raises(Overloaded, match="1 requests are waiting") as caught:
        node.add("c")
    assert caught.value.retry_after_s == pytest.approx(0.1, abs=0.011), "144 tokens are left, 16 a step"


def test_remote_prefills_stay_in_the_queue_while_they_may_not_be_admitted_and_others_pass() -> None:
    node = Node(max_waiting=20, max_rows=4)
    node.scheduler.admit_remote = False
    for number in range(15):
        node.add(f"remote-{number}", remote=True)
    node.add("local", max_tokens=1)
    node.step()
    assert node.scheduler.find("local") is None, "it ran and ended"
    assert node.scheduler.load().waiting == 15 and node.scheduler.schedule() is None
    node.scheduler.admit_remote = True
    node.step()
    assert node.scheduler.load().waiting < 15
    node.scheduler.check_integrity()

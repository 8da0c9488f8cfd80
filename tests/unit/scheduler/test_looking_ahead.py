"""The step behind the one in flight: which rows it has before their tokens are known, when there is none, and what it
keeps until it is over."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, kv_of, make_sequence, reference

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import Sampling
from pdcluster.core.sampling import Shaping
from pdcluster.core.step import StepPlan
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits, Update
from pdcluster.scheduler.sequence import Sequence

PAGE = 4
PROMPT = [1, 2, 3, 4, 5]


class Node:
    def __init__(self, num_pages: int = 32, **limits: int) -> None:
        self.pool = PagePool(num_pages, PAGE, PAGE)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerLimits(**{"token_budget": 16, "max_rows": 4, "max_waiting": 8, "max_len": 64, **limits}),
            lambda: 0.0,
        )
        self.engine = FakeEngine(num_pages, PAGE)
        self.said: dict[str, list[int]] = {}

    def add(self, key: str, prompt: list[int] = PROMPT, *, remote: bool = False, **sampling: object) -> Sequence:
        sequence = make_sequence(prompt, key=key, remote=remote, **{"max_tokens": 20, **sampling})
        self.scheduler.add(sequence)
        return sequence

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def look_ahead(self) -> StepPlan:
        plan = self.scheduler.look_ahead()
        assert plan is not None
        return plan

    def collect(self, plan: StepPlan) -> list[Update]:
        updates = self.scheduler.update(plan, self.engine.run(plan))
        for update in updates:
            if update.token is not None:
                self.said.setdefault(update.key, []).append(update.token)
        self.scheduler.check_integrity()
        return updates

    def decoding(self, key: str, prompt: list[int] = PROMPT, **sampling: object) -> Sequence:
        """A row whose prompt is computed."""
        sequence = self.add(key, prompt, **sampling)
        self.collect(self.schedule())
        return sequence


def right(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return reference(prompt, Sampling(max_tokens=count, seed=0), eos=frozenset(), max_len=64)[0]


def keys(plan: StepPlan) -> list[str]:
    return [row.request for row in plan.rows]


def test_a_row_goes_on_with_a_token_that_is_not_known_yet():
    node = Node()
    sequence = node.decoding("a")
    first = node.schedule()
    second = node.look_ahead()
    (row,) = second.rows
    assert row.follows and (row.start, row.output_index, len(row.tokens)) == (sequence.num_tokens, 2, 1)
    assert node.scheduler.look_ahead() is None, "two steps are in flight"
    node.collect(first)
    third = node.look_ahead()
    assert third.rows[0].start == sequence.num_tokens == row.start + 1
    node.collect(second)
    node.collect(third)
    assert node.said["a"] == right(4)


def test_a_row_that_ends_with_the_token_on_its_way_is_not_launched_again():
    node = Node()
    node.add("short", max_tokens=2)
    node.add("long", [1, 2, 3, 4, 6])
    node.collect(node.schedule())
    plan = node.schedule()
    assert keys(plan) == ["short", "long"] and keys(node.look_ahead()) == ["long"]


def test_nothing_is_launched_when_every_row_ends():
    node = Node()
    node.decoding("a", max_tokens=2)
    node.schedule()
    assert node.scheduler.look_ahead() is None


def test_a_row_that_committed_meanwhile_joins_with_the_token_that_is_known():
    node = Node()
    node.decoding("a")
    slot = make_sequence([7, 8, 9], key="slot", max_tokens=20)
    pages = node.scheduler.reserve(slot)
    plan = node.schedule()
    node.engine.write(pages, 0, kv_of([7, 8, 9]))
    node.scheduler.commit("slot", 5)
    ahead = node.look_ahead()
    assert [(row.request, row.follows) for row in ahead.rows] == [("a", True), ("slot", False)]
    node.collect(plan)
    node.collect(ahead)
    assert node.said == {"a": right(3), "slot": right(1, [7, 8, 9, 5])}


def test_the_next_step_waits_while_a_request_could_be_admitted():
    node = Node(max_rows=2)
    node.decoding("a")
    held = node.add("held", [9, 9])
    node.scheduler.hold(held)
    plan = node.schedule()
    assert keys(plan) == ["a"]
    node.scheduler.resume(held)
    assert node.scheduler.look_ahead() is None
    node.collect(plan)
    assert keys(node.schedule()) == ["a", "held"]


def test_requests_that_no_row_is_free_for_stop_nobody():
    node = Node(max_rows=1)
    node.decoding("a")
    node.add("next", [9, 9])
    node.schedule()
    assert keys(node.look_ahead()) == ["a"]


def test_nothing_is_launched_behind_a_prompts_chunk_or_a_remote_prefill_or_without_a_step():
    node = Node()
    assert node.scheduler.look_ahead() is None
    node.decoding("a")
    node.add("b", list(range(12)))
    plan = node.schedule()
    assert node.scheduler.look_ahead() is None
    node.collect(plan)
    node.add("p", [3], remote=True)
    plan = node.schedule()
    assert all(len(row.tokens) == 1 for row in plan.rows) and node.scheduler.look_ahead() is None


def test_nothing_is_launched_behind_a_fork_whose_page_is_copied_by_the_step():
    node = Node()
    parent = node.decoding("leader")
    fork = make_sequence(PROMPT, key="fork", choice=1, max_tokens=20)
    fork.parent = parent
    node.scheduler.add(fork)
    plan = node.schedule()
    assert plan.copies and node.scheduler.look_ahead() is None
    node.collect(plan)
    node.schedule()
    assert keys(node.look_ahead()) == ["leader", "fork"]


def test_looking_ahead_preempts_nobody_for_a_page():
    node = Node(num_pages=4, reserve_tokens=0)
    for key in ("a", "b"):
        node.add(key, [ord(key) % 9, 2, 3, 4, 5], max_tokens=8)
    node.collect(node.schedule())
    assert node.pool.num_available == 0
    for _ in range(2):
        node.collect(node.schedule())
    plan = node.schedule()
    assert node.scheduler.look_ahead() is None and node.scheduler.num_preemptions == 0
    node.collect(plan)
    node.schedule()
    assert node.scheduler.num_preemptions == 1


def test_an_ended_row_keeps_its_pages_until_the_row_behind_it_is_over_and_says_nothing_more():
    node = Node()
    stop = right(2)[1]
    node.decoding("a", stop_token_ids=(stop,))
    assert right(1)[0] != stop
    first, second = node.schedule(), node.look_ahead()
    (update,) = node.collect(first)
    assert update.finished == "stop" and node.pool.num_used == 2
    assert node.collect(second) == [] and node.said["a"] == right(2)
    assert node.pool.num_used == 0 and node.scheduler.is_idle()


def test_a_cancelled_row_keeps_its_pages_until_the_last_step_that_computes_it_is_over():
    node = Node()
    node.decoding("a")
    first, second = node.schedule(), node.look_ahead()
    node.scheduler.cancel("a")
    assert node.collect(first) == [] and node.pool.num_used == 2
    assert node.collect(second) == [] and node.pool.num_used == 0


def test_a_page_that_the_cache_has_already_is_kept_for_a_step_that_may_read_it():
    """Both rows say the same, so the second one's full page is given up for the first one's; the step in flight was
    given the old table."""
    node = Node()
    node.add("a", [1, 2, 3])
    node.add("b", [1, 2, 3])
    node.collect(node.schedule())
    plan = node.schedule()
    ahead = node.look_ahead()
    old = ahead.rows[1].pages.copy()
    node.collect(plan)
    given_up = set(old.tolist()) - set(ahead.rows[1].pages.tolist())
    assert len(given_up) == 1 and all(node.pool.num_owners(page) == 1 for page in given_up)
    node.collect(ahead)
    assert all(node.pool.num_owners(page) == 0 for page in given_up)


def test_what_follows_a_failed_step_is_void():
    node = Node()
    node.decoding("a")
    node.schedule()
    ahead = node.look_ahead()
    node.scheduler.drop_step()
    assert node.scheduler.look_ahead() is None
    node.engine.drawn = {"a": 1}
    with pytest.raises(IntegrityError, match="one that failed"):
        node.scheduler.update(ahead, node.engine.run(ahead))
    node.scheduler.drop_step()
    while node.scheduler.find("a") is not None:
        node.collect(node.schedule())
    assert node.said["a"] == right(20)


def test_the_oldest_step_is_taken_in_first():
    node = Node()
    node.decoding("a")
    node.schedule()
    ahead = node.look_ahead()
    node.engine.drawn = {"a": 1}
    with pytest.raises(IntegrityError, match="not the oldest"):
        node.scheduler.update(ahead, node.engine.run(ahead))
    with pytest.raises(IntegrityError, match="in flight"):
        node.scheduler.schedule()


def test_a_history_learns_of_a_token_from_the_commit_or_from_the_step_that_drew_it_but_not_twice():
    node = Node()
    slot = make_sequence([7, 8, 9], key="slot", max_tokens=20, shaping=Shaping(presence=1.0))
    pages = node.scheduler.reserve(slot)
    node.engine.write(pages, 0, kv_of([7, 8, 9]))
    node.scheduler.commit("slot", 5)
    assert slot.history is not None and slot.history.ids.tolist() == [5]
    plan = node.schedule()
    assert plan.rows[0].history is slot.history
    node.collect(plan)  # this engine keeps no histories
    assert slot.history.ids.tolist() == [5]

"""Batch sequences give way: the order of steps, of admissions and of preemptions (rule 6 of the scheduler)."""

from __future__ import annotations

import pytest
from fake_engine import make_sequence
from scheduler_node import LONG, Node, shape

from pdcluster.core.errors import Overloaded
from pdcluster.core.lifecycle import Residence
from pdcluster.core.step import StepPlan


def names(plan: StepPlan) -> list[str]:
    return [row.request for row in plan.rows]


def test_a_batch_prompt_waits_while_others_do_and_is_computed_after_them():
    node = Node(token_budget=8)
    node.add("batch", [1, 2, 3], is_batch=True)
    node.add("chat", LONG)
    seen = []
    while "batch" not in node.tokens:
        plan = node.plan()
        seen.append(shape(plan))
        node.finish_step(plan)
    assert seen[:3] == [[("chat", 0, 8)], [("chat", 8, 8)], [("chat", 16, 4)]]
    assert seen[3] == [("chat", 20, 1), ("batch", 0, 3)]
    node.run()
    assert node.tokens["batch"] == node.expected([1, 2, 3]) and node.is_clean()


def test_a_batch_prompt_gives_way_between_its_chunks():
    node = Node(token_budget=8)
    node.add("batch", LONG, is_batch=True)
    assert shape(node.plan()) == [("batch", 0, 8)]
    node.scheduler.drop_step()
    node.step()
    node.add("chat", [1, 2, 3], max_tokens=2)
    assert shape(node.plan()) == [("chat", 0, 3)]
    node.scheduler.drop_step()
    node.step()
    assert shape(node.plan()) == [("chat", 3, 1), ("batch", 8, 7)]
    node.scheduler.drop_step()
    node.run()
    assert node.tokens == {"batch": node.expected(LONG), "chat": node.expected([1, 2, 3], max_tokens=2)}
    assert node.is_clean()


def test_batch_rows_decode_beside_the_chunks_of_others_within_the_budget():
    node = Node(token_budget=8)
    node.add("batch", [1, 2], is_batch=True, max_tokens=9)
    node.step()
    node.add("chat", LONG)
    plan = node.plan()
    assert shape(plan) == [("batch", 2, 1), ("chat", 0, 7)]
    node.finish_step(plan)
    node.run()
    assert node.is_clean()


def test_the_newest_batch_row_is_preempted_first_although_others_are_newer():
    node = Node(num_pages=6, reserve_tokens=0, max_len=24)
    node.add("batch", [1, 2, 3, 4, 5, 6, 7], is_batch=True, max_tokens=12)
    node.step()
    node.add("old", [2, 3, 4, 5, 6, 7, 8], max_tokens=12)
    node.add("new", [3, 4, 5, 6, 7, 8, 9], max_tokens=5)
    while not node.scheduler.num_preemptions:
        node.step()
    batch = node.scheduler.find("batch")
    assert batch is not None and batch.num_preempted == 1 and batch.state is Residence.WAITING
    assert not node.scheduler.has_waiting_preempted, "it keeps nobody from a slot"
    node.run()
    assert node.tokens["batch"] == node.expected([1, 2, 3, 4, 5, 6, 7], max_tokens=12)
    assert node.tokens["old"] == node.expected([2, 3, 4, 5, 6, 7, 8], max_tokens=12)
    assert node.is_clean()


def test_an_admission_takes_the_pages_of_batch_rows_and_no_more_than_it_needs():
    node = Node(num_pages=6, reserve_tokens=0)
    for name in ("b0", "b1", "b2"):
        node.add(name, [1 + int(name[1]), 2, 3, 4, 5], is_batch=True, max_tokens=3)
    node.step()
    node.add("chat", [9, 8, 7, 6, 5, 4], max_tokens=2)
    assert names(node.plan()) == ["b0", "b1", "chat"]
    node.scheduler.drop_step()
    assert node.scheduler.num_preemptions == 1
    node.run()
    assert all(
        node.tokens[name] == node.expected([1 + int(name[1]), 2, 3, 4, 5], max_tokens=3) for name in ("b0", "b2")
    )
    assert node.is_clean()


def test_an_admission_takes_the_row_of_a_batch_row():
    node = Node(max_rows=2)
    node.add("b0", [1, 2], is_batch=True, max_tokens=6)
    node.add("b1", [2, 3], is_batch=True, max_tokens=6)
    node.step()
    node.add("chat", [4, 5, 6])
    assert names(node.plan()) == ["b0", "chat"]
    node.scheduler.drop_step()
    node.run()
    assert node.tokens["b1"] == node.expected([2, 3], max_tokens=6) and node.is_clean()


def test_batch_rows_are_left_alone_where_their_pages_do_not_suffice():
    node = Node(num_pages=8, reserve_tokens=0)
    node.add("chat", [5] * 20, max_tokens=4)
    node.add("batch", [1, 2, 3], is_batch=True, max_tokens=4)
    node.step()
    node.step()
    node.add("large", [7] * 24, max_tokens=2)
    node.step()
    assert node.scheduler.num_preemptions == 0
    node.run()
    assert node.is_clean()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_refused_slot_gets_the_pages_of_batch_rows_with_the_next_step(in_flight: bool):
    node = Node(num_pages=6, reserve_tokens=0)
    for name in ("b0", "b1"):
        node.add(name, [1 + int(name[1]), 2, 3, 4, 5, 6, 7, 8, 9], is_batch=True, max_tokens=3)
    node.step()
    plan = node.plan() if in_flight else None
    slot = make_sequence([9, 8, 7, 6, 5, 4], key="slot")
    with pytest.raises(Overloaded, match="batch rows give way"):
        node.scheduler.reserve(slot)
    if plan is not None:
        assert node.scheduler.look_ahead() is None, "the next step is for the slot"
        node.finish_step(plan)
    node.finish_step(node.plan())
    assert node.scheduler.num_preemptions == 1
    batch = make_sequence([1, 1], key="more", is_batch=True)
    with pytest.raises(Overloaded, match="not batch"):
        node.scheduler.reserve(batch)
    pages = node.scheduler.reserve(make_sequence([9, 8, 7, 6, 5, 4], key="slot"))
    node.scheduler.commit("slot", node.fill_slot(node.scheduler.find("slot"), pages))  # type: ignore[arg-type]
    for _ in range(40):
        node.now += 0.1
        if (plan := node.scheduler.schedule()) is not None:
            node.finish_step(plan)
    assert set(node.ended) == {"b0", "b1", "slot"} and node.is_clean()


def test_batch_rows_come_back_once_the_refused_slot_had_its_time():
    node = Node(max_rows=1)
    node.add("batch", [1, 2], is_batch=True, max_tokens=9)
    node.step()
    with pytest.raises(Overloaded):
        node.scheduler.reserve(make_sequence([4, 5], key="slot"))
    assert node.scheduler.schedule() is None
    node.now += 1.0
    assert names(node.plan()) == ["batch"]
    node.scheduler.drop_step()
    node.run()
    assert node.tokens["batch"] == node.expected([1, 2], max_tokens=9)


def test_the_load_counts_batch_prompts_apart_and_batch_rows_beside():
    node = Node(token_budget=8)
    node.add("b0", [1, 2, 3], is_batch=True, max_tokens=9)
    node.step()
    node.add("chat", [1, 2, 3, 4])
    node.add("b1", [1, 2], is_batch=True)
    load = node.scheduler.load()
    assert (load.waiting_tokens, load.batch_tokens, load.rows, load.batch_rows) == (4, 2, 1, 1)
    node.run()
    assert node.is_clean()


def test_batch_prompts_take_half_of_the_queue():
    node = Node(max_waiting=4)
    for name in ("b0", "b1"):
        node.add(name, [1, 2], is_batch=True)
    with pytest.raises(Overloaded, match="the queue takes 2"):
        node.add("b2", [1, 2], is_batch=True)
    node.add("chat", [1, 2])
    node.run()
    assert node.is_clean()


def test_beside_other_rows_only_some_batch_rows_decode_and_the_others_keep_their_pages():
    node = Node()
    for name in ("b0", "b1", "b2"):
        node.add(name, [1 + int(name[1]), 2], is_batch=True, max_tokens=9)
    node.step()
    node.scheduler.most_batch_rows = lambda rows, context: rows if context else 99
    assert names(node.plan()) == ["b0", "b1", "b2"], "alone there is no bound"
    node.scheduler.drop_step()
    node.add("chat", [4, 5, 6], max_tokens=3)
    node.step()
    plan = node.plan()
    assert names(plan) == ["chat", "b0"]
    ahead = node.scheduler.look_ahead()
    assert ahead is not None and names(ahead) == ["chat", "b0"]
    node.finish_step(plan)
    node.finish_step(ahead)
    assert node.scheduler.num_preemptions == 0 and "chat" in node.ended
    node.run()
    assert all(node.tokens[f"b{n}"] == node.expected([1 + n, 2], max_tokens=9) for n in range(3)) and node.is_clean()


def test_batch_rows_that_may_not_decode_take_nothing_from_the_chunks_of_others():
    node = Node(token_budget=8)
    for name in ("b0", "b1", "b2"):
        node.add(name, [1 + int(name[1]), 2], is_batch=True, max_tokens=9)
    node.add("chat", [4, 5, 6], max_tokens=9)
    node.step()
    node.step()
    node.scheduler.most_batch_rows = lambda rows, context: 0
    node.add("long", LONG)
    assert shape(node.plan())[1:] == [("long", 0, 7)]
    node.scheduler.drop_step()
    node.run()
    assert node.is_clean()

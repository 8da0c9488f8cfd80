"""The scheduler: what a step holds, what ends a sequence, what is refused, what is cancelled, what it tells. Pages:
test_scheduler_pages.py; other nodes: test_scheduler_slots.py; random histories: test_scheduler_model.py."""

from __future__ import annotations

import pytest
from fake_engine import draw, kv_of, make_sequence
from scheduler_node import LONG, Node, shape

from pdcluster.core.errors import BadRequest, ConfigError, IntegrityError, Overloaded, ProtocolError, RequestTooLarge
from pdcluster.core.lifecycle import Residence
from pdcluster.core.step import RowResult, StepPlan, StepResult
from pdcluster.scheduler.rows import finish
from pdcluster.scheduler.scheduler import Occupancy

# ---------------------------------------------------------------- steps


def test_a_prompt_is_computed_and_then_decoded_token_by_token():
    node = Node()
    node.add("a", [1, 2, 3], max_tokens=3)
    assert shape(node.plan()) == [("a", 0, 3)]
    node.scheduler.drop_step()
    node.run()
    assert node.tokens["a"] == node.expected([1, 2, 3], max_tokens=3)
    assert node.ended == {"a": "length"} and node.is_clean()


def test_nothing_to_do_gives_no_plan():
    node = Node()
    assert node.scheduler.schedule() is None
    assert node.scheduler.is_idle()


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget_and_only_the_last_one_samples():
    node = Node(token_budget=8)
    node.add("a", LONG)
    seen = []
    while not node.tokens:
        plan = node.plan()
        seen.append((*shape(plan)[0][1:], plan.rows[0].sampling is not None))
        node.finish_step(plan)
    assert seen == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_decode_rows_come_first_and_prompts_share_what_is_left():
    node = Node(token_budget=8)
    node.add("a", [1, 2])
    node.step()
    node.add("b", LONG)
    node.add("c", [5, 6, 7])
    assert shape(node.plan()) == [("a", 2, 1), ("b", 0, 7)]
    node.scheduler.drop_step()
    node.run()
    assert node.is_clean() and len(node.tokens) == 3


def test_several_prompts_fit_in_one_step_in_order_of_arrival():
    node = Node(token_budget=12)
    node.add("a", [1, 2, 3, 4, 5])
    node.add("b", [6, 7, 8, 9])
    node.add("c", [1, 3, 5, 7, 9])
    assert shape(node.plan()) == [("a", 0, 5), ("b", 0, 4), ("c", 0, 3)]


def test_a_prompt_row_of_one_token_stands_with_the_decode_rows():
    node = Node()
    node.add("a", [1, 2, 3])
    node.add("b", [4])
    assert shape(node.plan()) == [("b", 0, 1), ("a", 0, 3)]


def test_a_smaller_budget_for_one_step_bounds_chunks_but_never_decodes():
    node = Node(token_budget=16)
    node.add("a", [1, 2])
    node.add("b", [2, 3])
    node.step()
    node.add("c", LONG)
    assert shape(node.plan(token_budget=2)) == [("a", 2, 1), ("b", 2, 1), ("c", 0, 1)]
    node.scheduler.drop_step()
    assert shape(node.plan(token_budget=6)) == [("a", 2, 1), ("b", 2, 1), ("c", 0, 4)]


def test_no_budget_at_all_for_one_step_is_the_least_and_not_the_usual_one():
    node = Node(token_budget=16)
    node.add("a", LONG)
    assert shape(node.plan(token_budget=0)) == [("a", 0, 1)]


def test_the_row_says_where_the_token_stands_in_the_output():
    node = Node()
    node.add("a", [1, 2, 3], emitted=(4, 5), max_tokens=9)
    (row,) = node.plan().rows
    assert (row.output_index, row.start, row.tokens.tolist()) == (2, 0, [1, 2, 3, 4, 5])


def test_no_more_rows_than_the_limit_run_at_once():
    node = Node(max_rows=2)
    for key in "abc":
        node.add(key, [1, 2], max_tokens=2)
    assert [row.request for row in node.plan().rows] == ["a", "b"]


def test_a_step_must_be_taken_in_before_the_next_is_planned():
    node = Node()
    node.add("a", [1])
    plan = node.plan()
    with pytest.raises(IntegrityError, match="in flight"):
        node.scheduler.schedule()
    node.finish_step(plan)


def test_results_that_do_not_belong_to_the_step_are_refused():
    node = Node()
    node.add("a", [1])
    plan = node.plan()
    result = node.engine.run(plan)
    with pytest.raises(IntegrityError, match="not in flight"):
        node.scheduler.update(StepPlan(plan.rows), result)
    with pytest.raises(IntegrityError, match="other rows"):
        node.scheduler.update(plan, StepResult((), 0.0))
    with pytest.raises(IntegrityError, match="gave no token"):
        node.scheduler.update(plan, StepResult((RowResult("a", None),), 0.0))
    assert len(node.finish_step(plan)) == 1


def test_after_a_failed_step_the_rows_are_as_they_were():
    node = Node()
    node.add("a", [1, 2], max_tokens=2)
    first = shape(node.plan())
    node.scheduler.drop_step()
    assert shape(node.plan()) == first
    node.scheduler.drop_step()
    node.run()
    assert node.tokens["a"] == node.expected([1, 2], max_tokens=2)


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("token", "sampling", "expected"),
    [
        (7, {}, ("eos", 7)),
        (7, {"ignore_eos": True}, (None, None)),
        (7, {"ignore_eos": True, "stop_token_ids": (7,)}, ("stop", 7)),
        (8, {"stop_token_ids": (8,)}, ("stop", 8)),
        (8, {}, (None, None)),
        (7, {"min_tokens": 1}, (None, None)),
        (7, {"min_tokens": 1, "max_tokens": 1}, ("length", None)),
        (7, {"max_tokens": 1}, ("eos", 7)),
        (8, {"max_tokens": 1}, ("length", None)),
    ],
)
def test_what_ends_a_sequence(token, sampling, expected):
    sequence = make_sequence([1, 2], **sampling)
    sequence.max_total = 2 + sequence.sampling.max_tokens
    sequence.append(token)
    assert finish(sequence, token, frozenset({7})) == expected


def test_min_tokens_counts_output_tokens_of_earlier_attempts_too():
    sequence = make_sequence([1], emitted=(2, 3), min_tokens=2, max_tokens=9)
    sequence.max_total = 10
    sequence.append(7)
    assert finish(sequence, 7, frozenset({7})) == ("eos", 7)


def test_the_update_says_which_token_ended_the_row():
    eos = draw(kv_of([1, 2]))
    node = Node(eos_token_ids=frozenset({eos}))
    node.add("a", [1, 2])
    update = node.step()["a"]
    assert (update.token, update.finished, update.stop_token) == (eos, "eos", eos)
    assert node.is_clean()


def test_max_len_ends_a_row_that_asked_for_more():
    node = Node(max_len=6)
    node.add("a", [1, 2, 3], max_tokens=50)
    node.run()
    assert len(node.tokens["a"]) == 3 and node.ended == {"a": "length"}


def test_max_tokens_counts_over_all_attempts():
    node = Node()
    whole = node.expected([1, 2, 3], max_tokens=6)
    node.add("a", [1, 2, 3], emitted=tuple(whole[:4]), max_tokens=6)
    node.run()
    assert node.tokens["a"] == whole[4:]


def test_positions_go_on_where_the_earlier_attempt_stopped():
    node = Node()
    node.add("a", [1, 2, 3], emitted=(4, 5), max_tokens=6)
    assert [node.step()["a"].position for _ in range(4)] == [2, 3, 4, 5]


# ---------------------------------------------------------------- what is refused


def test_a_prompt_without_room_for_output_is_refused():
    node = Node(max_len=8)
    with pytest.raises(RequestTooLarge, match="8 tokens, this node takes 8"):
        node.add("a", [1] * 8)
    node.add("b", [1] * 7)


def test_a_request_that_can_outgrow_the_whole_pool_is_refused():
    node = Node(num_pages=4, max_len=64)
    with pytest.raises(RequestTooLarge, match="KV for 17 tokens, this node's pool holds 16"):
        node.add("a", [1] * 8, max_tokens=10)
    node.add("b", [1] * 8, max_tokens=9)
    node.add("c", [1] * 8, max_tokens=50, remote=True)


def test_a_remote_prompt_needs_room_for_itself_only():
    node = Node(num_pages=2, max_len=64)
    with pytest.raises(RequestTooLarge):
        node.add("a", [1] * 9, remote=True)


def test_a_request_that_already_has_all_its_tokens_is_refused():
    with pytest.raises(BadRequest, match="max_tokens is 2"):
        Node().add("a", [1], emitted=(2, 3), max_tokens=2)


def test_a_full_queue_refuses_with_a_time_to_come_back():
    node = Node(max_waiting=1, retry_after_s=0.25)
    node.add("a", [1])
    with pytest.raises(Overloaded) as caught:
        node.add("b", [1])
    assert caught.value.retry_after_s == 0.25
    node.step()
    node.add("b", [1])


def test_a_key_that_is_here_already_is_refused():
    node = Node()
    node.add("a", [1])
    with pytest.raises(ProtocolError, match="key of its own"):
        node.add("a", [1])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"token_budget": 0}, "token_budget"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_len": 1}, "max_len"),
        ({"token_budget": 4}, "exceed max_rows"),
    ],
)
def test_limits_that_cannot_work_are_refused(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Node(**change)


# ---------------------------------------------------------------- cancel


def test_cancelling_what_is_not_here_does_nothing():
    assert Node().scheduler.cancel("a") is None


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_sequence_frees_its_pages(steps):
    node = Node(token_budget=8)
    sequence = node.add("a", LONG[:12])
    for _ in range(steps):
        node.step()
    assert node.scheduler.cancel("a") is sequence
    assert sequence.state is Residence.FINISHED and node.is_clean() and node.scheduler.schedule() is None


def test_a_row_cancelled_in_flight_keeps_its_pages_until_the_step_ends_and_its_result_is_dropped():
    node = Node(num_pages=5)
    node.add("a", [1] * 12, max_tokens=2)
    node.add("b", [2], max_tokens=2)
    plan = node.plan()
    assert len(plan.rows) == 2
    node.scheduler.cancel("a")
    with pytest.raises(Overloaded):
        node.scheduler.reserve(make_sequence([3] * 4, key="c"))
    node.scheduler.check_integrity()
    assert [update.key for update in node.finish_step(plan)] == ["b"]
    assert len(node.scheduler.reserve(make_sequence([3] * 4, key="c"))) == 1
    assert node.pool.num_cached == 0, "a cancelled chunk is not published"


def test_a_new_attempt_may_come_while_the_old_ones_step_is_in_flight():
    node = Node()
    node.add("a#0", [1, 2, 3], max_tokens=3)
    plan = node.plan()
    node.scheduler.cancel("a#0")
    node.add("a#1", [1, 2, 3], max_tokens=3)
    assert node.finish_step(plan) == []
    node.run()
    assert node.tokens == {"a#1": node.expected([1, 2, 3], max_tokens=3)} and node.is_clean()


def test_dropping_a_step_frees_what_was_cancelled_meanwhile():
    node = Node()
    node.add("a", [1, 2, 3])
    node.plan()
    node.scheduler.cancel("a")
    node.scheduler.drop_step()
    assert node.is_clean()


# ---------------------------------------------------------------- what it tells


def test_load_counts_what_there_is_to_do():
    node = Node(token_budget=8, max_rows=3)
    node.add("run", [1, 2], max_tokens=9)
    node.step()
    node.add("long", LONG)
    node.scheduler.reserve(make_sequence([1, 2, 3], key="slot"))
    node.add("wait", [1, 2, 3, 4])
    node.step()
    assert node.scheduler.load() == Occupancy(
        waiting=1, running=2, waiting_tokens=4 + 13, waiting_pairs=184, rows=3, context_tokens=3 + 7, slots_used=3,
        reserved=1, parked=0
    )  # fmt: skip


def test_a_waiting_prompt_counts_without_what_the_one_before_it_will_leave():
    node = Node(token_budget=8, max_rows=1)
    node.add("turn 1", LONG)
    first = node.scheduler.load().waiting_tokens
    node.add("turn 2", [*LONG, 7, 7])
    node.add("other", [9, *LONG])
    assert (first, node.scheduler.load().waiting_tokens) == (20, 20 + 2 + 21), (
        "20 tokens are 5 blocks, all shared by the next turn"
    )


def test_times_are_stamped_by_the_given_clock():
    node = Node()
    sequence = node.add("a", [1, 2], max_tokens=2)
    assert sequence.first_scheduled is None
    node.now = 1.0
    plan = node.plan()
    node.now = 2.0
    node.finish_step(plan)
    node.now = 3.0
    node.step()
    assert (sequence.first_scheduled, sequence.first_token_at, sequence.last_token_at) == (1.0, 2.0, 3.0)


def test_a_leaked_page_is_found():
    node = Node()
    sequence = node.add("a", [1, 2])
    node.step()
    node.pool.release(sequence.pages.tolist())
    with pytest.raises(IntegrityError, match="has 0 owners"):
        node.scheduler.check_integrity()


def test_lost_credit_is_found():
    node = Node()
    sequence = node.add("a", [1, 2], max_tokens=8)
    node.step()
    sequence.credit += 1
    with pytest.raises(IntegrityError, match="credit"):
        node.scheduler.check_integrity()

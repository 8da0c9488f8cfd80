"""The scheduler and its pages: what is cached of a prompt, who may grow, who gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import kv_of, make_sequence, prompt_logprob
from scheduler_node import LONG, Node, shape

from pdcluster.core.errors import Overloaded
from pdcluster.core.lifecycle import Residence
from pdcluster.core.step import RowError, RowResult
from pdcluster.scheduler.limits import logprob_tokens_of
from pdcluster.scheduler.sequence import Sequence

# ---------------------------------------------------------------- prefix cache


def test_a_prompt_that_was_computed_before_starts_behind_its_cached_pages():
    node = Node()
    node.add("a", LONG[:10], max_tokens=1)
    node.run()
    sequence = node.add("b", LONG, max_tokens=2)
    assert shape(node.plan()) == [("b", 8, 12)]
    assert sequence.num_cached == 8
    node.scheduler.drop_step()
    node.run()
    assert node.tokens["b"] == node.expected(LONG, max_tokens=2)


def test_at_least_one_prompt_token_is_computed_even_if_all_are_cached():
    node = Node()
    for key in "ab":
        node.add(key, LONG[:8], max_tokens=2)
        node.run()
    assert node.tokens["a"] == node.tokens["b"]
    sequence = node.add("c", LONG[:8])
    assert shape(node.plan()) == [("c", 4, 4)]
    assert sequence.num_cached == 4


def test_output_becomes_cache_for_the_next_turn():
    node = Node()
    node.add("a", LONG[:3], max_tokens=10)
    node.run()
    sequence = node.add("b", LONG[:3] + node.tokens["a"] + [1])
    node.plan()
    assert sequence.num_cached == 12


def test_the_last_token_of_an_answer_was_never_computed_and_is_not_cached():
    node = Node()
    node.add("a", LONG[:3], max_tokens=5)
    node.run()
    assert len(LONG[:3] + node.tokens["a"]) == 8
    assert node.pool.num_cached == 1


def test_a_page_is_found_only_after_the_step_that_filled_it():
    node = Node(token_budget=8)
    node.add("a", LONG)
    plan = node.plan()
    assert node.pool.match(make_sequence(LONG).hashes) == []
    node.finish_step(plan)
    assert len(node.pool.match(make_sequence(LONG).hashes)) == 2


def test_two_equal_prompts_computed_at_once_end_up_on_the_same_pages():
    node = Node(token_budget=64)
    one, two = node.add("a", LONG), node.add("b", LONG)
    node.step()
    assert one.pages.tolist() == two.pages.tolist()
    node.run()
    assert node.tokens["a"] == node.tokens["b"] == node.expected(LONG) and node.is_clean()


def test_prompt_logprobs_are_of_every_position_whatever_is_cached_and_however_it_is_chunked():
    node = Node(token_budget=8)
    node.add("a", LONG)
    node.run()
    node.add("b", LONG, prompt_logprobs=0)
    updates = [node.step()["b"] for _ in range(3)]
    entries = kv_of(LONG)
    assert [update.prompt_logprobs for update in updates[:2]] == [(), ()]
    assert list(updates[2].prompt_logprobs) == [prompt_logprob(entries[: i + 1], LONG[i + 1]) for i in range(19)]
    assert node.step()["b"].prompt_logprobs == ()


def test_prompts_that_want_logprobs_share_a_smaller_part_of_the_step_and_others_pass_them():
    node = Node(token_budget=16, logprob_tokens=4, max_rows=4)
    for key, wanted in (("a", 0), ("b", 0), ("c", None)):
        node.add(key, LONG, prompt_logprobs=wanted, max_tokens=1)
    assert shape(node.plan()) == [("a", 0, 4), ("c", 0, 12)]
    node.scheduler.drop_step()
    reports = {}
    while len(node.ended) < 3:
        plan = node.plan()
        assert sum(len(row.tokens) for row in plan.rows if row.prompt_logprobs is not None) <= 4
        reports |= {update.key: update.prompt_logprobs for update in node.finish_step(plan) if update.prompt_logprobs}
    assert {key: len(found) for key, found in reports.items()} == {"a": 19, "b": 19}
    assert (
        node.tokens["a"] == node.tokens["b"] == node.tokens["c"] == node.expected(LONG, max_tokens=1)
        and node.is_clean()
    )


@pytest.mark.parametrize(
    ("vocab_size", "positions"), [(512, 512), (16_384, 512), (32_000, 262), (131_072, 64), (152_064, 64), (256_000, 64)]
)
def test_the_smaller_a_vocabulary_is_the_more_positions_of_a_step_may_want_logprobs(
    vocab_size: int, positions: int
) -> None:
    assert logprob_tokens_of(vocab_size) == positions


def test_any_number_of_prompts_that_want_logprobs_lets_others_pass_while_rows_are_free():
    node = Node(num_pages=256, token_budget=16, logprob_tokens=4, max_rows=4, max_waiting=64)
    for number in range(30):
        node.add(f"scored-{number}", LONG, prompt_logprobs=0, max_tokens=1)
    node.add("plain", [1, 2, 3], max_tokens=1)
    assert node.step()["plain"].finished == "length"
    node.run()
    assert len(node.ended) == 31 and node.is_clean()


def test_only_prompt_rows_that_need_them_ask_for_prompt_logprobs():
    node = Node(token_budget=15)
    node.add("a", LONG, prompt_logprobs=3)
    (row,) = node.plan().rows
    assert (row.prompt_logprobs, row.next_token) == (3, LONG[15])
    node.scheduler.drop_step()
    node.step()
    (row,) = node.plan().rows
    assert (row.prompt_logprobs, row.next_token) == (3, None)
    node.scheduler.drop_step()
    node.step()
    (row,) = node.plan().rows
    assert (row.prompt_logprobs, row.next_token) == (None, None)


# ---------------------------------------------------------------- pages and preemption


def test_admission_keeps_room_for_the_growth_of_running_rows():
    node = Node(num_pages=4, reserve_tokens=8)
    node.add("a", [1, 2, 3, 4], max_tokens=9)
    node.add("b", [5, 6], max_tokens=2)
    assert [row.request for row in node.plan().rows] == ["a", "b"]
    node = Node(num_pages=4, reserve_tokens=8)
    node.add("a", [1, 2, 3, 4], max_tokens=9)
    node.add("b", [5, 6], max_tokens=8)
    assert [row.request for row in node.plan().rows] == ["a"]


def test_alone_a_sequence_may_take_what_there_is():
    node = Node(num_pages=4, reserve_tokens=64)
    parked = node.add("p", [9] * 4, max_tokens=2, remote=True)
    node.step()
    assert parked.state is Residence.PARKED
    node.add("a", [1] * 12, max_tokens=5)
    assert [row.request for row in node.plan().rows] == ["a"]


def preempted_pair() -> tuple[Node, Sequence, Sequence]:
    """Two rows that outgrow a pool of 4 pages in the same step: the newer one gives way."""
    node = Node(num_pages=4, reserve_tokens=0)
    one, two = node.add("a", [1, 2, 3, 4, 5, 6], max_tokens=10), node.add("b", [6, 5, 4, 3, 2, 1], max_tokens=8)
    while node.scheduler.num_preemptions == 0:
        node.step()
    return node, one, two


def test_when_pages_run_out_the_newest_row_gives_way_and_waits_in_front():
    node, one, two = preempted_pair()
    assert (one.state, two.state) == (Residence.RUNNING, Residence.WAITING)
    node.add("c", [1], max_tokens=1)
    node.run()
    assert node.tokens["a"] == node.expected([1, 2, 3, 4, 5, 6], max_tokens=10)
    assert node.tokens["b"] == node.expected([6, 5, 4, 3, 2, 1], max_tokens=8)
    assert next(iter(node.ended)) == "a" and len(node.ended) == 3
    assert two.num_preempted >= 1 and one.num_preempted == 0 and node.is_clean()


def test_nobody_passes_a_preempted_row():
    node, _, two = preempted_pair()
    node.add("c", [1], max_tokens=1)
    plan = node.plan()
    assert [row.request for row in plan.rows] == ["a"] and two.state is Residence.WAITING


def test_no_slot_is_given_while_a_preempted_row_waits_for_pages():
    node, _, _ = preempted_pair()
    with pytest.raises(Overloaded, match="preempted"):
        node.scheduler.reserve(make_sequence([1], key="r"))
    node.run()
    assert len(node.scheduler.reserve(make_sequence([1], key="r"))) == 1


def test_a_preempted_row_keeps_its_right_to_pages_while_prompts_use_up_the_steps():
    node = Node(num_pages=20, token_budget=5, reserve_tokens=0)
    for key in "ab":
        node.add(key, [1, 2, 3, 4, 5, ord(key)], max_tokens=30)
    for _ in range(3):
        node.step()
    node.add("long", [7] * 48, max_tokens=2, remote=True)
    while node.scheduler.num_preemptions == 0:
        node.step()
    assert {request for request, _, num_tokens in shape(node.plan()) if num_tokens > 1} == {"long"}, (
        "no budget is left for the preempted row"
    )
    assert node.scheduler.num_spare_pages >= 3 and node.scheduler.has_waiting_preempted
    with pytest.raises(Overloaded, match="preempted"):
        node.scheduler.reserve(make_sequence([1] * 9, key="r"))


def test_a_preempted_row_reports_its_prompt_logprobs_once():
    node = Node(num_pages=6, reserve_tokens=0, token_budget=3, max_rows=2)
    node.add("a", [1, 2, 3, 4], max_tokens=12)
    node.step()
    node.add("b", [7] * 13, max_tokens=2, prompt_logprobs=0)
    reports = []
    while "b" not in node.ended:
        reports += [
            update.prompt_logprobs for key, update in node.step().items() if key == "b" and update.prompt_logprobs
        ]
    assert node.scheduler.num_preemptions >= 1
    entries = kv_of([7] * 13)
    assert reports == [tuple(prompt_logprob(entries[: i + 1], 7) for i in range(12))]


def test_remote_prefills_are_not_preempted_even_when_they_are_newer():
    node = Node(num_pages=6, reserve_tokens=0, token_budget=3, max_rows=2)
    local = node.add("a", [1, 2, 3, 4], max_tokens=12)
    node.step()
    remote = node.add("r", [5] * 14, remote=True)
    while local.num_preempted == 0:
        node.step()
    assert remote.state is Residence.RUNNING and remote.num_tokens == 14 and local.state is Residence.WAITING
    node.run()
    assert remote.num_preempted == 0 and remote.state is Residence.PARKED
    node.scheduler.release("r")
    node.run()
    assert node.tokens["a"] == node.expected([1, 2, 3, 4], max_tokens=12) and node.is_clean()


def test_small_requests_pass_one_that_waits_for_pages_but_only_so_often():
    node = Node(num_pages=6, reserve_tokens=0, max_overtakes=2, max_rows=3)
    node.add("slow", [1] * 8, max_tokens=13)
    node.step()
    large = node.add("large", [2] * 16, max_tokens=1)
    for i in range(5):
        node.add(f"s{i}", [3 + i], max_tokens=1)
    plan = node.plan()
    assert [row.request for row in plan.rows] == ["slow", "s0", "s1"]
    assert large.num_overtaken == 2
    node.finish_step(plan)
    assert [row.request for row in node.plan().rows] == ["slow"]
    node.scheduler.drop_step()
    node.run()
    assert len(node.ended) == 7 and list(node.ended).index("large") < list(node.ended).index("s2")


TORN = RowError("no numbers", retryable=True, spoils_kv=True)
LATE = RowError("its grammar takes too long", retryable=False, param="grammar")


def fail(node: Node, key: str, error: RowError) -> None:
    """Of the next step, that row."""
    plan = node.plan()
    result = node.engine.run(plan)
    rows = tuple(RowResult(key, None, error=error) if row.request == key else row for row in result.rows)
    for update in node.scheduler.update(plan, replace(result, rows=rows)):
        assert update.error == (error if update.key == key else None)
        node.note(update)
    node.scheduler.cancel(key)
    node.scheduler.check_integrity()


@pytest.mark.parametrize(("error", "num_cached"), [(LATE, 4), (TORN, 0)])
def test_nothing_of_a_row_whose_kv_may_be_spoilt_is_anybodys_prefix(error: RowError, num_cached: int) -> None:
    """Its first chunk was published already. Where a row ends for another reason, only what that step computed is not
    looked at."""
    node = Node()
    node.add("a", LONG)
    node.step()
    assert node.pool.snapshot()
    fail(node, "a", error)
    assert node.pool.num_cached == num_cached and node.is_clean()
    added, removed = node.pool.drain_changes()
    assert (bool(added), removed) == (bool(num_cached), b"")


def test_those_who_share_pages_that_are_forgotten_go_on_and_what_they_compute_behind_them_is_not_published() -> None:
    node = Node()
    node.add("a", LONG)
    node.step()  # four pages of it
    node.add("b", [*LONG[:16], *range(6)], max_tokens=8)
    plan = node.plan()
    assert ("b", 16, 6) in shape(plan)
    node.finish_step(plan)
    node.add("c", LONG, max_tokens=6)
    while "c" not in node.tokens:
        node.step()
    fail(node, "c", TORN)
    assert node.pool.num_cached == 0
    node.run()
    assert node.tokens["b"] == node.expected([*LONG[:16], *range(6)], max_tokens=8)
    assert node.pool.num_cached == 0 and node.is_clean()
    node.add("d", LONG, max_tokens=2)
    node.run()
    assert node.tokens["d"] == node.expected(LONG, max_tokens=2)
    assert node.pool.num_cached == 5 and node.is_clean()

"""The scheduler, rule by rule. Random histories are in test_scheduler_model.py."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, draw, kv_of, make_sequence, prompt_logprob, reference

from pdcluster.errors import BadRequest, ConfigError, IntegrityError, Overloaded, ProtocolError, RequestTooLarge
from pdcluster.kv.pages import PagePool
from pdcluster.lifecycle import Residence
from pdcluster.messages import TokenLogprobs
from pdcluster.scheduler.rows import finish
from pdcluster.scheduler.scheduler import Limits, Occupancy, Scheduler, Update
from pdcluster.scheduler.sequence import Sequence
from pdcluster.step import RowResult, StepPlan, StepResult

PAGE = 4
LONG = list(range(10)) + [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
"""20 tokens."""


class Node:
    """Pool, scheduler and engine together, as the node's loop drives them."""

    def __init__(self, num_pages: int = 32, **limits: object) -> None:
        chosen = {"token_budget": 16, "max_rows": 4, "max_waiting": 8, "max_len": 64, "reserve_tokens": 4, **limits}
        self.pool = PagePool(num_pages, PAGE, PAGE)
        self.limits = Limits(**chosen)  # type: ignore[arg-type]
        self.now = 0.0
        self.scheduler = Scheduler(self.pool, self.limits, clock=lambda: self.now)
        self.engine = FakeEngine(num_pages, PAGE)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def add(self, key: str, prompt: list[int], **options: object) -> Sequence:
        sequence = make_sequence(prompt, key=key, **options)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def plan(self, token_budget: int | None = None) -> StepPlan:
        plan = self.scheduler.schedule(token_budget)
        assert plan is not None
        return plan

    def finish_step(self, plan: StepPlan) -> list[Update]:
        updates = self.scheduler.update(plan, self.engine.run(plan))
        for update in updates:
            self.note(update)
        self.scheduler.check_integrity()
        return updates

    def note(self, update: Update) -> None:
        if update.token is not None:
            self.tokens.setdefault(update.key, []).append(update.token)
        if update.finished is not None:
            assert update.key not in self.ended
            self.ended[update.key] = update.finished

    def step(self, token_budget: int | None = None) -> dict[str, Update]:
        return {update.key: update for update in self.finish_step(self.plan(token_budget))}

    def run(self) -> None:
        for _ in range(1000):
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self.finish_step(plan)
        raise AssertionError("the node does not come to rest")

    def expected(self, prompt: list[int], **sampling: object) -> list[int]:
        sequence = make_sequence(prompt, **sampling)  # type: ignore[arg-type]
        return reference(prompt, sequence.sampling, eos=self.limits.eos_token_ids, max_len=self.limits.max_len)[0]

    def fill_slot(self, sequence: Sequence, pages: list[int]) -> int:
        """Write the KV a remote node would, and give the first token."""
        entries = kv_of(sequence.tokens.tolist())
        self.engine.write(pages, sequence.num_cached, entries[sequence.num_cached :])
        return draw(entries)

    def is_clean(self) -> bool:
        self.scheduler.check_integrity()
        return self.scheduler.is_idle() and self.pool.num_used == 0 and self.pool.num_quarantined == 0


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request, row.start, len(row.tokens)) for row in plan.rows]


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
    assert node.scheduler.is_idle() and not node.scheduler.has_work()


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
    assert node.tokens["a"] == node.tokens["b"] == node.tokens["c"] == node.expected(LONG, max_tokens=1) and node.is_clean()


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
    assert {request for request, _, num_tokens in shape(node.plan()) if num_tokens > 1} == {"long"}, "no budget is left for the preempted row"
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
        reports += [update.prompt_logprobs for key, update in node.step().items() if key == "b" and update.prompt_logprobs]
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


# ---------------------------------------------------------------- remote prefill


def test_a_remote_prefill_is_parked_after_its_first_token_and_freed_by_release():
    node = Node(token_budget=8)
    sequence = node.add("a", LONG, remote=True, max_tokens=9)
    progress = []
    while sequence.state is not Residence.PARKED:
        update = node.step()["a"]
        progress.append((sequence.num_computed, update.token is None, update.parked))
    assert progress == [(8, True, False), (16, True, False), (20, False, True)]
    assert node.engine.read(sequence.pages.tolist(), 20) == kv_of(LONG)
    assert node.scheduler.schedule() is None and not node.scheduler.has_work() and not node.scheduler.is_idle()
    assert node.scheduler.release("a") is sequence
    assert node.scheduler.release("a") is None
    assert node.is_clean() and node.pool.num_cached == 5


def test_a_remote_prefill_that_ends_with_its_first_token_is_not_parked():
    node = Node()
    node.add("a", [1, 2], remote=True, max_tokens=1)
    update = node.step()["a"]
    assert (update.finished, update.parked) == ("length", False)
    assert node.is_clean()


def test_cached_pages_of_a_remote_prefill_can_be_pushed_as_soon_as_it_is_admitted():
    node = Node()
    node.add("a", LONG, max_tokens=1)
    node.run()
    sequence = node.add("b", LONG, remote=True)
    node.plan()
    assert sequence.num_computed == sequence.num_cached == 16
    assert node.engine.read(sequence.pages.tolist(), 16) == kv_of(LONG)[:16]


def test_parked_sequences_take_no_row():
    node = Node(max_rows=1)
    node.add("a", [1, 2], remote=True)
    node.step()
    node.add("b", [3, 4])
    assert [row.request for row in node.plan().rows] == ["b"]
    assert node.scheduler.load().parked == 1


def test_only_parked_sequences_are_released():
    node = Node()
    node.add("a", [1, 2], remote=True)
    assert node.scheduler.release("a") is None
    assert node.scheduler.find("a") is not None


# ---------------------------------------------------------------- slots


def test_a_slot_holds_pages_and_a_row_and_decodes_after_its_commit():
    node = Node(max_rows=1)
    sequence = make_sequence(LONG, key="a", max_tokens=5)
    pages = node.scheduler.reserve(sequence)
    node.pool.attach_writer(pages, 7)
    assert len(pages) == 5 and sequence.num_cached == 0
    with pytest.raises(Overloaded, match="all 1 rows"):
        node.scheduler.reserve(make_sequence([1], key="b"))
    assert node.scheduler.schedule() is None
    first = node.fill_slot(sequence, pages)
    node.pool.detach_writer(7)
    update = node.scheduler.commit("a", first, TokenLogprobs(-1.0))
    node.note(update)
    assert (update.position, update.token, update.logprobs, update.finished) == (0, first, TokenLogprobs(-1.0), None)
    assert shape(node.plan()) == [("a", 20, 1)]
    node.scheduler.drop_step()
    node.run()
    assert node.tokens["a"] == node.expected(LONG, max_tokens=5) and node.is_clean()


def test_a_slots_whole_prompt_may_be_cached():
    node = Node()
    node.add("a", LONG, max_tokens=1)
    node.run()
    sequence = make_sequence(LONG, key="b", max_tokens=3)
    pages = node.scheduler.reserve(sequence)
    assert sequence.num_cached == 20 and node.engine.read(pages, 20) == kv_of(LONG)
    node.note(node.scheduler.commit("b", draw(kv_of(LONG))))
    node.run()
    assert node.tokens["b"] == node.expected(LONG, max_tokens=3)


def test_a_slots_pages_are_cached_by_its_commit_not_before():
    node = Node()
    sequence = make_sequence(LONG, key="a")
    pages = node.scheduler.reserve(sequence)
    assert node.pool.match(sequence.hashes) == []
    node.scheduler.commit("a", node.fill_slot(sequence, pages))
    assert node.pool.match(sequence.hashes) == pages


def test_a_first_token_that_ends_the_request_frees_the_slot_at_once():
    node = Node()
    sequence = make_sequence(LONG, key="a", max_tokens=1)
    first = node.fill_slot(sequence, node.scheduler.reserve(sequence))
    assert node.scheduler.commit("a", first).finished == "length"
    assert node.is_clean() and node.pool.num_cached == 5


def test_a_commit_while_a_step_is_in_flight_joins_the_next_one():
    node = Node()
    node.add("a", [1, 2], max_tokens=3)
    sequence = make_sequence(LONG, key="b", max_tokens=3)
    pages = node.scheduler.reserve(sequence)
    plan = node.plan()
    node.note(node.scheduler.commit("b", node.fill_slot(sequence, pages)))
    assert [update.key for update in node.finish_step(plan)] == ["a"]
    node.run()
    assert node.tokens["b"] == node.expected(LONG, max_tokens=3) and node.is_clean()


def test_a_slot_without_room_is_refused_and_holds_nothing():
    node = Node(num_pages=5)
    node.scheduler.reserve(make_sequence([1] * 12, key="a", max_tokens=5))
    with pytest.raises(Overloaded, match="no room for 4 tokens: 1 KV pages are spare"):
        node.scheduler.reserve(make_sequence([2] * 4, key="b", max_tokens=8))
    node.scheduler.cancel("a")
    assert node.is_clean() and node.pool.num_free == 5


def test_a_slot_that_can_never_fit_is_refused_for_good():
    with pytest.raises(RequestTooLarge):
        Node(num_pages=2).scheduler.reserve(make_sequence([1] * 9, key="a"))


def test_a_refused_slot_leaves_the_cache_as_it_was():
    node = Node(num_pages=5, max_rows=2)
    node.add("a", LONG[:8], max_tokens=1)
    node.run()
    node.add("b", [9] * 8, max_tokens=9)
    node.step()
    before = node.pool.num_available
    with pytest.raises(Overloaded):
        node.scheduler.reserve(make_sequence(LONG[:9], key="c", max_tokens=4))
    assert node.pool.num_available == before


def test_cancelling_a_slot_quarantines_pages_that_a_writer_may_still_write():
    node = Node(num_pages=6)
    node.add("a", LONG[:4], max_tokens=1)
    node.run()
    sequence = make_sequence(LONG, key="b")
    pages = node.scheduler.reserve(sequence)
    assert sequence.num_cached == 4
    node.pool.attach_writer(pages[1:], 7)
    assert node.scheduler.cancel("b") is sequence
    assert node.scheduler.is_idle() and node.pool.num_quarantined == 4 and node.pool.num_available == 2
    node.pool.detach_writer(7)
    assert node.is_clean() and node.pool.num_available == 6


@pytest.mark.parametrize("key", ["nobody", "running"])
def test_a_commit_for_what_is_no_slot_is_refused(key):
    node = Node()
    node.add("running", [1])
    with pytest.raises(ProtocolError, match="not a reserved slot"):
        node.scheduler.commit(key, 1)


def test_a_row_that_came_by_commit_and_is_preempted_computes_its_prompt_here():
    node = Node(num_pages=4, reserve_tokens=0)
    node.add("a", [1, 2, 3, 4, 5, 6], max_tokens=10)
    node.step()
    sequence = make_sequence([6, 5, 4, 3, 2, 1], key="b", max_tokens=8)
    pages = node.scheduler.reserve(sequence)
    node.note(node.scheduler.commit("b", node.fill_slot(sequence, pages)))
    node.run()
    assert sequence.num_preempted >= 1
    assert node.tokens["b"] == node.expected([6, 5, 4, 3, 2, 1], max_tokens=8) and node.is_clean()


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
        waiting=1, running=2, waiting_tokens=4 + 13, waiting_pairs=184, rows=3, context_tokens=3 + 7, slots_used=3, reserved=1, parked=0
    )  # fmt: skip


def test_a_waiting_prompt_counts_without_what_the_one_before_it_will_leave():
    node = Node(token_budget=8, max_rows=1)
    node.add("turn 1", LONG)
    first = node.scheduler.load().waiting_tokens
    node.add("turn 2", [*LONG, 7, 7])
    node.add("other", [9, *LONG])
    assert (first, node.scheduler.load().waiting_tokens) == (20, 20 + 2 + 21), "20 tokens are 5 blocks, all shared by the next turn"


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

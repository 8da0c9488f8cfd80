"""The scheduler of a node that shares requests with others: remote prefills are parked, slots become rows by their
commit."""

from __future__ import annotations

import pytest
from fake_engine import draw, kv_of, make_sequence
from scheduler_node import LONG, Node, shape

from pdcluster.core.errors import Overloaded, ProtocolError, RequestTooLarge
from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import TokenLogprobs

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
    assert node.scheduler.schedule() is None and not node.scheduler.is_idle()
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

"""Sequences that keep their place in the queue and are not admitted yet."""

from __future__ import annotations

import pytest
from fake_engine import make_sequence
from scheduler_node import LONG, Node, shape

from pdcluster.core.errors import Overloaded
from pdcluster.core.lifecycle import IllegalTransition, Residence


def test_a_held_sequence_is_passed_and_admitted_in_its_old_place_afterwards() -> None:
    node = Node(max_rows=1)
    held = node.add("held", [1, 2, 3], max_tokens=2)
    node.scheduler.hold(held)
    node.add("next", [4, 5, 6], max_tokens=2)
    node.add("last", [7, 8, 9], max_tokens=2)
    node.scheduler.check_integrity()
    plan = node.plan()
    assert shape(plan) == [("next", 0, 3)] and held.num_pages == 0
    node.finish_step(plan)
    node.scheduler.resume(held)
    node.step()
    assert shape(node.plan()) == [("held", 0, 3)], "before the one that came after it"
    node.scheduler.drop_step()
    node.run()
    assert set(node.ended) == {"held", "next", "last"} and held.num_overtaken == 0 and node.is_clean()


def test_nothing_is_scheduled_while_all_are_held() -> None:
    node = Node()
    held = node.add("held", [1, 2, 3], max_tokens=2)
    node.scheduler.hold(held)
    assert node.scheduler.schedule() is None and node.scheduler.load().waiting == 1 and not node.scheduler.is_idle()
    assert node.scheduler.cancel("held") is held and held.state is Residence.FINISHED
    assert node.is_clean()


def test_a_held_sequence_counts_in_the_queue() -> None:
    node = Node(max_waiting=1)
    node.scheduler.hold(node.add("held", [1, 2, 3], max_tokens=2))
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        node.scheduler.add(make_sequence([1], key="b"))


def test_only_a_waiting_sequence_can_be_held_and_only_a_held_one_resumed() -> None:
    node = Node()
    sequence = node.add("a", LONG, max_tokens=2)
    with pytest.raises(IllegalTransition):
        node.scheduler.resume(sequence)
    node.step()
    with pytest.raises(IllegalTransition):
        node.scheduler.hold(sequence)
    assert sequence.state is Residence.RUNNING
    node.run()
    assert node.is_clean()

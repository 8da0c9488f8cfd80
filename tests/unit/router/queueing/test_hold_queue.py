"""The hold queue: bounds, expiry, the order in which places are offered, and that nothing is lost or doubled whatever
happens."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.hold_queue import HoldLimits, HoldOutcome, HoldQueue, Lack

NOWHERE: frozenset[str] = frozenset()


def held(
    request: str,
    tenant: str = "a",
    *,
    work: float = 1.0,
    size_bytes: int = 10,
    arrived: float = 0.0,
    deadline: float = math.inf,
) -> QueuedRequest:
    return QueuedRequest(request, tenant, work, size_bytes, arrived, deadline)


def make_queue(**limits) -> HoldQueue:
    return HoldQueue(HoldLimits(**{"age_s": 60.0, "patience_s": 5.0, "quantum": 4.0, **limits}))


def release(queue: HoldQueue, num_places: int, now: float = 0.0) -> list[str]:
    left = num_places

    def offer(_: QueuedRequest) -> HoldOutcome:
        nonlocal left
        left -= 1
        return HoldOutcome.PLACED if left >= 0 else HoldOutcome.FULL

    return [one.request for one in queue.release(offer, now)]


def push_all(queue: HoldQueue, *requests: QueuedRequest) -> None:
    for one in requests:
        assert queue.lacks_room(one) is None
        queue.push(one)


def test_requests_go_when_places_free_and_in_order() -> None:
    queue = make_queue()
    push_all(queue, held("r1"), held("r2"), held("r3"))
    assert release(queue, 0) == []
    assert release(queue, 2) == ["r1", "r2"]
    assert release(queue, 2) == ["r3"]
    assert len(queue) == queue.num_bytes == 0
    queue.check_integrity()


@pytest.mark.parametrize(("limits", "bound"), [({"count": 3}, "count"), ({"size_bytes": 35}, "bytes")])
def test_the_queue_is_bounded(limits: dict[str, int], bound: str) -> None:
    queue = make_queue(**limits)
    push_all(queue, held("r1"), held("r2"), held("r3"))
    assert queue.lacks_room(held("r4")) == bound
    queue.remove("r2")
    assert queue.lacks_room(held("r4")) is None


def test_a_flood_of_one_tenant_leaves_room_for_another() -> None:
    queue = make_queue(count=100, is_shared=True)
    number = 0
    while queue.lacks_room(one := held(f"f{number}", "flood")) is None:
        queue.push(one)
        number += 1
    assert number == 80
    push_all(queue, held("r1", "other"))
    assert "r1" in release(queue, 5)


def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    queue = make_queue()
    push_all(queue, held("r1"), held("r2"))
    assert queue.remove("r1") == held("r1")
    assert queue.remove("r1") is None and "r1" not in queue
    assert release(queue, 1) == ["r2"]


def test_who_waits_too_long_or_past_its_deadline_is_taken_out() -> None:
    queue = make_queue(age_s=10.0)
    push_all(queue, held("r1", deadline=4.0), held("r2"), held("r3", arrived=3.0))
    assert queue.next_expiry() == 4.0
    assert [(one.held.request, one.reason) for one in queue.expire(4.0)] == [("r1", "deadline")]
    assert queue.expire(9.9) == []
    assert [(one.held.request, one.reason) for one in queue.expire(10.0)] == [("r2", "age")]
    assert queue.next_expiry() == 13.0
    assert release(queue, 5) == ["r3"] and queue.next_expiry() is None


def test_deadlines_come_first_until_others_have_waited_long_enough() -> None:
    """So that a stream of requests with deadlines does not starve one without."""
    queue = make_queue(patience_s=5.0)
    push_all(queue, held("old", arrived=0.0))
    push_all(queue, held("urgent", arrived=1.0, deadline=4.0), held("later", arrived=1.0, deadline=5.5))
    assert release(queue, 3) == ["urgent", "old", "later"]


def test_short_requests_pass_long_ones_that_have_time_but_only_so_many() -> None:
    queue = make_queue(patience_s=30.0, urgency=5.0)
    push_all(queue, held("long", work=4.0), held("short", work=0.5, arrived=1.0), held("late", work=0.5, arrived=18.0))
    assert release(queue, 3) == ["short", "long", "late"]


def test_a_very_long_request_is_due_in_the_end() -> None:
    queue = make_queue(patience_s=10.0, urgency=5.0)
    push_all(queue, held("long", work=100.0), held("short", work=1.0, arrived=6.0))
    assert release(queue, 2) == ["long", "short"]


def test_without_urgency_it_is_first_come_first_served() -> None:
    queue = make_queue(urgency=None)
    push_all(queue, held("long", work=4.0), held("short", work=0.5, arrived=1.0))
    assert release(queue, 2) == ["long", "short"]
    assert queue.work_before(held("new", work=0.5, arrived=2.0), NOWHERE) == 0.0
    push_all(queue, held("r3", work=4.0, arrived=1.5))
    assert queue.work_before(held("new", work=0.5, arrived=2.0), NOWHERE) == 4.0


def test_what_is_due_later_does_not_count_as_work_before() -> None:
    queue = make_queue(patience_s=30.0, urgency=5.0)
    push_all(queue, held("long", work=4.0), held("short", work=0.5))
    assert queue.work_before(held("new", work=1.0, arrived=1.0), NOWHERE) == 0.5


def test_what_is_lacked_is_claimed_once_it_is_due_by_no_less_urgent_ones() -> None:
    queue, lack = make_queue(patience_s=5.0), Lack(frozenset({"n1"}), 0)
    push_all(queue, held("choosy"), held("also"), held("r1"))
    for name in ("choosy", "also"):
        queue.set_aside(name, 1.0, lack)
    assert release(queue, 5) == ["r1"] and queue.num_able == 0 and queue.num_taken == 2
    assert queue.is_lacked({"n1", "n2"}) and not queue.is_lacked({"n2"})
    assert queue.claimed(0, 4.9) == NOWHERE and queue.claimed(0, 5.0) == {"n1"} == queue.claimed(7, 5.0)
    assert queue.claimed(-1, 5.0) == NOWHERE
    assert [(found, first.request) for found, first in queue.lacking()] == [(lack, "choosy")]
    for name in queue.who_lacks(lack):
        queue.bring_back(name)
    assert not queue.is_lacked({"n1"}) and release(queue, 5) == ["choosy", "also"]


def test_work_before_a_request_is_that_of_those_that_lack_the_same_nodes_too() -> None:
    queue = make_queue(urgency=None)
    push_all(queue, held("long", work=4.0))
    queue.set_aside("long", 1.0, Lack(frozenset({"n1"}), 0))
    new = held("new", arrived=2.0)
    assert queue.work_before(new, frozenset({"n1", "n2"})) == 4.0 and queue.work_before(new, frozenset({"n2"})) == 0.0
    assert queue.work_before(held("before", arrived=-1.0), frozenset({"n1"})) == 0.0


def test_only_so_many_are_passed_over() -> None:
    queue, offered = make_queue(look_ahead=3), []
    push_all(queue, *(held(f"r{number}") for number in range(10)))

    def refuse(one: QueuedRequest) -> HoldOutcome:
        offered.append(one.request)
        return HoldOutcome.ELSEWHERE

    assert queue.release(refuse, 0.0) == []
    assert offered == ["r0", "r1", "r2", "r3"]


def test_who_comes_back_is_let_in_even_when_the_queue_is_full() -> None:
    queue = make_queue(count=1)
    push_all(queue, held("r1"))
    back = QueuedRequest("r0", "a", 50.0, 10, -1.0, math.inf, is_charged=True)
    assert queue.lacks_room(back) is None
    queue.push(back)
    queue.check_integrity()
    assert release(queue, 1) == ["r0"]


class HoldMachine(RuleBasedStateMachine):
    """Requests come, go, leave and expire in any order, beside a model that only counts. Works are integers so that
    sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        order = {"patience_s": 10.0, "urgency": 3.0, "quantum": 4.0, "floor": 0.25}
        self.limits = HoldLimits(count=24, size_bytes=200, age_s=50.0, look_ahead=4, is_shared=True, **order)
        self.queue = HoldQueue(self.limits)
        self.now = 0.0
        self.inside: dict[str, QueuedRequest] = {}
        self.gone: set[str] = set()
        self.aside: dict[str, Lack | None] = {}
        self.number = 0

    @rule(
        tenant=st.sampled_from("abc"),
        work=st.integers(1, 10),
        size=st.integers(0, 40),
        patience=st.one_of(st.none(), st.integers(1, 60)),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
    )
    def come(self, tenant: str, work: int, size: int, patience: int | None, priority: int) -> None:
        self.number += 1
        deadline = math.inf if patience is None else self.now + patience
        one = QueuedRequest(
            f"r{self.number}", tenant, work, size, self.now, deadline, {"a": 1.0, "b": 2.0, "c": 0.5}[tenant], priority
        )
        bound = self.queue.lacks_room(one)
        if bound is None:
            self.queue.push(one)
            self.inside[one.request] = one
        assert bound != "count" or any(held.tenant == tenant for held in self.inside.values()), (
            "a newcomer finds a place"
        )

    @rule(data=st.data())
    @precondition(lambda self: self.inside)
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.inside)))
        assert self.queue.remove(request) == self.inside.pop(request)
        self.aside.pop(request, None)
        self.gone.add(request)

    @rule(data=st.data())
    @precondition(lambda self: self.inside)
    def no_node_takes_it(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.inside)))
        self.queue.set_aside(request, self.now, None)
        self.aside[request] = None

    @rule()
    @precondition(lambda self: self.aside)
    def a_node_takes_them_again(self) -> None:
        for request in self.aside:
            self.queue.bring_back(request)
        self.aside.clear()

    @rule(num_places=st.integers(0, 4), picky=st.sets(st.integers(1, 60), max_size=6), sets_aside=st.booleans())
    def places_free(self, num_places: int, picky: set[int], sets_aside: bool) -> None:
        """Some requests cannot use what is free."""
        left = num_places

        def offer(one: QueuedRequest) -> HoldOutcome:
            nonlocal left
            assert one.request in self.inside and one.request not in self.aside
            if left == 0:
                return HoldOutcome.FULL
            if int(one.request[1:]) in picky:
                if not sets_aside:
                    return HoldOutcome.ELSEWHERE
                self.aside[one.request] = Lack(frozenset({f"n{len(one.request)}"}), one.priority)
                self.queue.set_aside(one.request, self.now + 1.0, self.aside[one.request])
                return HoldOutcome.ASIDE
            left -= 1
            return HoldOutcome.PLACED

        before = dict(self.inside)
        placed = self.queue.release(offer, self.now)
        for one in placed:
            assert self.inside.pop(one.request) == one and one.request not in self.gone, "nothing goes twice"
            self.gone.add(one.request)
            self._check_order(one, before, picky)
            del before[one.request]

    def _check_order(self, one: QueuedRequest, before: dict[str, QueuedRequest], picky: set[int]) -> None:
        """Of its tenant's requests in its tier none was due earlier, but for those that could not go."""

        def due(held: QueuedRequest) -> tuple[float, int]:
            return self._due(held), int(held.request[1:])

        same = [
            held
            for held in before.values()
            if (held.tenant, held.priority) == (one.tenant, one.priority)
            and int(held.request[1:]) not in picky
            and held.request not in self.aside
        ]
        assert due(one) == min(due(held) for held in same)

    def _due(self, held: QueuedRequest) -> float:
        return min(held.deadline, held.arrived + min(3.0 * held.work, self.limits.patience_s))

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = {
            name for name, one in self.inside.items() if self.now >= min(one.deadline, one.arrived + self.limits.age_s)
        }
        expired = self.queue.expire(self.now)
        assert {one.held.request for one in expired} == due
        for one in expired:
            assert one.reason == ("deadline" if self.now >= one.held.deadline else "age")
            del self.inside[one.held.request]
            lack = self.aside.pop(one.held.request, None)
            assert one.nodes == (NOWHERE if lack is None else lack.nodes)
            self.gone.add(one.held.request)

    @invariant()
    def nothing_is_lost_and_the_bounds_hold(self) -> None:
        self.queue.check_integrity()
        assert {one.request for one in self.queue.waiting()} == set(self.inside)
        lacking = [lack for lack in self.aside.values() if lack is not None]
        assert self.queue.num_able == len(self.inside) - len(self.aside)
        assert self.queue.num_taken == self.queue.num_able + len(lacking)
        for lack, first in self.queue.lacking():
            alike = [self.inside[request] for request, other in self.aside.items() if other == lack]
            assert self._due(first) == min(map(self._due, alike)) and len(self.queue.who_lacks(lack)) == len(alike)
            is_due = self._due(first) <= self.now
            assert not is_due or lack.nodes <= self.queue.claimed(lack.priority, self.now)
            assert self.queue.is_lacked(lack.nodes)
        assert len(self.queue) <= self.limits.count and self.queue.num_bytes <= self.limits.size_bytes

    def teardown(self) -> None:
        """Whatever state it is in, all go when there are places: nobody is starved."""
        expected = set(self.inside)
        for request in self.aside:
            self.queue.bring_back(request)
        assert set(release(self.queue, len(expected) + 1, self.now)) == expected
        assert len(self.queue) == 0 and self.queue.num_bytes == 0


HoldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHoldMachine = HoldMachine.TestCase

"""Whose turn it is: deficit round robin over tenants, strict tiers with a floor, due times inside a tenant."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster.core.errors import IntegrityError
from pdcluster_router.queueing.fairness import FairQueue, QueuedRequest

QUANTUM = 4.0


def make_queue(floor: float = 0.1, burst: float = 0.0) -> FairQueue:
    return FairQueue(QUANTUM, floor, burst)


def held(
    request: str, tenant: str = "a", work: float = 1.0, *, weight: float = 1.0, priority: int = 0
) -> QueuedRequest:
    return QueuedRequest(request, tenant, work, 100, 0.0, math.inf, weight, priority)


def take(queue: FairQueue) -> QueuedRequest:
    turn = queue.peek()
    assert turn is not None
    taken = queue.take(turn)
    queue.check_integrity()
    return taken


def drain(queue: FairQueue) -> list[str]:
    return [take(queue).request for _ in range(len(queue))]


def test_one_tenant_is_served_in_the_order_it_came() -> None:
    queue = make_queue()
    for name in ("r1", "r2", "r3"):
        queue.add(held(name), due=5.0)
    assert drain(queue) == ["r1", "r2", "r3"]


def test_inside_a_tenant_the_earliest_due_goes_first() -> None:
    queue = make_queue()
    for name, due in (("late", 9.0), ("soon", 2.0), ("next", 4.0)):
        queue.add(held(name), due)
    assert drain(queue) == ["soon", "next", "late"]


def test_a_tenant_that_floods_waits_for_its_turn() -> None:
    queue = make_queue()
    for number in range(50):
        queue.add(held(f"flood{number}", "flood"), 1.0)
    queue.add(held("small", "other"), 1.0)
    assert drain(queue).index("small") <= QUANTUM, "after one quantum of the other's work at most"


def test_a_large_request_is_served_after_the_rounds_that_it_needs() -> None:
    queue = make_queue()
    queue.add(held("large", "a", work=20.0), 1.0)
    for number in range(100):
        queue.add(held(f"r{number}", "b", work=1.0), 1.0)
    before = drain(queue).index("large")
    assert 20.0 - QUANTUM <= before <= 20.0 + QUANTUM, "b releases as much as a is credited"


def test_weights_divide_the_work() -> None:
    queue = make_queue()
    for number in range(400):
        queue.add(held(f"a{number}", "a", weight=3.0), 1.0)
        queue.add(held(f"b{number}", "b", weight=1.0), 1.0)
    first = [take(queue).tenant for _ in range(160)]
    assert first.count("a") == 120


def test_urgent_requests_go_first_but_the_floor_is_kept() -> None:
    queue = make_queue(floor=0.1)
    for number in range(100):
        queue.add(held(f"u{number}", priority=-1), 1.0)
    for number in range(20):
        queue.add(held(f"n{number}", priority=0), 1.0)
        queue.add(held(f"b{number}", priority=5), 1.0)
    order = drain(queue)
    assert order[:10] == [f"u{number}" for number in range(10)]
    first = order[:100]
    assert 3 <= sum(name.startswith("n") for name in first) <= 5, "a tenth of the urgent work, shared by the two"
    assert 3 <= sum(name.startswith("b") for name in first) <= 5, "the least urgent tier has a floor too"


def test_what_a_tier_is_owed_does_not_pile_up_while_its_request_finds_no_place() -> None:
    queue = make_queue(floor=0.5)
    for number in range(100):
        queue.add(held(f"u{number}", priority=-1), 1.0)
    for number in range(50):
        queue.add(held(f"n{number}", priority=0), 1.0)
    passed = {f"n{number}" for number in range(50)}
    for _ in range(40):
        turn = queue.peek(passed)
        assert turn is not None
        queue.take(turn)
    first = [take(queue).request[0] for _ in range(9)]
    assert first.count("n") <= 4, first


def test_a_passed_request_is_left_out_of_the_round_and_keeps_its_turn() -> None:
    queue = make_queue()
    queue.add(held("r1", "a"), 1.0)
    queue.add(held("r2", "a"), 1.0)
    queue.add(held("r3", "b"), 1.0)
    first, second = queue.peek(), queue.peek({"r1"})
    assert first is not None and first.held.request == "r1"
    assert second is not None and second.held.request == "r2"
    last = queue.peek({"r1", "r2"})
    assert last is not None and last.held.request == "r3"
    queue.take(last)
    assert drain(queue) == ["r1", "r2"]
    assert queue.peek() is None


def test_what_was_paid_for_is_not_charged_again() -> None:
    queue = make_queue()
    queue.add(replace(held("back", "a", work=1000.0), is_charged=True), 1.0)
    for number in range(50):
        queue.add(held(f"r{number}", "b"), 1.0)
    assert drain(queue).index("back") <= QUANTUM


def test_work_before_a_new_request_counts_what_will_really_pass_it() -> None:
    queue = make_queue()
    for number in range(10):
        queue.add(held(f"a{number}", "a"), 1.0)
        queue.add(held(f"u{number}", "a", priority=-1), 1.0)
        queue.add(held(f"l{number}", "a", priority=1), 1.0)
    assert queue.work_before(held("new", "a"), 1.0) == 20.0, "the urgent ones and its own tenant's"
    assert queue.work_before(held("new", "a"), 0.9) == 10.0, "but for those that are due after it"
    assert queue.work_before(held("new", "b", work=2.0), 1.0) == 12.0, "the urgent ones, and as much of a's as its own"
    assert queue.work_before(held("new", "b", work=2.0, weight=2.0), 1.0) == 11.0, "half as much with twice the weight"
    assert queue.work_before(held("new", "b", priority=-1), 1.0) == 1.0
    assert queue.work_before(held("new", "b", priority=7), 1.0) == 30.0


def flooded(burst: float, others_before: int = 40) -> FairQueue:
    """A tenant waits with a lot of work, and has long used what it had in hand."""
    queue = make_queue(burst=burst)
    for number in range(200):
        queue.add(held(f"flood{number}", "flood"), 1.0)
    for _ in range(others_before):
        take(queue)
    return queue


def test_who_asks_now_and_then_goes_before_a_flood_as_far_as_it_took_less_than_its_share() -> None:
    queue = flooded(burst=20.0)
    new = held("small", "other", work=15.0)
    assert queue.work_before(new, 1.0) == 0.0
    queue.add(new, 1.0)
    assert drain(queue).index("small") <= QUANTUM + 1, "what the flood's visit is good for goes on"


def test_what_was_in_hand_is_used_up_and_earned_back_while_others_are_served() -> None:
    queue = flooded(burst=20.0)
    queue.add(held("first", "other", work=20.0), 1.0)
    while "first" in queue:
        take(queue)
    assert queue.work_before(held("second", "other", work=20.0), 1.0) >= 20.0 - QUANTUM, (
        "as much of the flood's as it brings"
    )
    for _ in range(40):
        take(queue)
    assert queue.work_before(held("second", "other", work=20.0), 1.0) == 0.0


def test_who_waits_while_nobody_else_does_uses_of_what_it_has_in_hand_no_more_than_its_work() -> None:
    queue = make_queue(burst=20.0)
    queue.add(held("alone", "other", work=2.0), 1.0)
    drain(queue)
    for number in range(50):
        queue.add(held(f"flood{number}", "flood"), 1.0)
    assert queue.work_before(held("small", "other", work=18.0), 1.0) == 0.0
    assert queue.work_before(held("large", "other", work=19.0), 1.0) == 1.0


def test_an_empty_queue_forgets_nobody_who_took_more_than_its_share() -> None:
    queue = make_queue(burst=20.0)
    for number in range(20):
        queue.add(held(f"early{number}", "flood"), 1.0)
    drain(queue)
    for number in range(50):
        queue.add(held(f"flood{number}", "flood"), 1.0)
    queue.add(held("small", "other", work=10.0), 1.0)
    assert drain(queue).index("small") <= QUANTUM


def test_a_request_may_wait_once_only() -> None:
    queue = make_queue()
    queue.add(held("r1"), 1.0)
    with pytest.raises(IntegrityError, match="r1 waits already"):
        queue.add(held("r1"), 1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), min_size=30, max_size=120),
    st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1.0, 3.0]), st.just(1.0)),
)
def test_tenants_that_wait_differ_by_one_quantum_and_their_largest_requests(
    given_works: list[tuple[str, int]], weights: tuple[float, ...]
) -> None:
    """The bound of deficit round robin, over every stretch in which two tenants wait all the time."""
    queue, weight_of = make_queue(), dict(zip("abc", weights, strict=True))
    left: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for number, (tenant, work) in enumerate(given_works):
        queue.add(held(f"{tenant}{number}", tenant, work, weight=weight_of[tenant]), 1.0)
        left[tenant].append(work)
    largest = {tenant: max(works, default=0) for tenant, works in left.items()}
    served = dict.fromkeys("abc", 0.0)
    while len(queue):
        taken = take(queue)
        left[taken.tenant].pop()
        served[taken.tenant] += taken.work
        waiting = [tenant for tenant in "abc" if left[tenant]]
        for one in waiting:
            for other in waiting:
                bound = QUANTUM + largest[one] / weight_of[one] + largest[other] / weight_of[other]
                assert served[one] / weight_of[one] - served[other] / weight_of[other] <= bound + 1e-6

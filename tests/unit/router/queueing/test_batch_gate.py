"""Batch requests at the gate: below all others, only where they are in nobody's way, and never refused for being slow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from scripted_cluster import make_node

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster.telemetry.metrics import HoldMetrics
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import BATCH_PRIORITY, Force
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.demand import DemandMeter
from pdcluster_router.queueing.fairness import FairQueue, QueuedRequest
from pdcluster_router.queueing.gate import Gate
from pdcluster_router.queueing.headroom import Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.queueing.waiting import WaitingRequests

# A token of a prompt takes 1 ms; a step 10 ms and 1 ms for each row.
COST = NodeCost(PrefillCost(0.0, 0.001, samples=100), DecodeCost(0.01, 0.001, samples=100))


def load(waiting_tokens: int = 0, rows: int = 0, batch_tokens: int = 0, slots: int = 64) -> m.Load:
    return m.Load(
        waiting_tokens // 100, rows, waiting_tokens, 0, 100, 100, 0, 0, 0, slots, rows, rows=rows,
        batch_tokens=batch_tokens,
    )  # fmt: skip


@dataclass
class World:
    nodes: list[NodeView]
    itl_s: float = 0.0
    asked: list[str] = field(default_factory=list)

    def decide(self, held: QueuedRequest, others: frozenset[str] = frozenset()) -> Decision:
        self.asked.append(held.request)
        force: Force = "remote" if len({node.role for node in self.nodes}) > 1 else "auto"
        query = Query(100, expected_output=10, itl_s=self.itl_s, busy=others, force=force)
        return make_policy("seconds").choose(query, ClusterView(tuple(self.nodes)))

    def set_load(self, name: str, new: m.Load) -> None:
        self.nodes = [replace(node, load=new) if node.name == name else node for node in self.nodes]


def make_world(*names: str) -> World:
    roles: dict[str, m.Role] = {"p": "prefill", "d": "decode", "m": "mixed"}
    return World([replace(make_node(name, roles[name[0]]), cost=COST) for name in names])


def make_gate(slo: Slo | None = None, **limits) -> Gate:
    return Gate(HoldLimits(**limits), Headroom(backlog_s=0.25), slo or Slo())


def chat(request: str, arrived: float = 0.0, **more) -> QueuedRequest:
    return QueuedRequest(request, "a", 0.0, 100, arrived, more.pop("deadline", math.inf), **more)


def batch(request: str, arrived: float = 0.0, **more) -> QueuedRequest:
    return chat(request, arrived, priority=BATCH_PRIORITY, **more)


def names(released: list) -> list[str]:
    return [one.held.request for one in released]


def test_a_batch_request_goes_at_once_where_it_is_in_nobodys_way():
    world, gate = make_world("p0", "d0"), make_gate()
    assert gate.try_admit(batch("b"), world.decide, 0.0) is not None


@pytest.mark.parametrize(
    ("node", "given", "goes"),
    [
        ("p0", load(waiting_tokens=1), False),  # another prompt waits
        ("p0", load(batch_tokens=249), True),
        ("p0", load(batch_tokens=250), False),  # as much as may wait on a node
        ("d0", load(rows=4), True),  # a lone row takes 11 ms, 22 are its limit: half of that headroom is 5 rows more
        ("d0", load(rows=5), True),
        ("d0", load(rows=6), False),
    ],
)
def test_batch_waits_for_prompts_and_for_half_of_the_headroom_of_rows(node: str, given: m.Load, goes: bool):
    world, gate = make_world("p0", "d0"), make_gate()
    world.set_load(node, given)
    assert (gate.try_admit(batch("b"), world.decide, 0.0) is not None) is goes
    assert gate.try_admit(chat("c"), world.decide, 0.0) is not None, "others go"
    world.set_load(node, load())
    assert names(gate.release(world.decide, 0.2)) == ([] if goes else ["b"])


def test_the_inter_token_limit_bounds_batch_rows_where_there_is_one():
    world, gate = make_world("p0", "d0"), make_gate()
    world.itl_s = 0.1115  # half of the headroom is 50.25 ms beyond a lone row's 11
    world.set_load("d0", load(rows=50))
    assert gate.try_admit(batch("b0"), world.decide, 0.0) is not None
    world.set_load("d0", load(rows=51))
    assert gate.try_admit(batch("b1"), world.decide, 0.0) is None


def test_batch_takes_another_node_where_its_best_one_is_closed_to_it():
    world, gate = make_world("p0", "p1", "d0", "d1"), make_gate()
    world.set_load("p0", load(batch_tokens=300))
    world.set_load("d0", load(rows=9))
    gate.hold(batch("b"), world.decide(batch("b")), 0.0)
    (released,) = gate.release(world.decide, 0.2)
    assert released.decision is not None
    assert (released.decision.first.name, released.decision.decode.name) == ("p1", "d1")


def test_whoever_comes_passes_all_batch_requests_that_wait():
    world, gate = make_world("m0"), make_gate()
    world.set_load("m0", load(waiting_tokens=300))
    assert gate.try_admit(batch("b0"), world.decide, 0.0) is None
    assert gate.try_admit(batch("b1"), world.decide, 0.0) is None
    assert gate.try_admit(chat("c0"), world.decide, 0.1) is None
    world.set_load("m0", load())
    assert gate.try_admit(batch("b2"), world.decide, 0.2) is None, "a chat waits"
    assert names(gate.release(world.decide, 0.2)) == ["c0"]
    assert names(gate.release(world.decide, 0.2, most=8)) == ["b0", "b1", "b2"]
    gate.queue.check_integrity()


def test_batch_requests_alone_keep_no_other_from_going_at_once():
    world, gate = make_world("m0"), make_gate()
    world.set_load("m0", load(rows=9))
    assert all(gate.try_admit(batch(f"b{number}"), world.decide, 0.0) is None for number in range(20))
    assert gate.try_admit(chat("c", is_charged=True), world.decide, 0.1) is not None


def test_no_batch_request_is_even_looked_at_while_another_waits():
    world, gate = make_world("m0"), make_gate()
    world.set_load("m0", load(waiting_tokens=300))
    for number in range(40):
        gate.try_admit(batch(f"b{number}"), world.decide, 0.0)
    gate.try_admit(chat("c"), world.decide, 0.0)
    world.asked.clear()
    assert gate.release(world.decide, 1.0) == []
    assert set(world.asked) == {"c"}


def test_no_service_level_refuses_a_batch_request_nor_counts_it():
    world, gate = make_world("m0"), make_gate(Slo(ttft_s=0.3))
    world.set_load("m0", load(waiting_tokens=240))
    with pytest.raises(errors.Overloaded):
        gate.try_admit(chat("c0"), world.decide, 0.0)
    assert gate.try_admit(batch("b0"), world.decide, 0.0) is None
    world.set_load("m0", load(batch_tokens=240))
    assert gate.try_admit(chat("c1"), world.decide, 0.0) is not None, "batch prompts delay it by no wait"


def test_a_batch_request_waits_until_its_deadline_however_long():
    world, gate = make_world("m0"), make_gate(age_s=5.0)
    world.set_load("m0", load(rows=9))
    gate.try_admit(batch("b", deadline=300.0), world.decide, 0.0)
    assert gate.expire(299.0) == []
    (late,) = gate.expire(300.0)
    assert isinstance(late.error, errors.DeadlineExceeded)


def test_batch_requests_take_half_of_the_places():
    world, gate = make_world("m0"), make_gate(count=4)
    world.set_load("m0", load(waiting_tokens=300))
    for number in range(2):
        gate.try_admit(batch(f"b{number}"), world.decide, 0.0)
    with pytest.raises(errors.Overloaded, match="no more may"):
        gate.try_admit(batch("b2"), world.decide, 0.0)
    assert gate.try_admit(chat("c"), world.decide, 0.0) is None
    gate.leave("b0", 0.1)
    assert gate.try_admit(batch("b3"), world.decide, 0.1) is None
    gate.queue.check_integrity()


def test_the_tier_of_batch_has_no_share_of_the_work_of_others():
    queue = FairQueue(4.0, 0.5)
    for number in range(50):
        queue.add(chat(f"c{number}", priority=10), 1.0)
    queue.add(batch("b"), 1.0)
    order = []
    while (turn := queue.peek()) is not None:
        order.append(queue.take(turn).request)
    assert order[-1] == "b" and queue.num_batch == 0


def test_held_batch_work_asks_for_no_nodes_but_for_a_first_one():
    meter = DemandMeter()
    report = meter.report("r", 1.0, [replace(batch("b"), work=9.0), replace(chat("c"), work=2.0)], 10.0)
    assert (report.held_s, report.num_held) == (2.0, 2)


@pytest.mark.parametrize("name", ["m0", "d0"])
def test_rows_of_batch_requests_keep_no_other_from_a_full_node(name: str):
    """The node preempts them."""
    world, gate = make_world(*dict.fromkeys(["m0" if name == "m0" else "p0", name])), make_gate()
    full = replace(load(rows=4, slots=4), batch_rows=1, pages_parked=90)
    world.set_load(name, full)
    world.set_load("p0", replace(load(), pages_parked=90))
    assert gate.try_admit(batch("b"), world.decide, 0.0) is None
    assert gate.try_admit(chat("c0"), world.decide, 0.0) is not None
    world.set_load(name, replace(full, batch_rows=0))
    assert gate.try_admit(chat("c1"), world.decide, 0.0) is None


async def test_waits_of_batch_requests_are_counted_apart():
    world, gate, metrics, now = make_world("m0"), make_gate(), HoldMetrics(CollectorRegistry()), 0.0
    waiting = WaitingRequests(gate, metrics, lambda: now)
    world.set_load("m0", load(waiting_tokens=300))
    for one in (chat("c"), batch("b0"), batch("b1")):
        waiting.hold(
            one, world.decide(one), lambda now, others, one=one: world.decide(one, others), lambda answer: None
        )
    assert (metrics.held._value.get(), metrics.held_batch._value.get()) == (1, 2)
    now = 0.5
    for name in ("b0", "c", "b1"):
        waiting.leave(name)
    assert (metrics.held._value.get(), metrics.held_batch._value.get()) == (0, 0)
    (family,) = metrics.wait_seconds.collect()
    assert [sample.value for sample in family.samples if sample.name.endswith("_count")] == [1.0]


def test_a_node_with_batch_rows_only_takes_more_up_to_its_slots_and_others_at_once():
    world, gate = make_world("p0", "d0"), make_gate()
    world.set_load("d0", replace(load(rows=40), batch_rows=40))
    assert gate.try_admit(batch("b0"), world.decide, 0.0) is not None
    assert gate.try_admit(chat("c0"), world.decide, 0.0) is not None, "they give way to it"
    world.set_load("d0", replace(load(rows=40), batch_rows=39))
    assert gate.try_admit(batch("b1"), world.decide, 0.0) is None
    assert gate.try_admit(chat("c1"), world.decide, 0.0) is not None

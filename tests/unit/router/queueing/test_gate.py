"""The gate in simulated time: who goes at once, who waits, who is refused, and what a wait is predicted to be."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass, field

import msgspec
import pytest
from leftovers import find_names
from msgspec.structs import replace
from scripted_cluster import make_node

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.gate import Gate
from pdcluster_router.queueing.headroom import Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits

TOKEN_S = 0.001
COST = NodeCost(PrefillCost(0.0, TOKEN_S, samples=100), DecodeCost(0.01, 0.001, samples=100))


def load(waiting_tokens: int = 0, rows: int = 0, slots: int = 8) -> m.Load:
    return m.Load(waiting_tokens // 100, rows, waiting_tokens, 0, 100, 100, 0, 0, 0, slots, rows)


@dataclass
class World:
    """Nodes whose backlog the test sets; prompts by request."""

    nodes: list[NodeView]
    prompts: dict[str, Query] = field(default_factory=dict)
    decided: list[str] = field(default_factory=list)
    views: list[weakref.ref[ClusterView]] = field(default_factory=list)
    policy: str = "product"

    def decide(self, held: QueuedRequest, others: frozenset[str] = frozenset()) -> Decision:
        self.decided.append(held.request)
        view, query = ClusterView(tuple(self.nodes)), self.prompts.get(held.request, Query(100))
        query = replace(query, busy=query.busy | others)
        self.views.append(weakref.ref(view))
        return make_policy(self.policy).choose(query, view)

    def set_load(self, name: str, new: m.Load) -> None:
        self.nodes = [replace(node, load=new) if node.name == name else node for node in self.nodes]


def make_world(*roles: m.Role) -> World:
    return World([replace(make_node(f"{role[0]}{number}", role), cost=COST) for number, role in enumerate(roles)])


def make_gate(slo: Slo | None = None, **limits) -> Gate:
    return Gate(HoldLimits(**limits), Headroom(backlog_s=0.25), slo or Slo())


def held(request: str, arrived: float = 0.0, deadline: float = math.inf, **more) -> QueuedRequest:
    return QueuedRequest(request, more.pop("tenant", "a"), 0.0, 100, arrived, deadline, **more)


def test_a_request_goes_at_once_while_a_node_has_little_to_do() -> None:
    world, gate = make_world("prefill", "decode"), make_gate()
    world.set_load("p0", load(waiting_tokens=249))
    decision = gate.try_admit(held("r1"), world.decide, 0.0)
    assert decision is not None and decision.first.name == "p0"


def test_a_request_is_held_when_every_node_is_past_its_backlog_and_scored_again_when_one_is_not() -> None:
    world, gate = make_world("mixed", "mixed"), make_gate()
    for name in ("m0", "m1"):
        world.set_load(name, load(waiting_tokens=300))
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.1) == []
    world.set_load("m1", load(waiting_tokens=10))
    (released,) = gate.release(world.decide, 0.2)
    assert released.decision is not None and released.decision.first.name == "m1"
    assert gate.release(world.decide, 0.2) == [] and len(gate.queue) == 0


def test_who_comes_while_others_wait_does_not_pass_them() -> None:
    world, gate = make_world("mixed"), make_gate()
    world.set_load("m0", load(waiting_tokens=300))
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    world.set_load("m0", load())
    assert gate.try_admit(held("r2"), world.decide, 0.1) is None
    assert [one.held.request for one in gate.release(world.decide, 0.1, most=2)] == ["r1", "r2"]


def test_prompts_are_computed_ahead_of_full_decode_nodes_but_not_without_end() -> None:
    world, gate = make_world("prefill", "decode"), make_gate()
    world.set_load("d1", load(rows=8))
    world.set_load("p0", msgspec.structs.replace(load(), pages_parked=24))
    assert gate.try_admit(held("r1"), world.decide, 0.0) is not None, "the prefill node is not idled"
    world.set_load("p0", msgspec.structs.replace(load(), pages_parked=25))
    assert gate.try_admit(held("r2"), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.1) == []
    world.set_load("d1", load(rows=7))
    assert len(gate.release(world.decide, 0.2)) == 1


def test_a_node_that_does_it_all_needs_a_row_of_its_own() -> None:
    world, gate = make_world("mixed"), make_gate()
    world.set_load("m0", load(rows=8))
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    world.set_load("m0", load(rows=7))
    assert len(gate.release(world.decide, 0.2)) == 1


def test_a_node_that_asked_this_request_to_be_left_alone_is_no_place_for_it_but_for_others() -> None:
    world, gate = make_world("mixed"), make_gate(patience_s=5.0)
    world.prompts["r1"] = Query(100, busy=frozenset({"m0-boot"}))
    assert gate.try_admit(held("r1", is_charged=True), world.decide, 0.0) is None
    assert gate.try_admit(held("r2"), world.decide, 0.0) is not None
    assert gate.release(world.decide, 0.1) == []
    world.prompts["r1"] = Query(100)
    assert [one.held.request for one in gate.release(world.decide, 0.2)] == ["r1"]


def test_a_node_that_failed_a_request_is_no_place_for_it_while_there_is_another() -> None:
    world, gate = make_world("mixed", "mixed"), make_gate()
    world.set_load("m1", load(waiting_tokens=300))
    world.prompts["r1"] = Query(100, excluded=frozenset({"m0-boot"}))
    assert gate.try_admit(held("r1", is_charged=True), world.decide, 0.0) is None
    world.nodes.pop()
    assert [one.held.request for one in gate.release(world.decide, 0.1)] == ["r1"], "it is the only one"


def test_an_old_request_keeps_its_node_from_those_behind_it() -> None:
    """Only the large node can take it; short prompts must not keep that one past its backlog for ever."""
    world, gate = make_world("mixed", "mixed"), make_gate(patience_s=5.0)
    world.nodes = [replace(world.nodes[0], max_len=10_000), world.nodes[1]]
    world.prompts["long"] = Query(9000)
    world.set_load("m0", load(waiting_tokens=300))
    world.set_load("m1", load(waiting_tokens=300))
    assert gate.try_admit(held("long"), world.decide, 0.0) is None
    assert gate.try_admit(held("s0", arrived=0.1), world.decide, 0.1) is None
    world.set_load("m1", load(waiting_tokens=200))
    assert [one.held.request for one in gate.release(world.decide, 0.2)] == ["s0"], "it is passed where it could not go"
    for number in range(1, 5):
        assert gate.try_admit(held(f"s{number}", arrived=4.9), world.decide, 4.9) is None
    world.nodes = [replace(node, in_flight=0 if node.name == "m0" else 9) for node in world.nodes]
    (released,) = gate.release(world.decide, 6.0)
    assert released.decision is not None and released.decision.first.name == "m1", (
        "the policy would send it to the node of the first"
    )
    world.set_load("m0", load())
    assert [one.held.request for one in gate.release(world.decide, 6.1)] == ["long"]


def test_who_waits_for_the_nodes_of_one_mode_does_not_hold_back_those_of_the_other() -> None:
    """No prefill node has room for the first; the decode node is idle, and the third may run there alone."""
    world, gate = make_world("prefill", "decode"), make_gate()
    world.prompts = {
        "r1": Query(100, force="remote"),
        "r2": Query(100, force="remote"),
        "r3": Query(100, force="local"),
    }
    world.set_load("p0", load(waiting_tokens=300))
    for moment, name in enumerate(("r1", "r2")):
        assert gate.try_admit(held(name, arrived=moment / 100), world.decide, moment / 100) is None
    decision = gate.try_admit(held("r3"), world.decide, 0.05)
    assert decision is not None and decision.first.name == "d1"
    assert gate.release(world.decide, 0.1, most=3) == []
    world.set_load("p0", load())
    assert [one.held.request for one in gate.release(world.decide, 0.2, most=3)] == ["r1", "r2"], "in their order"


def test_who_waits_for_nodes_that_are_still_full_is_scored_now_and_then_and_not_at_each_report() -> None:
    world, gate = make_world("prefill", "decode"), make_gate(look_ahead=16)
    world.set_load("p0", load(waiting_tokens=300))
    world.prompts = {f"r{number}": Query(100, force="remote") for number in range(40)}
    for number, name in enumerate(world.prompts):
        assert gate.try_admit(held(name, arrived=number / 1000), world.decide, number / 1000) is None
    world.decided.clear()
    for turn in range(10):
        assert gate.release(world.decide, 0.1 + turn / 1000) == []
    assert world.decided == ["r0"] * 10, "the first stands for all"
    world.decided.clear()
    for turn in range(10):
        assert gate.release(world.decide, 1.0 + turn / 1000) == []
    assert len(world.decided) == 10 + 16, "others are looked at once in a while"
    world.set_load("p0", load())
    assert [one.held.request for one in gate.release(world.decide, 1.12, most=2)] == ["r0", "r1"], (
        "not when there is room again"
    )
    for name in ("p0", "d1"):
        world.set_load(name, load(waiting_tokens=300))
    world.decided.clear()
    assert gate.release(world.decide, 2.0) == [] and world.decided == ["r2"], "nobody can go where all is full"


def test_one_that_could_go_is_not_held_back_by_another_that_lacks_the_same() -> None:
    """Both were told by the only node to come back later. That time is over for one; the other has its turn before."""
    world, gate = make_world("mixed", "mixed"), make_gate()
    world.nodes[1] = replace(world.nodes[1], max_len=50)
    world.prompts = {name: Query(100, busy=frozenset({"m0-boot"})) for name in ("first", "able")}
    assert gate.try_admit(held("first", 0.1, is_charged=True), world.decide, 0.1) is None
    assert gate.try_admit(held("able", 0.0, tenant="b", is_charged=True), world.decide, 0.1) is None
    world.prompts["able"] = Query(100)
    assert [one.held.request for one in gate.release(world.decide, 0.2)] == ["able"]


def test_an_old_request_keeps_the_nodes_of_its_mode_though_it_was_not_scored_just_now() -> None:
    world, gate = make_world("prefill", "decode"), make_gate(patience_s=5.0)
    world.prompts = {
        "r1": Query(100, force="remote"),
        "r2": Query(100, force="remote"),
        "r3": Query(100, force="local"),
    }
    world.set_load("p0", load(waiting_tokens=300))
    world.set_load("d1", load(rows=8))
    for name in ("r1", "r2", "r3"):
        assert gate.try_admit(held(name), world.decide, 0.0) is None
    for moment in (6.0, 6.01):
        assert gate.release(world.decide, moment, most=3) == []
    world.prompts["r3"] = Query(100, force="local", excluded=frozenset({"d1-boot"}))
    world.set_load("p0", load(waiting_tokens=240))
    world.set_load("d1", load(rows=8))
    assert [one.held.request for one in gate.release(world.decide, 6.02, most=3)] == ["r1", "r2", "r3"]


@pytest.mark.parametrize("is_charged", [False, True])
def test_a_request_waits_while_no_node_takes_work_and_goes_when_one_does(is_charged: bool) -> None:
    world, gate = make_world("mixed"), make_gate()
    nodes, world.nodes = world.nodes, []
    assert gate.try_admit(held("r1", is_charged=is_charged), world.decide, 0.0) is None
    assert gate.release(world.decide, 5.0) == [] and len(gate.queue) == 1
    world.nodes = nodes
    (released,) = gate.release(world.decide, 5.1)
    assert released.decision is not None and released.decision.first.name == "m0" and len(gate.queue) == 0


def test_a_held_request_whose_nodes_go_away_waits_for_others() -> None:
    world, gate = make_world("mixed"), make_gate()
    world.set_load("m0", load(waiting_tokens=300))
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    nodes, world.nodes = world.nodes, []
    assert gate.release(world.decide, 0.1) == []
    world.nodes = [replace(nodes[0], is_cordoned=True)]
    assert gate.release(world.decide, 0.2) == []
    world.nodes = [replace(nodes[0], load=load())]
    assert [one.held.request for one in gate.release(world.decide, 0.3)] == ["r1"]


def test_who_waited_too_long_for_any_node_hears_why_none_took_it() -> None:
    world, gate = make_world(), make_gate(age_s=10.0)
    gate.try_admit(held("r1", deadline=2.0), world.decide, 0.0)
    gate.try_admit(held("r2"), world.decide, 0.0)
    (late,) = gate.expire(2.0)
    assert isinstance(late.error, errors.DeadlineExceeded) and "none of 0 known nodes" in str(late.error)
    (old,) = gate.expire(10.0)
    assert isinstance(old.error, errors.Unavailable) and "none of 0 known nodes" in str(old.error)
    gate.queue.check_integrity()


def test_no_more_new_requests_are_parked_than_may_wait_but_all_that_were_accepted() -> None:
    world, gate = make_world(), make_gate(count=1)
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    with pytest.raises(errors.Unavailable, match="no more may; none of 0 known nodes"):
        gate.try_admit(held("r2"), world.decide, 0.0)
    assert gate.try_admit(held("r3", is_charged=True), world.decide, 0.0) is None


def test_a_mode_without_nodes_keeps_waiting_only_who_was_accepted() -> None:
    """A new request may choose another mode."""
    world, gate = make_world("decode"), make_gate()
    world.prompts["r1"] = world.prompts["r2"] = Query(100, force="remote")
    with pytest.raises(errors.Unavailable, match="mode remote needs"):
        gate.try_admit(held("r1"), world.decide, 0.0)
    assert gate.try_admit(held("r2", is_charged=True), world.decide, 0.0) is None


def test_a_time_without_nodes_makes_no_predicted_wait_longer() -> None:
    world, gate = make_world("mixed"), make_gate()
    nodes, world.nodes = world.nodes, []
    gate.try_admit(held("r1"), world.decide, 0.0)
    gate.release(world.decide, 30.0)
    world.nodes = nodes
    world.set_load("m0", load(waiting_tokens=300))
    gate.release(world.decide, 30.0)
    more = QueuedRequest("r2", "a", 1.0, 100, 30.0, math.inf)
    gate.hold(more, world.decide(more), 30.0)
    nodes = frozenset({"m0-boot"})
    assert gate.wait_s(held("r3", 30.0), nodes) == pytest.approx(gate.queue.work_before(held("r3", 30.0), nodes))


def test_a_full_queue_refuses_at_once_and_says_how_long_the_wait_would_be() -> None:
    world, gate = make_world("mixed"), make_gate(count=20)
    world.set_load("m0", load(waiting_tokens=300))
    for number in range(20):
        assert gate.try_admit(held(f"r{number}"), world.decide, 0.0) is None
    with pytest.raises(errors.Overloaded, match=r"20 requests .* wait") as refused:
        gate.try_admit(held("r20"), world.decide, 0.0)
    assert refused.value.reason == "hold_count"
    assert refused.value.retry_after_s == pytest.approx(20 * 100 * TOKEN_S + 0.05), (
        "the work before it, and what the node is past its backlog"
    )
    assert len(gate.queue) == 20


def test_with_a_service_level_the_queue_is_as_long_as_the_level_allows() -> None:
    world, gate = make_world("mixed", "mixed"), make_gate(slo=Slo(ttft_s=1.0, margin=0.0))
    for name in ("m0", "m1"):
        world.set_load(name, load(waiting_tokens=250))
    admitted = 0
    with pytest.raises(errors.Overloaded) as refused:
        for number in range(100):
            gate.try_admit(held(f"r{number}"), world.decide, 0.0)
            admitted += 1
    assert refused.value.reason == "slo"
    assert admitted == 11, "two nodes do 0.1 s each; 0.25 s on a node, 0.25 s for a prompt, and 0.5 s of wait or less"


def test_a_moment_in_which_no_place_frees_does_not_end_admission() -> None:
    """A prompt of two seconds on the only node is enough for that."""
    world, gate = make_world("mixed"), make_gate(slo=Slo(ttft_s=10.0))
    world.set_load("m0", load(waiting_tokens=2000))
    for number in range(3):
        assert gate.try_admit(held(f"r{number}"), world.decide, 0.0) is None
    assert gate.release(world.decide, 1.5) == []
    assert gate.try_admit(held("r3"), world.decide, 1.5) is None


def test_nobody_is_told_to_wait_longer_than_any_request_may() -> None:
    world, gate = make_world("mixed"), make_gate(count=1, age_s=30.0)
    world.set_load("m0", load(waiting_tokens=250))
    assert gate.try_admit(held("r0"), world.decide, 0.0) is None
    assert gate.release(world.decide, 29.0) == [] and gate.release(world.decide, 1000.0) == []
    with pytest.raises(errors.Overloaded) as refused:
        gate.try_admit(held("r1"), world.decide, 1000.0)
    assert refused.value.retry_after_s == 30.0


def test_deadline_and_age_end_a_wait() -> None:
    world, gate = make_world("mixed"), make_gate(age_s=10.0)
    world.set_load("m0", load(waiting_tokens=300))
    gate.try_admit(held("r1", deadline=2.0), world.decide, 0.0)
    gate.try_admit(held("r2"), world.decide, 0.0)
    (late,) = gate.expire(2.0)
    assert late.held.request == "r1" and isinstance(late.error, errors.DeadlineExceeded)
    (old,) = gate.expire(10.0)
    assert isinstance(old.error, errors.Overloaded) and old.error.reason == "hold_age"
    gate.queue.check_integrity()


def test_a_client_that_leaves_frees_its_place() -> None:
    world, gate = make_world("mixed"), make_gate(count=1)
    world.set_load("m0", load(waiting_tokens=300))
    gate.try_admit(held("r1"), world.decide, 0.0)
    gate.leave("r1", 0.5)
    assert gate.try_admit(held("r2"), world.decide, 0.5) is None


@pytest.mark.parametrize("how", ["left", "late"])
def test_nothing_is_left_of_a_request_that_was_passed_over_and_is_gone(how: str) -> None:
    world, gate = make_world("mixed"), make_gate()
    world.set_load("m0", load(waiting_tokens=300))
    assert gate.try_admit(held("r1", deadline=5.0), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.1) == []
    if how == "left":
        gate.leave("r1", 0.2)
    else:
        assert len(gate.expire(5.0)) == 1
    assert gate.queue.next_expiry() is None
    assert find_names({"gate": gate}, {"r1"}, "pdcluster", ()) == []


def test_a_node_that_does_nothing_is_open_whatever_is_believed_of_it() -> None:
    world, gate = make_world("mixed"), make_gate()
    world.nodes = [replace(world.nodes[0], pending=InFlightWork(requests=9, prefill_tokens=10**6, rows=9))]
    assert gate.try_admit(held("r1"), world.decide, 0.0) is not None
    world.nodes = [replace(world.nodes[0], in_flight=1)]
    assert gate.try_admit(held("r2"), world.decide, 0.0) is None


# ------------------------------------------------------------ for the sake of rows


# A row alone takes 11 ms a token and may take 22: a node has room for 12 of them.
SLOW = NodeCost(PrefillCost(0.0, TOKEN_S, samples=100), DecodeCost(0.01, 0.001, samples=100))


def batch(rows: int) -> m.Load:
    return msgspec.structs.replace(load(rows=rows, slots=64), rows=rows)


def make_slow(*roles: m.Role, rows: int) -> World:
    """The last node decodes."""
    world = make_world(*roles)
    world.nodes = [replace(node, cost=SLOW) for node in world.nodes]
    world.set_load(world.nodes[-1].name, batch(rows))
    return world


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",)], ids=["pair", "one node"])
def test_a_request_waits_while_rows_are_as_slow_as_they_may_be_and_its_first_token_has_time(
    roles: tuple[m.Role, ...],
) -> None:
    world, gate = make_slow(*roles, rows=12), make_gate()
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.1) == []
    world.set_load(world.nodes[-1].name, batch(11))
    assert [one.held.request for one in gate.release(world.decide, 0.15)] == ["r1"]


def test_half_of_what_a_first_token_may_take_is_the_longest_wait_for_rows() -> None:
    """100 tokens take 0.1 s alone, so the first one may take 0.5 s."""
    world, gate = make_slow("prefill", "decode", rows=40), make_gate()
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.24) == []
    assert [one.held.request for one in gate.release(world.decide, 0.26)] == ["r1"]


def test_who_has_less_time_passes_those_that_wait_for_rows() -> None:
    world, gate = make_slow("prefill", "decode", rows=40), make_gate()
    world.prompts = {"long": Query(1000), "short": Query(10)}
    for name in world.prompts:
        assert gate.try_admit(held(name), world.decide, 0.0) is None
    assert [one.held.request for one in gate.release(world.decide, 0.1)] == ["short"]


def test_those_behind_one_that_waits_for_rows_are_scored_now_and_then() -> None:
    world, gate = make_slow("prefill", "decode", rows=40), make_gate(look_ahead=16)
    world.prompts = {f"r{number}": Query(1000) for number in range(40)}
    for number, name in enumerate(world.prompts):
        assert gate.try_admit(held(name, arrived=number / 1000), world.decide, number / 1000) is None
    world.decided.clear()
    for turn in range(10):
        assert gate.release(world.decide, 0.1 + turn / 1000) == []
    assert world.decided == ["r0"] * 10


@pytest.mark.parametrize("number", [16, 17, 200])
def test_requests_that_no_node_takes_are_in_nobodys_way(number: int) -> None:
    """They are remote, and no decode node is left. A mixed node is idle."""
    world, gate = make_world("prefill", "decode", "mixed"), make_gate()
    gone, idle = world.nodes[1], world.nodes[2]
    world.nodes = [world.nodes[0], replace(gone, is_cordoned=True)]
    world.prompts = {f"r{each}": Query(100, force="remote", fallback="deny") for each in range(number)}
    for each in range(number):
        with pytest.raises(errors.Unavailable):
            world.decide(held(f"r{each}"))
        assert gate.try_admit(held(f"r{each}", is_charged=True), world.decide, 0.0) is None
    world.nodes = [replace(idle, load=load())]
    world.prompts["new"] = Query(100, force="local")
    decision = gate.try_admit(held("new"), world.decide, 0.1)
    assert decision is not None and decision.decode.name == "m2"


def test_a_held_request_goes_though_many_before_it_are_parked_meanwhile() -> None:
    world, gate = make_world("mixed", "mixed"), make_gate()
    for name in ("m0", "m1"):
        world.set_load(name, load(waiting_tokens=300))
    for each in range(40):
        world.prompts[f"r{each}"] = Query(100, force="remote")
        assert gate.try_admit(held(f"r{each}", is_charged=True), world.decide, 0.0) is None
    world.prompts["last"] = Query(100, force="local")
    assert gate.try_admit(held("last"), world.decide, 0.0) is None
    world.nodes = [replace(world.nodes[0], load=load())]
    gone = []
    for turn in range(4):
        gone += [one.held.request for one in gate.release(world.decide, 1.0 + turn / 1000)]
    assert gone[0] == "last", "a pair is gone, so the others cannot go"
    gate.queue.check_integrity()


def test_looking_at_parked_requests_costs_a_bounded_number_of_decisions() -> None:
    world, gate = make_world("mixed"), make_gate(look_ahead=16)
    world.nodes = []
    for each in range(500):
        assert gate.try_admit(held(f"r{each}"), world.decide, 0.0) is None
    world.decided.clear()
    for turn in range(2000):
        gate.release(world.decide, 1.0 + turn / 1000)
    assert len(world.decided) == 2 * 20 * 16, "twenty looks a second"
    assert set(world.decided) == {f"r{each}" for each in range(500)}


def test_with_a_service_level_parked_requests_are_no_queue_ahead() -> None:
    world, gate = make_world("prefill", "decode", "mixed"), make_gate(Slo(1.0))
    idle = world.nodes[2]
    world.nodes = []
    for each in range(50):
        assert gate.try_admit(replace(held(f"r{each}"), work=0.5), world.decide, 0.0) is None
    world.nodes = [replace(idle, load=load())]
    assert gate.wait_s(replace(held("new"), work=0.1), frozenset({idle.endpoint.incarnation})) == 0.0
    assert gate.try_admit(held("new"), world.decide, 0.1) is not None


def test_a_due_request_that_lacks_a_row_keeps_nobody_off_the_prefill_nodes() -> None:
    world, gate = make_world("prefill", "prefill", "decode"), make_gate(patience_s=0.0)
    world.set_load("d2", load(rows=8))
    world.set_load("p0", msgspec.structs.replace(load(rows=1), pages_parked=50))
    world.set_load("p1", msgspec.structs.replace(load(rows=1), pages_parked=50))
    world.prompts["due"] = Query(100, force="remote")
    world.prompts["local"] = Query(100, force="local")
    assert gate.try_admit(held("due"), world.decide, 0.0) is None
    assert gate.try_admit(held("local"), world.decide, 1.0) is not None


@pytest.mark.parametrize(
    "why",
    [
        "a service level for first tokens",
        "it was placed before",
        "no cost model",
        "no other row",
        "rows keep their limit",
    ],
)
def test_no_request_waits_for_rows_where(why: str) -> None:
    """With a limit in seconds, that counts instead of the pace of a lone row."""
    world, gate = make_slow("prefill", "decode", rows=12), make_gate(Slo(5.0) if why.startswith("a service") else None)
    if why == "no cost model":
        world.nodes = [replace(node, cost=None) for node in world.nodes]
    if why == "no other row":
        world.set_load("d1", batch(0))
    world.prompts["r1"] = Query(100, itl_s=0.005 if why == "no other row" else 0.1 if why.startswith("rows") else 0.0)
    assert gate.try_admit(held("r1", is_charged=why.startswith("it was")), world.decide, 0.0) is not None


# ------------------------------------------------------------ nodes that the policy would not take


def chunked(node: NodeView, new: m.Load) -> NodeView:
    return replace(node, cost=CHUNKED, load=msgspec.structs.replace(new, itl_s=0.0), max_len=10_000)


# A chunk takes 16 ms and each row beside it 1 ms; rows may take 22 ms a token: two bear prompts in every step, eight do
# not.
CHUNKED = NodeCost(PrefillCost(0.0, TOKEN_S, chunk_tokens=16, samples=100), DecodeCost(0.01, 0.001, samples=100))


def make_deep(waiting_tokens: int) -> World:
    """A prefill node with much to do, a decode node with so much, and one with none, but with rows that a prompt would
    make slow."""
    world = make_world("prefill", "decode", "decode")
    loads = load(waiting_tokens=20_000), load(waiting_tokens, rows=2), batch(8)
    world.nodes = [chunked(node, new) for node, new in zip(world.nodes, loads, strict=True)]
    world.prompts = {name: Query(1000, expected_output=20, num_held=1) for name in ("r1", "r2")}
    world.policy = "seconds"
    return world


def test_a_request_does_not_go_behind_a_deep_queue_because_a_node_is_open_that_it_would_not_be_sent_to() -> None:
    world, gate = make_deep(3000), make_gate()
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.1) == []
    world.set_load("d1", load(200, rows=2))
    (released,) = gate.release(world.decide, 0.2)
    assert released.decision is not None and released.decision.first.name == "d1"


def test_who_is_due_keeps_no_node_from_others_that_it_would_not_be_sent_to() -> None:
    world, gate = make_deep(3000), make_gate(patience_s=1.0)
    world.prompts["r2"] = Query(10, expected_output=100, num_held=1)
    assert gate.try_admit(held("r1"), world.decide, 0.0) is None
    assert gate.release(world.decide, 2.0) == []
    decision = gate.try_admit(held("r2"), world.decide, 2.0)
    assert decision is not None and decision.first.name == "d2"


# ------------------------------------------------------------ views


def kept_views(world: World) -> list[ClusterView | None]:
    gc.collect()
    return [view() for view in world.views if view() is not None]


@pytest.mark.parametrize("policy", ["product", "seconds"])
def test_neither_a_request_that_went_nor_one_that_waits_keeps_a_view_alive(policy: str) -> None:
    """A view has some hundreds of bytes for each node, and each decision may have another one."""
    world, gate = make_world("mixed", "mixed"), make_gate()
    world.policy = policy
    going = gate.try_admit(held("r0"), world.decide, 0.0)
    assert going is not None and kept_views(world) == [going.view]
    del going
    assert len(world.views) == 1 and kept_views(world) == []
    for name in ("m0", "m1"):
        world.set_load(name, load(waiting_tokens=300))
    world.prompts["r2"] = Query(100, busy=frozenset({"m0-boot"}))
    for name in ("r1", "r2"):
        assert gate.try_admit(held(name), world.decide, 0.0) is None
    assert gate.release(world.decide, 0.1) == []
    world.nodes, nodes = [], world.nodes
    assert gate.release(world.decide, 0.2) == [], "they are parked"
    assert len(world.views) > 3 and kept_views(world) == []
    world.nodes = [replace(node, load=load()) for node in nodes]
    released = gate.release(world.decide, 0.3, most=2)
    assert [one.held.request for one in released] == ["r1", "r2"]
    del released
    assert kept_views(world) == []


# ------------------------------------------------------------ who goes at once

PAIR = "prefill", "decode"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("policy", ["product", "seconds"])
@pytest.mark.parametrize(
    ("roles", "changes", "query", "goes"),
    [
        (["mixed"], {}, Query(100), True),
        (["mixed"], {}, Query(100, cached={"m0-boot": 96}), True),
        (PAIR, {}, Query(100), True),
        (PAIR, {}, Query(100, force="remote"), True),
        (["mixed"] * 20, {}, Query(100), True),
        (["mixed"] * 2, {"m0": {"cost": None}}, Query(100), True),
        (["mixed"], {"m0": {"load": load(waiting_tokens=10**6)}}, Query(100), False),
        (["mixed"] * 2, {"m1": {"is_cordoned": True}}, Query(100), True),
        (["mixed"], {}, Query(100, force="remote"), None),
        (["prefill"] * 2, {"p1": {"max_len": 50}}, Query(100), True),
        (["mixed"] * 2, {"m0": {"max_len": 150}}, Query(100), True),
        (["mixed"] * 2, {"m0": {"max_len": 150}}, Query(100, most_tokens=151), True),
        (["mixed"], {"m0": {"models": frozenset("a")}}, Query(100, model="a"), True),
        (["mixed"], {"m0": {"models": frozenset("a")}}, Query(100, model="b"), None),
        (["mixed"] * 2, {"m0": {"models": frozenset("a")}}, Query(100, model="a"), True),
    ],
)
def test_a_request_goes_at_once_where_a_node_that_could_serve_it_is_open(
    roles: list[m.Role], changes: dict[str, dict[str, object]], query: Query, goes: bool | None, policy: str
) -> None:
    """None: no node takes it."""
    world, gate = make_world(*roles), make_gate()
    world.policy = policy
    world.nodes = [replace(node, **changes.get(node.name, {})) for node in world.nodes]
    world.prompts["r1"] = query
    if goes is None:
        with pytest.raises(errors.Unavailable):
            world.decide(held("r1"))
        return
    decision = world.decide(held("r1"))
    assert (gate.at_once(decision, 0.0, is_charged=False) is decision) is goes


def test_with_a_service_level_what_a_pull_saves_is_no_wait() -> None:
    """Its prompt would take 3 s; 990 of 1,000 tokens are fetched. It was refused as if it waited for what it saves."""
    cost = NodeCost(PrefillCost(0.0, 3e-3, samples=100), DecodeCost(0.01, 0.001, samples=100))
    nodes = [replace(make_node(name, "mixed"), cost=cost) for name in ("n0", "n1")]
    decision = make_policy("seconds").choose(Query(1000), ClusterView(nodes))
    fetching = decision.pulling(nodes[1], 990)
    gate = Gate(HoldLimits(), Headroom(), Slo(ttft_s=2.0))
    assert gate.at_once(fetching, 0.0, is_charged=False) is fetching

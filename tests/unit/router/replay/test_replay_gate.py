"""The replay drives the production gate: requests wait in the router while nodes have enough to do, in its order, and
are refused by its rules."""

from collections import Counter
from dataclasses import replace

from replay_cases import COST, layout, request, trace

from pdcluster_router.policy.base import Decision
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.headroom import Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.replay.node import NodeSpec, SimNode, Task
from pdcluster_router.replay.routing import PATIENT, ReplayRouter, RouterSpec
from pdcluster_router.replay.scenario import Conditions, replay
from pdcluster_router.replay.simulation import RequestInFlight, Simulation
from pdcluster_router.replay.trace import Trace

SPEC = RouterSpec(make_policy("least-load"))


class Counting(ReplayRouter):
    """Remembers how many were held at most."""

    most_held = 0

    def try_admit(self, task: Task, now: float) -> Decision | None:
        choice = super().try_admit(task, now)
        self.most_held = max(self.most_held, self.num_held)
        return choice


def _run(workload: Trace, spec: RouterSpec, num_nodes: int = 1) -> tuple[list[RequestInFlight], Counting]:
    nodes = [SimNode(f"n{number}", "mixed", NodeSpec(COST, 65_536, 16)) for number in range(num_nodes)]
    router = Counting(nodes, spec)
    return Simulation(nodes, router).run(workload), router


BURST = trace(*(request(0.0, 400) for _ in range(20)))


def test_requests_wait_in_the_router_while_every_node_has_enough_to_do() -> None:
    flights, router = _run(BURST, SPEC)
    assert router.most_held >= 18 and router.num_held == 0
    starts = [flight.task.started_s for flight in flights]
    assert starts == sorted(starts)
    router.gate.queue.check_integrity()


def test_waiting_in_the_router_leaves_no_node_idle() -> None:
    flights, _ = _run(BURST, SPEC)
    at_once, _ = _run(BURST, replace(SPEC, headroom=Headroom(backlog_s=1e9)))
    assert max(flight.task.first_token_s for flight in flights) == max(flight.task.first_token_s for flight in at_once)


def test_a_request_that_would_be_too_late_is_refused_at_once() -> None:
    flights, _ = _run(BURST, replace(SPEC, slo=Slo(ttft_s=4 * COST.prefill.seconds(400))))
    refused = [flight for flight in flights if flight.end == "refused"]
    assert 10 <= len(refused) < 20 and all(flight.end_s == 0.0 for flight in refused)


def test_a_request_waits_no_longer_than_the_queue_allows() -> None:
    flights, _ = _run(BURST, replace(SPEC, hold=replace(PATIENT, age_s=1.0)))
    assert {flight.end_s for flight in flights if flight.end == "refused"} == {1.0}
    assert sum(flight.end == "finished" for flight in flights) >= 3


def test_a_full_queue_refuses_what_comes_then() -> None:
    flights, router = _run(BURST, replace(SPEC, hold=HoldLimits(count=5, is_shared=False)))
    assert router.most_held == 5 and [flight.end for flight in flights][-1] == "refused"


def _computed_on(num_output: int) -> Counter[str]:
    """By node, of forty prompts that one prefill node and one decode node get at once."""
    workload = trace(*(request(0.0, 400, num_output=num_output) for _ in range(40)))
    nodes = layout(prefill=1, decode=1, cache_tokens=65_536).nodes(16)
    flights = Simulation(nodes, ReplayRouter(nodes, RouterSpec(make_policy("seconds")))).run(workload)
    return Counter((flight.prefill or flight.decode or nodes[0]).name for flight in flights)


def test_a_long_wait_on_prefill_nodes_sends_prompts_to_decode_nodes() -> None:
    computed_on = _computed_on(num_output=1)
    assert min(computed_on["prefill-0"], computed_on["decode-0"]) > 15


def test_no_wait_on_prefill_nodes_sends_prompts_where_they_hold_up_answers() -> None:
    """One prompt takes as long as twenty tokens of an answer that runs there."""
    assert _computed_on(num_output=60)["decode-0"] <= 4


def test_a_rival_as_published_neither_holds_nor_pulls() -> None:
    turns = trace(*(request(9.0 * turn, 400, contents=range(25)) for turn in range(2)))
    published, here = (
        replay(turns, layout(mixed=2), "round-robin", Conditions(in_this_router=ours)) for ours in (False, True)
    )
    assert (published.flights[1].task.pulled, here.flights[1].task.pulled) == (0, 25)
    nodes, spec = layout(mixed=2).nodes(16), RouterSpec(make_policy("round-robin"), is_gated=False)
    router = Counting(nodes, spec)
    Simulation(nodes, router).run(BURST)
    assert router.most_held == 0


def test_our_own_policy_is_in_its_router_either_way() -> None:
    ways = [
        replay(BURST, layout(prefill=1, decode=1), "seconds:alpha=3", Conditions(in_this_router=ours))
        for ours in (False, True)
    ]
    assert [flight.task.first_token_s for flight in ways[0].flights] == [
        flight.task.first_token_s for flight in ways[1].flights
    ]

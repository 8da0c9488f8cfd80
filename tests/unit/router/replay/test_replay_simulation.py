"""Simulated clusters: known answers where there are any, one end for each request, and equal runs for equal
arguments."""

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import COST, layout, random_trace, request, trace

from pdcluster.core.messages import Endpoint
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.policy.base import Decision, Force
from pdcluster_router.policy.registry import POLICIES
from pdcluster_router.replay.feed import IMMEDIATE, FeedSpec
from pdcluster_router.replay.node import Task
from pdcluster_router.replay.report import ReplaySlo, figures
from pdcluster_router.replay.routing import ReplayRouter
from pdcluster_router.replay.scenario import Conditions, Layout, at_load, oracle, replay
from pdcluster_router.replay.trace import Trace
from pdcluster_router.replay.workloads import generate

LAYOUTS = [
    layout(mixed=1),
    layout(mixed=3),
    layout(prefill=2, decode=1),
    layout(prefill=1, decode=2, mixed=1),
    layout(prefill=2),
    layout(decode=2),
]


def test_an_idle_node_takes_what_the_model_says() -> None:
    (flight,) = replay(trace(request(3.0, 300, num_output=11)), layout(mixed=1), "product").flights
    assert flight.ttft_s == pytest.approx(COST.prefill.seconds(300))
    contexts = [301 + step for step in range(10)]
    assert flight.tpot_s * 10 == pytest.approx(sum(COST.decode.seconds(1, context) for context in contexts))


def test_a_prompt_that_is_computed_runs_and_waits_no_more_as_on_a_real_node() -> None:
    (node,) = layout(mixed=1).nodes(16)
    for number in range(3):
        node.enqueue(Task(number, request(0.0, 100)), 0.0)
    load = node.load(0.0)
    assert (load.waiting, load.running, load.waiting_tokens) == (2, 1, 300)
    view = NodeView(Endpoint(node.name, node.name, ""), node.role, 3, load, 16, 4096, ("sim",))
    assert view.num_prompts == 3


def test_what_is_cached_is_not_computed_again() -> None:
    shared = [1, 2, 3, 4, 5, 6]
    first, second = replay(
        trace(request(0.0, 100, contents=shared), request(50.0, 120, contents=shared)), layout(mixed=1), "product"
    ).flights
    assert (first.task.cached_tokens, second.task.cached_tokens) == (0, 96)
    assert second.ttft_s == pytest.approx(COST.prefill.seconds(24, 96))


def test_the_first_token_waits_for_no_transfer_and_the_second_does() -> None:
    slow = layout(prefill=1, decode=1)
    slow = replace(slow, link=replace(slow.link, bandwidth=300 * 327_680.0))
    (flight,) = replay(trace(request(0.0, 300, num_output=2)), slow, "product").flights
    assert flight.ttft_s == pytest.approx(COST.prefill.seconds(300)) and flight.prefill is not None
    step_s = COST.decode.seconds(1, 301)
    transfer_s = 1.0 - COST.prefill.seconds(300)  # 300 tokens take one second and flow while the prompt is computed
    assert flight.tpot_s >= step_s + transfer_s


def test_a_queue_of_equal_prompts_waits_as_an_m_d_1_queue() -> None:
    chance, load = random.Random(1), 0.7
    service_s = COST.prefill.seconds(100)
    requests, now = [], 0.0
    for _ in range(15_000):
        now += chance.expovariate(load / service_s)
        requests.append(request(now, 100))
    flights = replay(trace(*requests), layout(mixed=1), "product").flights
    waited = sum(flight.ttft_s - service_s for flight in flights) / len(flights)
    assert waited == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)


def test_prompts_beside_rows_slow_them_and_are_slowed() -> None:
    both = trace(request(0.0, 16, num_output=200), request(1.0, 400))
    alone = trace(request(0.0, 16, num_output=200))
    (undisturbed,) = replay(alone, layout(mixed=1), "product").flights
    disturbed, prompt = replay(both, layout(mixed=1), "product").flights
    assert disturbed.tpot_s > undisturbed.tpot_s and prompt.ttft_s > COST.prefill.seconds(400)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(list(POLICIES)),
    where=st.sampled_from(LAYOUTS),
    force=st.sampled_from(["auto", "local"]),
    delay_s=st.sampled_from([0.0, 0.5]),
    loss=st.sampled_from([0.0, 0.2]),
)
def test_every_request_has_one_end_and_nodes_end_empty(
    seed: int, policy: str, where: Layout, force: Force, delay_s: float, loss: float
) -> None:
    conditions = Conditions(FeedSpec(delay_s, loss), force, seed)
    done = replay(random_trace(seed), where, policy, conditions)  # checks nodes and caches at its end
    assert all(flight.end == "finished" for flight in done.flights)
    for flight in done.flights:
        task = flight.task
        assert task.request.arrival_s < task.first_token_s <= task.finished_s <= flight.end_s
        assert 0 <= task.cached_tokens < task.request.num_tokens


def test_a_prompt_that_no_node_can_hold_is_refused_and_the_rest_is_served() -> None:
    done = replay(trace(request(0.0, 5000), request(0.0, 50)), layout(mixed=2), "product")
    assert [flight.end for flight in done.flights] == ["impossible", "finished"]


def _figures(workload: Trace, where: Layout, policy: str, conditions: Conditions) -> object:
    return figures(policy, replay(workload, where, policy, conditions), ReplaySlo(COST, workload.mean_tokens), 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_arguments_give_equal_figures(policy: str) -> None:
    conditions = Conditions(FeedSpec(0.1, 0.05), seed=3)
    workload, where = random_trace(5, 150), layout(prefill=2, decode=2)
    assert _figures(workload, where, policy, conditions) == _figures(workload, where, policy, conditions)


LATE_AND_LOSSY = FeedSpec(delay_s=0.1, loss=0.05)


@pytest.mark.parametrize(
    ("kind", "count", "nodes", "load", "feed", "digest"),
    [
        ("chat", 200, Layout(prefill=8, decode=4), 0.9, IMMEDIATE, "c8f35999c3ae56c8"),
        ("everything", 200, Layout(prefill=3, decode=2), 1.3, LATE_AND_LOSSY, "96a3614f155caf2b"),
        (
            "documents", 150, Layout(prefill=2, decode=2, mixed=2, cache_tokens=400_000), 1.0, FeedSpec(0.02),
            "7782a342273b5f27",
        ),
    ],
)  # fmt: skip
def test_a_replay_chooses_as_ever(
    kind: str, count: int, nodes: Layout, load: float, feed: FeedSpec, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names of nodes only: predicted seconds may differ in their last bits between machines."""
    chosen: list[tuple[int, str, str, str]] = []
    sent = ReplayRouter.sent

    def note(self: ReplayRouter, task: Task, choice: Decision, now: float) -> None:
        names = [node.name if node is not None else "" for node in (choice.prefill, choice.decode, choice.pull)]
        chosen.append((task.number, *names))  # type: ignore[arg-type]
        sent(self, task, choice, now)

    monkeypatch.setattr(ReplayRouter, "sent", note)
    asked = generate(kind, count, seed=1)
    replay(at_load(asked, nodes, oracle(asked, nodes), load), nodes, "seconds", Conditions(feed))
    assert hashlib.sha256(repr(chosen).encode()).hexdigest()[:16] == digest

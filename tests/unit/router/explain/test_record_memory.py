"""What is kept of requests that ended: bounded by its bytes, and these are about what it takes."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from policy_cases import batch, make_node, view
from prometheus_client import CollectorRegistry

from pdcluster.telemetry.metrics import ExplainMetrics
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import TenantPriority
from pdcluster_router.explain.recorder import Explainer, Kept, Record, size_of
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.candidates import MOST_LISTED
from pdcluster_router.policy.registry import make_policy

PAIR = make_node("p0", "prefill"), make_node("d0", "decode")
MANY = [make_node(f"m{number:02}", "mixed", batch(number % 3)) for number in range(20)]
CORDONED = [make_node(f"c{number:02}", "mixed", is_cordoned=True) for number in range(20)]


def chosen(policy: str, cluster: ClusterView) -> Decision:
    return make_policy(policy).choose(Query(100, hashes=bytes(16)), cluster)


def make_explainer(**bounds: int) -> Explainer:
    return Explainer(ExplainMetrics(CollectorRegistry()), lambda: 1.0, Kept(**bounds))


def opened(explainer: Explainer, number: int) -> Record:
    return explainer.open(f"request-{number:020}", TenantPriority("", 0), 10.0 + number)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("policy", ["seconds", "product"])
@pytest.mark.parametrize("nodes", [MANY, [*MANY, *CORDONED]], ids=["all take work", "some are cordoned"])
def test_a_decision_keeps_the_best_of_each_leg_and_counts_all(policy: str, nodes: list[NodeView]) -> None:
    kept = chosen(policy, view(*nodes)).record.candidates
    candidates = kept.read()
    for leg in ("prefill", "decode", "local"):
        assert len([each for each in candidates if each.leg == leg and not each.rejected_by]) <= MOST_LISTED
    assert any(each.leg == "local" and not each.rejected_by for each in candidates)
    assert len([each for each in candidates if each.rejected_by]) <= MOST_LISTED
    assert kept.num >= len(candidates)


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [("seconds", MANY), ("seconds", [*PAIR, *CORDONED]), ("product", MANY), ("product", PAIR)],
    ids=["seconds", "seconds, some cordoned", "product", "product, a pair"],
)
def test_what_is_kept_of_a_request_is_counted_with_about_what_it_takes(policy: str, nodes: list[NodeView]) -> None:
    cluster, explainer = view(*nodes), make_explainer(requests=300)
    # Made once, as in a router: what reading its parameters leaves behind is no part of a request.
    made, query = make_policy(policy), Query(100, hashes=bytes(16))
    made.choose(query, cluster)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(300):
            record = opened(explainer, number)
            record.decided(made.choose(query, cluster), 11.0 + number, 12.0 + number)
            record.first_token(12.5 + number)
            explainer.close(record, None)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.4 * explainer.num_bytes < taken < explainer.num_bytes


def test_kept_requests_are_bounded_by_their_bytes() -> None:
    decision, probe = chosen("seconds", view(*PAIR)), make_explainer()
    record = opened(probe, 0)
    record.decided(decision, 11.0, 12.0)
    probe.close(record, None)
    size = probe.num_bytes
    assert size == record.size_bytes > size_of(decision.record) > 0
    explainer = make_explainer(requests=100, size_bytes=3 * size)
    for number in range(5):
        record = opened(explainer, number)
        record.decided(decision, 11.0, 12.0)
        explainer.close(record, None)
    assert [int(kept.request.removeprefix("request-")) for kept in explainer.recent(10)] == [4, 3, 2]
    assert explainer.num_bytes == 3 * size


def test_a_decision_that_is_followed_by_another_is_explained_before_it() -> None:
    explainer, decision = make_explainer(), chosen("seconds", view(*PAIR))
    record = explainer.open("r", TenantPriority("", 0), 10.0)
    record.decided(decision, 10.0, 10.5)
    running = explainer.explain("r")
    assert running is not None and [each.at_s for each in running.decisions] == [0.5]
    record.failed("no room")
    record.decided(decision, 11.0, 11.5)
    explainer.close(record, None)
    ended = explainer.explain("r")
    assert ended is not None
    assert [(each.at_s, each.failed) for each in ended.decisions] == [(0.5, "no room"), (1.5, "")]
    assert ended.decisions[0].candidates == ended.decisions[1].candidates

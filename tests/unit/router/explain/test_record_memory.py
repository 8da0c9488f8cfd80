"""A choice that goes at once is the one that the policy, the gate and `explain` come to when they are asked one after
the other; compiled and not."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest
from examples import examples
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pdcluster_router.explain.packed import unpack
from pdcluster_router.policy.decisions import Decision, PackedDecision, PlacementQuery
from pdcluster_router.policy.scales import asked_of
from policy_cases import COST, batch, clusters, make_node, queries, queue, view
from prometheus_client import CollectorRegistry

from pdcluster.core.errors import Unavailable
from pdcluster.cost.cost import CostError
from pdcluster.telemetry.metrics import ExplainMetrics
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView
from pdcluster_router.core.generation import TenantPriority
from pdcluster_router.explain.recorder import PACKED_BYTES, Explainer, Kept, Record
from pdcluster_router.explain.records import MAX_CANDIDATES
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.predicted_seconds import Seconds
from pdcluster_router.policy.pull import PullMode, PullRule
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.gate import Gate
from pdcluster_router.queueing.headroom import Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits

TOO_SLOW = HealthCheck.too_slow, HealthCheck.function_scoped_fixture
UNHURRIED = settings(max_examples=examples(150, 2000), deadline=None, suppress_health_check=TOO_SLOW)
HEADROOM, POLICY = Headroom(), Seconds()


def placed_of(query: Query, cluster: ClusterView) -> PackedDecision | None:
    """By the numbers. Hash blocks are of one token."""
    held, numbers = (
        query.cached if query.held is None else query.held,
        asked_of(query, POLICY._own)[: -len(POLICY._own)],
    )
    expected, usual = (
        {node: tokens for node, tokens in query.cached.items() if tokens > held.get(node, 0)},
        round(query.usual_tokens),
    )
    return POLICY.place(
        PlacementQuery(
            query.num_tokens,
            query.hashes,
            numbers,
            held,
            expected,
            1,
            query.force,
            query.fallback,
            usual,
            HEADROOM.backlog_s,
            query.row_tokens,
            query.model,
        ),
        cluster,
    )


def decided(query: Query, cluster: ClusterView) -> Decision | None:
    """By all who are asked; None: it does not go at once."""
    choice = POLICY.choose(query, cluster)
    return Gate(HoldLimits(), HEADROOM, Slo()).at_once(Decision(query, cluster, choice), 0.0, is_charged=False)


def explainer() -> Explainer:
    return Explainer(HEADROOM, ExplainMetrics(CollectorRegistry()), lambda: 1.0)


def told(record: Record, explained: Explainer, *, has_token: bool) -> object:
    """What is told of the request once it ended."""
    if has_token:
        record.first_token(12.5)
    record.attempts, record.cached_tokens = 1, 3
    explained.close(record, None)
    return msgspec.to_builtins(explained.explain("r"))


@st.composite
def measured(draw: st.DrawFn) -> ClusterView:
    """Clusters whose nodes mostly know what steps cost there, with their error bars; some of the load is this
    router's."""
    nodes = []
    for node in draw(clusters()).nodes:
        cost = node.cost if draw(st.integers(0, 7)) == 0 else COST
        if cost is not None:
            error = CostError(draw(st.sampled_from([0.0, 0.1, 0.4])), draw(st.sampled_from([0.0, 0.02, 0.7])))
            cost = dataclasses.replace(cost, prefill=dataclasses.replace(cost.prefill, error=error))
        is_cordoned, max_len = (node.is_cordoned, node.max_len) if draw(st.integers(0, 7)) == 0 else (False, 32768)
        models = node.models if draw(st.integers(0, 7)) == 0 else frozenset("ab")
        nodes.append(replace(node, cost=cost, is_cordoned=is_cordoned, max_len=max_len, models=models))
    cluster = ClusterView(nodes)
    if cluster.typical_cost is not None:
        assert cluster.table is not None
    sent = draw(st.dictionaries(st.sampled_from([node.incarnation for node in nodes]), st.integers(0, 40)))
    return cluster.sent(sent, lambda name: (sent[name], InFlightWork(sent[name], 100 * sent[name], rows=sent[name])))


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(
    cluster=measured(),
    query=queries(),
    expected=st.dictionaries(
        st.sampled_from([f"n{index}-boot" for index in range(6)]), st.integers(0, 5000), max_size=2
    ),
    has_token=st.booleans(),
    mode=st.sampled_from(["always", "always", "chosen", "never"]),
)
def test_what_goes_at_once_goes_where_all_who_are_asked_send_it_and_is_told_the_same(
    cluster: ClusterView, query: Query, expected: dict[str, int], has_token: bool, mode: PullMode
) -> None:
    held = {node: min(tokens, query.num_tokens) for node, tokens in query.cached.items()}
    cached = {
        **held,
        **{node: min(tokens, query.num_tokens) for node, tokens in expected.items() if tokens > held.get(node, 0)},
    }
    query = replace(
        query, cached=cached, held=None if cached == held else held, excluded=frozenset(), busy=frozenset(), num_held=0
    )
    try:
        placed = placed_of(query, cluster)
    except Unavailable as error:
        with pytest.raises(Unavailable, match=re.escape(str(error))):
            POLICY.choose(query, cluster)
        return
    event("goes at once" if placed is not None else "has to be asked")
    if placed is None:
        return
    decision = decided(query, cluster)
    assert decision is not None
    choice, mine, first = decision.choice, placed.choice, decision.choice.first
    assert (mine.mode, mine.predicted, mine.policy, mine.pull) == (
        choice.mode,
        choice.predicted,
        choice.policy,
        choice.pull,
    )
    assert [node and node.endpoint for node in (mine.prefill, mine.decode)] == [
        node and node.endpoint for node in (choice.prefill, choice.decode)
    ]
    assert mine.decode.has_slack == choice.decode.has_slack
    rule = PullRule(mode)
    if rule.leaves(placed.most_held, placed.cached_tokens, mine.first):
        assert rule.apply(choice, query, cluster) is choice
    known = min(query.cached_on(first), query.num_tokens - 1)
    assert first.cost is not None
    assert placed.sent_s == first.cost.prefill.seconds(query.num_tokens - known, known)
    assert placed.estimate_s == HEADROOM.ttft_s(first, query)
    mine_told, theirs = explainer(), explainer()
    record = mine_told.open("r", TenantPriority("", 0), 10.0)
    record.decided(placed, 11.0, 12.0)
    other = theirs.open("r", TenantPriority("", 0), 10.0)
    other.decided(decision, 11.0, 12.0)
    assert told(record, mine_told, has_token=has_token) == told(other, theirs, has_token=has_token)


PAIR = make_node("p0", "prefill"), make_node("d0", "decode")
MANY = [make_node(f"m{number:02}", "mixed", batch(number % 3)) for number in range(20)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("nodes", "query", "goes"),
    [
        ([make_node("m0", "mixed")], Query(100), True),
        ([make_node("m0", "mixed")], Query(100, cached={"m0-boot": 96}), True),
        (PAIR, Query(100), True),
        (PAIR, Query(100, force="remote"), True),
        ([*PAIR, make_node("d1", "decode", batch(8))], Query(100, cached={"d0-boot": 64}), True),
        (MANY, Query(100), True),
        ([make_node("m0", "mixed", cost=None), make_node("m1", "mixed", batch(8))], Query(100), False),
        ([make_node("m0", "mixed", queue(10**6))], Query(100), False),
        ([make_node("m0", "mixed"), make_node("m1", "mixed", is_cordoned=True)], Query(100), False),
        ([make_node("m0", "mixed")], Query(100, force="remote"), False),
        ([make_node("p0", "prefill"), make_node("p1", "prefill", max_len=50)], Query(100), False),
        ([make_node("m0", "mixed", max_len=150), make_node("m1", "mixed")], Query(100), True),
        ([make_node("m0", "mixed", max_len=150), make_node("m1", "mixed")], Query(100, most_tokens=151), False),
        ([make_node("m0", "mixed", models=frozenset("a"))], Query(100, model="a"), True),
        ([make_node("m0", "mixed", models=frozenset("a"))], Query(100, model="b"), False),
        ([make_node("m0", "mixed", models=frozenset("a")), make_node("m1", "mixed")], Query(100, model="a"), False),
    ],
)
def test_the_short_way_is_taken_where_it_is_meant_to_be(nodes: Sequence[NodeView], query: Query, goes: bool) -> None:
    placed = placed_of(query, view(*nodes))
    assert (placed is not None) is goes
    if placed is not None:
        assert len(unpack(placed.packed, 0.0, 0.0).candidates) <= 3 * MAX_CANDIDATES


@pytest.mark.usefixtures("way")
def test_two_boots_of_one_node_are_looked_at() -> None:
    """They have one name, and what is noted has names only."""
    node = make_node("m0", "mixed")
    other = replace(node, endpoint=replace(node.endpoint, incarnation="m0-later"))
    assert placed_of(Query(100), view(node, make_node("m1", "mixed"))) is not None
    assert placed_of(Query(100), view(node, other)) is None


def test_a_decision_that_is_followed_by_another_is_told_before_it() -> None:
    cluster, query = view(*PAIR), Query(100)
    placed, decision = placed_of(query, cluster), decided(query, cluster)
    assert placed is not None and decision is not None
    explained = explainer()
    record = explained.open("r", TenantPriority("", 0), 10.0)
    record.decided(placed, 10.0, 10.5)
    running = explained.explain("r")
    assert running is not None and [each.at_s for each in running.decisions] == [0.5]
    record.failed("no room")
    record.decided(decision, 11.0, 11.5)
    explained.close(record, None)
    ended = explained.explain("r")
    assert ended is not None
    assert [(each.at_s, each.failed) for each in ended.decisions] == [(0.5, "no room"), (1.5, "")]
    assert ended.decisions[0].candidates == ended.decisions[1].candidates


def test_what_is_kept_of_a_request_that_went_at_once_is_counted_with_what_it_takes() -> None:
    placed = placed_of(Query(100), view(*MANY))
    assert placed is not None
    explained = Explainer(HEADROOM, ExplainMetrics(CollectorRegistry()), lambda: 1.0, Kept(requests=300))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(300):
            record = explained.open(f"request-{number:020}", TenantPriority("", 0), 10.0 + number)
            packed = replace(placed.packed, told=bytes(bytearray(placed.packed.told)))
            record.decided(replace(placed, packed=packed, hashes=bytes(16)), 11.0 + number, 12.0 + number)
            record.first_token(12.5 + number)
            explained.close(record, None)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * explained.num_bytes < taken < explained.num_bytes


def test_kept_requests_that_went_at_once_are_bounded_by_their_bytes() -> None:
    placed = placed_of(Query(100), view(*PAIR))
    assert placed is not None
    size = PACKED_BYTES + len(placed.packed.told)
    explained = Explainer(
        HEADROOM, ExplainMetrics(CollectorRegistry()), lambda: 1.0, Kept(requests=100, size_bytes=3 * size)
    )
    for number in range(5):
        record = explained.open(f"r{number}", TenantPriority("", 0), 10.0)
        record.decided(placed, 11.0, 12.0)
        explained.close(record, None)
    assert [told.request for told in explained.recent(10)] == ["r4", "r3", "r2"]
    assert explained.num_bytes == 3 * size

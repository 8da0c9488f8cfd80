"""Whether nodes have room: what compiled and plain functions say of numbers is what one would say of the nodes."""

from __future__ import annotations

import dataclasses

import pytest
from drawn_examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from policy_cases import batch, clusters, make_load, make_node, queries, queue, view

from pdcluster.core.errors import Unavailable
from pdcluster.cost.cost import NodeCost
from pdcluster_router.cluster.pacing import COLD, completed
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView
from pdcluster_router.core.node_row import BUSY, COMPUTES, SERVES
from pdcluster_router.core.room import BATCH_SHARE, COMFORT, PATIENCE
from pdcluster_router.policy.base import Decision, Policy, Query
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.policy.scored import alone
from pdcluster_router.queueing.headroom import Headroom

UNHURRIED = settings(
    max_examples=examples(60, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HEADROOM = Headroom()
POLICIES = [make_policy("seconds"), make_policy("product")]


class PlainRoom:
    """The rules of `headroom`, over the nodes of a view."""

    def __init__(self, cluster: ClusterView) -> None:
        self.cluster = cluster
        self.accepting = [node for node in cluster.nodes if node.accepts_work]

    def cost(self, node: NodeView) -> NodeCost:
        return completed(node.cost, self.cluster.typical) or COLD

    def backlog_s(self, node: NodeView) -> float:
        return self.cost(node).prefill.work_s(node.prefill_tokens, node.prefill_pairs)

    def has_batch_room(self, decision: Decision) -> bool:
        (server, node), query = now(decision), decision.query
        load = server.load
        batch_tokens = server.pending.batch_tokens + (load.batch_tokens if load is not None else 0)
        if server.prefill_tokens or self.cost(server).prefill.token_s * batch_tokens >= HEADROOM.backlog_s:
            return False
        if node.decode_rows and node.load is not None and node.rows >= node.load.slots:
            return False
        if node.decode_rows <= batch_rows(node):
            return True
        cost = self.cost(node).decode
        row_s = cost.row_s + cost.context_s * (query.num_tokens + query.expected_output / 2)
        tpot_s, lone_s = cost.fixed_s + cost.added_s(node.decode_rows, node.context_tokens), cost.fixed_s + row_s
        limit_s = query.itl_s or COMFORT * lone_s
        if tpot_s + row_s > lone_s + BATCH_SHARE * (limit_s - lone_s):
            return False
        step_s = decision.view.row(decision.rows[1]).prompt_step_s
        return decision.prefill is not None or step_s <= limit_s

    def is_open(self, node: NodeView, leg: int) -> bool:
        load = node.load
        if load is not None and not (load.waiting or load.running or load.pages_parked or node.in_flight):
            return True
        if self.backlog_s(node) >= HEADROOM.backlog_s:
            return False
        if leg == SERVES:
            return takes_row(node)
        has_row = any(takes_row(other) for other in self.accepting if other.role != "prefill")
        return has_row or load is None or 4 * load.pages_parked < load.pages_total

    def has_open(self, decision: Decision) -> bool:
        leg = COMPUTES if decision.record.mode == "remote" else SERVES
        able = [
            node for node, bits in zip(self.cluster.nodes, decision.legs, strict=True) if bits & (leg | BUSY) == leg
        ]
        return any(self.is_open(node, leg) for node in able)

    def keeps_rows_fast(self, decision: Decision, waited_s: float) -> bool:
        (_, node), query = now(decision), decision.query
        cost = self.cost(node).decode
        row_s = cost.row_s + cost.context_s * (query.num_tokens + query.expected_output / 2)
        num_own = node.decode_rows - batch_rows(node)
        share = num_own / node.decode_rows if node.decode_rows else 0.0
        tpot_s = cost.fixed_s + cost.added_s(node.decode_rows, node.context_tokens) * share
        if num_own <= 0 or tpot_s + row_s <= (query.itl_s or COMFORT * (cost.fixed_s + row_s)):
            return True
        alone_s = self.cost(decision.first).prefill.seconds(query.num_tokens)
        return waited_s + (decision.record.ttft_s or 0.0) >= PATIENCE / 2 * alone_s


def now(decision: Decision) -> tuple[NodeView, NodeView]:
    """The nodes of a decision with what was sent to them. Its own may be those of the last report."""
    first, decode = decision.rows
    return decision.view.node(first), decision.view.node(decode)


def batch_rows(node: NodeView) -> int:
    return node.pending.batch_rows + (node.load.batch_rows if node.load is not None else 0)


def takes_row(node: NodeView) -> bool:
    return node.load is None or node.rows - batch_rows(node) < node.load.slots


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(
    cluster=clusters(),
    query=queries(),
    policy=st.sampled_from(POLICIES),
    waited_s=st.floats(0, 100),
    sent=st.dictionaries(st.integers(0, 5), st.integers(0, 40)),
    batch_tokens=st.integers(0, 5000),
    itl_s=st.sampled_from([0.0, 0.005, 0.05]),
)
def test_a_request_has_room_by_the_plain_rules(
    cluster: ClusterView, query: Query, policy: Policy, waited_s: float, sent: dict[int, int], batch_tokens: int,
    itl_s: float,
) -> None:  # fmt: skip
    rows = {cluster.node(row).incarnation: rows for row, rows in sent.items() if row < cluster.size}
    query = replace(query, itl_s=itl_s)
    cluster = cluster.sent(
        rows,
        lambda name: (
            rows[name],
            InFlightWork(
                rows[name], rows=rows[name], batch_tokens=batch_tokens * (rows[name] % 2), batch_rows=rows[name] // 2
            ),
        ),
    )
    try:
        decision = policy.choose(query, cluster)
    except Unavailable:
        return
    plain = PlainRoom(cluster)
    assert HEADROOM.has_open(decision) is plain.has_open(decision)
    assert HEADROOM.keeps_rows_fast(decision, waited_s) is plain.keeps_rows_fast(decision, waited_s)
    assert HEADROOM.has_batch_room(decision) is plain.has_batch_room(decision)


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(cluster=clusters())
def test_full_modes_and_the_soonest_room_are_those_of_the_plain_rules(cluster: ClusterView) -> None:
    plain = PlainRoom(cluster)
    serving = [node for node in plain.accepting if node.role != "decode"]
    pools = {"local": (plain.accepting, SERVES), "remote": (serving, COMPUTES)}
    full = {mode for mode, (pool, leg) in pools.items() if not any(plain.is_open(node, leg) for node in pool)}
    assert HEADROOM.full_modes(cluster) == full
    excess_s = [plain.backlog_s(node) - HEADROOM.backlog_s for node in cluster.nodes]
    least_s = min((excess for excess in excess_s if excess > 0), default=None)
    assert HEADROOM.soonest_s(cluster) == (None if least_s is None else pytest.approx(least_s))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("load", "is_open"),
    [
        (make_load(), True),
        (queue(tokens=100), True),
        (queue(tokens=10**5), False),
        (batch(4, context=100), True),
        (batch(32, context=10), False),
        (make_load(pages_parked=1, slots=0), False),
    ],
)
def test_a_node_is_open_while_little_waits_and_a_row_is_free(load: object, is_open: bool) -> None:
    cluster, query = view(make_node("m0", "mixed", load)), Query(100)  # type: ignore[arg-type]
    assert HEADROOM.has_open(POLICIES[0].choose(query, cluster)) is is_open
    paused = POLICIES[0].choose(replace(query, busy=frozenset({"m0-boot"})), cluster)
    assert not HEADROOM.has_open(paused)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("pages_parked", "is_open"), [(0, True), (24, True), (25, False), (26, False)])
def test_prompts_are_computed_ahead_of_full_decode_nodes_until_a_quarter_of_the_pool_waits(
    pages_parked: int, is_open: bool
) -> None:
    ahead = make_load(
        waiting=1, waiting_tokens=10, pages_total=100, pages_free=100 - pages_parked, pages_parked=pages_parked
    )
    cluster = view(make_node("p0", "prefill", ahead), make_node("d0", "decode", batch(32, context=10)))
    decision = POLICIES[0].choose(Query(100, force="remote"), cluster)
    assert decision.record.mode == "remote"
    assert HEADROOM.has_open(decision) is is_open


@pytest.mark.usefixtures("way")
def test_a_request_that_would_slow_rows_goes_once_it_has_waited() -> None:
    decision = POLICIES[0].choose(Query(1000, itl_s=0.001), view(make_node("m0", "mixed", batch(20))))
    assert [HEADROOM.keeps_rows_fast(decision, waited_s) for waited_s in (0.0, 100.0)] == [False, True]
    assert HEADROOM.has_open(decision)


@pytest.mark.usefixtures("way")
def test_while_no_node_has_measured_its_steps_a_usual_cost_counts() -> None:
    """50 µs a token: a quarter of a second is 5,000 of them."""
    for waiting, is_open in ((4900, True), (5100, False)):
        cluster = view(make_node("m0", "mixed", queue(waiting), cost=None))
        assert HEADROOM.has_open(POLICIES[0].choose(Query(100), cluster)) is is_open


@pytest.mark.usefixtures("way")
def test_a_node_that_ran_few_steps_is_judged_by_the_typical_ones() -> None:
    unsure = replace_samples(make_node("m0", "mixed", queue(1000)), 1)
    decision = POLICIES[0].choose(Query(100), view(unsure, make_node("m1", "mixed", queue(10**5))))
    assert HEADROOM.has_open(decision), "0.1 s wait there by what is typical, 100 s by its own fit"


def replace_samples(node: NodeView, samples: int) -> NodeView:
    """The node with a fit of its own that says 0.1 s a token, from so many steps."""
    assert node.cost is not None
    prefill = dataclasses.replace(node.cost.prefill, token_s=0.1, samples=samples)
    return replace(node, cost=dataclasses.replace(node.cost, prefill=prefill))


def test_a_request_that_waits_for_the_rows_of_one_node_lacks_that_node_alone() -> None:
    """It lacked every node that could serve: others waited behind it beside idle nodes."""
    nodes = view(make_node("m0", "mixed"), make_node("m1", "mixed"))
    decision = alone("fork", nodes.node(0), Query(100), nodes)
    assert Headroom().lacking(decision, is_paced=True) == {"m0-boot"}
    assert Headroom().lacking(decision, is_paced=False) == {"m0-boot", "m1-boot"}

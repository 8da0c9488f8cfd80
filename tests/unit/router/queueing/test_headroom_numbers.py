"""What is told from the numbers of the chosen nodes alone is what `headroom` says when it looks at all nodes; compiled
and not."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from policy_cases import batch, clusters, make_load, make_node, queries, queue, view

from pdcluster.core.errors import Unavailable
from pdcluster_router.cluster.view import ClusterView, InFlightWork
from pdcluster_router.policy.base import Query, RoutingDecision
from pdcluster_router.policy.predicted_seconds import Seconds
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scored import Scored
from pdcluster_router.queueing.headroom import Headroom

UNHURRIED = settings(
    max_examples=examples(60, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HEADROOM = Headroom()


def looked_at(choice: RoutingDecision, query: Query, cluster: ClusterView, waited_s: float, *, may_slow: bool) -> bool:
    return HEADROOM.has_open(choice, query, cluster) and (may_slow or HEADROOM.keeps_pace(choice, query, waited_s))


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(
    cluster=clusters(),
    query=queries(),
    policy=st.sampled_from([Seconds(), Scored(Product())]),
    waited_s=st.floats(0, 100),
    may_slow=st.booleans(),
    sent=st.dictionaries(st.integers(0, 5), st.integers(0, 40)),
)
def test_who_goes_by_the_numbers_goes_by_a_look_at_all_nodes(
    cluster: ClusterView, query: Query, policy: Seconds, waited_s: float, may_slow: bool, sent: dict[int, int]
) -> None:
    if cluster.typical_cost is not None:
        assert cluster.table is not None
    rows = {cluster.node(row).incarnation: rows for row, rows in sent.items() if row < cluster.size}
    cluster = cluster.sent(rows, lambda name: (rows[name], InFlightWork(rows[name], rows=rows[name])))
    try:
        choice = policy.choose(query, cluster)
    except Unavailable:
        return
    if HEADROOM.goes(choice, query, cluster, waited_s, may_slow=may_slow):
        assert looked_at(choice, query, cluster, waited_s, may_slow=may_slow)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("load", "goes"),
    [
        (make_load(), True),
        (queue(tokens=100), True),
        (queue(tokens=10**5), False),
        (batch(4, context=100), True),
        (batch(32, context=10), False),
        (make_load(pages_parked=1, slots=0), False),
    ],
)
def test_the_short_way_is_taken_where_it_is_meant_to_be(load: object, goes: bool) -> None:
    cluster = view(make_node("m0", "mixed", load))  # type: ignore[arg-type]
    query = Query(100)
    choice = Seconds().choose(query, cluster)
    assert HEADROOM.goes(choice, query, cluster, 0.0, may_slow=True) is goes
    assert not HEADROOM.goes(choice, replace(query, busy=frozenset({"m0-boot"})), cluster, 0.0, may_slow=True)
    assert not HEADROOM.goes(choice, query, view(*cluster.nodes), 0.0, may_slow=True), (
        "nobody has made a table of that view"
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("pages_parked", "goes"), [(0, True), (24, True), (25, False), (26, False)])
def test_prompts_are_computed_ahead_of_full_decode_nodes_until_a_quarter_of_the_pool_waits(
    pages_parked: int, goes: bool
) -> None:
    ahead = make_load(
        waiting=1, waiting_tokens=10, pages_total=100, pages_free=100 - pages_parked, pages_parked=pages_parked
    )
    cluster = view(make_node("p0", "prefill", ahead), make_node("d0", "decode", batch(32, context=10)))
    query = Query(100, force="remote")
    choice = Seconds().choose(query, cluster)
    assert choice.mode == "remote"
    assert (
        HEADROOM.goes(choice, query, cluster, 0.0, may_slow=True) is HEADROOM.has_open(choice, query, cluster) is goes
    )


@pytest.mark.usefixtures("way")
def test_rows_that_one_more_would_slow_are_looked_at_until_the_request_has_waited() -> None:
    cluster, query = view(make_node("m0", "mixed", batch(20))), Query(1000, itl_s=0.001)
    choice = Seconds().choose(query, cluster)
    goes = [HEADROOM.goes(choice, query, cluster, waited_s, may_slow=False) for waited_s in (0.0, 100.0)]
    assert goes == [HEADROOM.keeps_pace(choice, query, waited_s) for waited_s in (0.0, 100.0)] == [False, True]
    assert HEADROOM.goes(choice, query, cluster, 0.0, may_slow=True)

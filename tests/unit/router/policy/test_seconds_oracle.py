"""`seconds` in production against the plain way to write it: over any view and query they choose and price alike. And
compiled against not compiled: to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from drawn_examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from policy_cases import COST, clusters, make_load, make_node, queries
from seconds_oracle import PlainCandidate, PlainChoice, PlainSeconds

from pdcluster.core.bounds import MAX_SECONDS, UINT63
from pdcluster.core.errors import Unavailable
from pdcluster.core.messages import Endpoint
from pdcluster.cost.cost import NodeCost
from pdcluster.settings.config import cache_directory
from pdcluster_router.cluster.pacing import COLD, completed
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView
from pdcluster_router.policy.base import Decision, Policy, Query
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.predicted.compiled import Scoring
from pdcluster_router.policy.predicted_seconds import Seconds
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.queueing.headroom import Headroom

UNHURRIED = settings(
    max_examples=examples(40, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
CLOSE = 1e-9


@pytest.fixture(scope="session")
def by_compiler() -> Scoring:
    assert compiled.load(cache_directory()), "tests run where numba works"
    found = compiled.active
    compiled.use(compiled.PLAIN)
    return found


@pytest.fixture(params=["plain", "compiled"])
def way(request: pytest.FixtureRequest, by_compiler: Scoring) -> Iterator[None]:
    compiled.use(by_compiler if request.param == "compiled" else compiled.PLAIN)
    yield
    compiled.use(compiled.PLAIN)


def answer(policy: Policy, query: Query, view: ClusterView) -> Decision | None:
    try:
        return policy.choose(query, view)
    except Unavailable:
        return None


def plain_answer(query: Query, view: ClusterView) -> PlainChoice | None:
    try:
        return PlainSeconds().choose(query, view)
    except Unavailable:
        return None


def is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)


def costs(choice: PlainChoice) -> dict[tuple[str, str], PlainCandidate]:
    return {(candidate.leg, candidate.node): candidate for candidate in choice.candidates}


def total(choice: PlainChoice) -> float:
    """What the policy compared: the cost of the whole choice."""
    by_leg = costs(choice)
    if choice.prefill is None:
        return by_leg["local", choice.decode].cost
    return by_leg["prefill", choice.prefill].cost + by_leg["decode", choice.decode].cost


def agree(decision: Decision, plain: PlainChoice) -> None:
    ours = PlainChoice.of(decision)
    if (ours.prefill, ours.decode) != (plain.prefill, plain.decode):
        assert is_close(total(ours), total(plain)), (
            "another choice is only right where both cost the same but for the last digits"
        )
        return
    assert ours.pull == plain.pull or is_close(total(ours), total(plain))
    for mine, its in ((ours.ttft_s, plain.ttft_s), (ours.tpot_s, plain.tpot_s)):
        assert (mine is None and its is None) or is_close(mine, its)
    theirs = costs(plain)
    for key, candidate in costs(ours).items():
        if key in theirs:
            other = theirs[key]
            assert list(candidate.terms) == list(other.terms)
            assert all(is_close(value, other.terms[name]) for name, value in candidate.terms.items()), (
                key,
                candidate.terms,
                other.terms,
            )
            assert candidate.cached_tokens == other.cached_tokens
    assert bool(theirs) == bool(costs(ours))


def estimate_s(node: NodeView, query: Query, view: ClusterView) -> float:
    """What waits on a node, and the prompt's own work there."""
    cost = completed(node.cost, view.typical) or COLD
    own_s = cost.prefill.seconds(query.uncached_on(node), query.cached_on(node))
    return cost.prefill.work_s(node.prefill_tokens, node.prefill_pairs) + own_s


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_choices_and_costs_are_those_of_the_plain_policy(cluster: ClusterView, query: Query) -> None:
    ours, plain = answer(Seconds(), query, cluster), plain_answer(query, cluster)
    assert (ours is None) == (plain is None)
    if ours is not None and plain is not None:
        agree(ours, plain)


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(cluster=clusters(max_nodes=40), query=queries(), data=st.data())
def test_a_view_made_from_the_one_before_is_as_good_as_a_new_one(
    cluster: ClusterView, query: Query, data: st.DataObject
) -> None:
    """Reports replace rows; what was kept from earlier views never shows."""
    view = ClusterView(cluster.nodes, cluster.typical)
    for _ in range(3):
        answer(Seconds(), query, view)
        donors = data.draw(clusters(max_nodes=6)).nodes
        changed = {
            old.incarnation: replace(new, endpoint=old.endpoint)
            for old, new in zip(data.draw(st.permutations(view.nodes)), donors, strict=False)
        }
        view = view.replaced(changed)
        if data.draw(st.booleans()):
            view = view.priced(view.typical_now())
        # Nodes without a typical cost have none until the view is priced again.
        afresh = ClusterView(view.nodes).priced(view.typical)
        ours, plain = answer(Seconds(), query, view), plain_answer(query, afresh)
        assert (ours is None) == (plain is None)
        if ours is not None and plain is not None:
            agree(ours, plain)


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_parked_kv_goes_where_the_plain_policy_sends_it(cluster: ClusterView, query: Query) -> None:
    for prefill in cluster.nodes:
        ours, plain = (
            Seconds().choose_decode(query, cluster, prefill),
            PlainSeconds().choose_decode(query, cluster, prefill),
        )
        assert (ours is None) == (plain is None)
        if ours is not plain:
            market = replace(query, force="remote", fallback="conditional")
            assert answer(Seconds(), market, cluster) is not None


@UNHURRIED
@given(cluster=clusters(max_nodes=40), query=queries())
def test_compiled_choices_are_the_plain_ones_to_the_last_bit(
    by_compiler: Scoring, cluster: ClusterView, query: Query
) -> None:
    found = []
    for way in (by_compiler, compiled.PLAIN):
        compiled.use(way)
        decision = answer(Seconds(), query, cluster)
        parked = [Seconds().choose_decode(query, cluster, node) for node in cluster.nodes]
        said = None
        if decision is not None:
            said = decision.record, decision.legs.tolist(), decision.work_s, decision.pull, decision.pull_tokens
        found.append((said, parked))
    assert found[0] == found[1]


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(cluster=clusters(), query=queries(), policy=st.sampled_from([Seconds(), make_policy("product")]))
def test_the_estimates_of_a_record_are_what_waits_on_a_node_and_its_own_prompt(
    cluster: ClusterView, query: Query, policy: Policy
) -> None:
    decision = answer(policy, query, cluster)
    if decision is None:
        return
    record, named = decision.record, {node.name: node for node in cluster.nodes}
    assert is_close(record.estimate_s, estimate_s(decision.first, query, cluster))
    others = {}
    for each in record.candidates.read():
        if each.ttft_s is not None:
            expected_s = others[each.node] = estimate_s(named[each.node], query, cluster)
            assert is_close(each.ttft_s, expected_s)
    others.pop(decision.first.name, None)
    assert (record.best is None) == (not others)
    if record.best is not None:
        assert is_close(record.best_s, others[record.best]) and is_close(record.best_s, min(others.values()))
    assert record.most_cached == max((query.cached_on(node) for node in cluster.nodes), default=0)
    known = min(query.cached_on(decision.first), query.num_tokens - 1)
    cost = completed(decision.first.cost, cluster.typical) or COLD
    assert is_close(decision.work_s, cost.prefill.seconds(query.num_tokens - known, known))


@pytest.mark.usefixtures("way")
@UNHURRIED
@given(cluster=clusters(max_nodes=8), data=st.data())
def test_what_was_sent_makes_the_view_that_a_new_one_would_be(cluster: ClusterView, data: st.DataObject) -> None:
    """Reports and legs in any order; rows to the last bit, nodes when somebody asks for them, and earlier views as they
    were."""
    view = ClusterView(cluster.nodes, cluster.typical or COST)
    counted = {node.incarnation: (node.in_flight, node.pending) for node in view.nodes}
    incarnations = st.lists(st.sampled_from([*counted, "left-boot"]), unique=True)
    for _ in range(3):
        former, told = view, (view.nodes, view.table.tolist()) if data.draw(st.booleans()) else None
        changed = data.draw(incarnations)
        if data.draw(st.booleans()):
            counted |= {
                name: (data.draw(st.integers(0, 9)), InFlightWork(*data.draw(st.tuples(*[st.integers(0, 10**6)] * 6))))
                for name in changed
            }
            view = view.sent(changed, counted.__getitem__)
        else:
            donors = data.draw(clusters(max_nodes=8)).nodes
            named = {node.incarnation: node for node in view.nodes}
            reports = {
                name: replace(new, endpoint=named[name].endpoint)
                for name, new in zip(changed, donors, strict=False)
                if name in named
            }
            counted |= {name: (node.in_flight, node.pending) for name, node in reports.items()}
            view = view.replaced(reports)
        afresh = ClusterView(
            [view.reported[row].sent(*counted[name]) for name, row in view.roster.row_of.items()], view.typical
        )
        rows = data.draw(st.permutations(range(view.size)))
        assert [view.node(row) for row in rows[:2]] == [afresh.nodes[row] for row in rows[:2]]
        if data.draw(st.booleans()):
            assert view.nodes == afresh.nodes and view.table.tolist() == afresh.table.tolist()
            assert [view.row_of(node) for node in view.nodes] == [afresh.row(row) for row in range(view.size)]
        assert told is None or told == (former.nodes, former.table.tolist())


SECONDS = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1e-3, MAX_SECONDS])
COUNTS = st.sampled_from([0, 1, 31, 512, 10**6, UINT63])
COST_FIELDS = (
    "prefill_fixed_s",
    "prefill_token_s",
    "prefill_pair_s",
    "decode_fixed_s",
    "decode_row_s",
    "decode_context_s",
    "prefill_doubt",
)
LOAD_FIELDS = (
    "waiting",
    "running",
    "waiting_tokens",
    "waiting_pairs",
    "context_tokens",
    "rows",
    "slots",
    "slots_used",
    "pages_total",
    "pages_free",
)


@st.composite
def odd_nodes(draw: st.DrawFn) -> NodeView:
    """A node that reports whatever a decoder lets through."""
    cost = replace(COST.report(), **draw(st.fixed_dictionaries({}, optional=dict.fromkeys(COST_FIELDS, SECONDS))))
    cost = replace(cost, chunk_tokens=draw(COUNTS), prefill_samples=draw(COUNTS), decode_samples=draw(COUNTS))
    load = replace(
        make_load(), itl_s=draw(SECONDS), **draw(st.fixed_dictionaries({}, optional=dict.fromkeys(LOAD_FIELDS, COUNTS)))
    )
    bandwidth = {f"n{number}": draw(SECONDS) for number in range(2)}
    return make_node(
        "n", draw(st.sampled_from(["prefill", "decode", "mixed"])), load, NodeCost.of(cost), bandwidth=bandwidth
    )


@UNHURRIED
@given(nodes=st.lists(odd_nodes(), min_size=1, max_size=4), query=queries(), waited_s=st.sampled_from([0.0, 1.0, 1e6]))
def test_whatever_nodes_report_there_is_one_choice(
    by_compiler: Scoring, nodes: list[NodeView], query: Query, waited_s: float
) -> None:
    named = [replace(node, endpoint=Endpoint(f"n{row}", f"n{row}-boot", "n:1")) for row, node in enumerate(nodes)]
    found = []
    for way in (by_compiler, compiled.PLAIN):
        compiled.use(way)
        cluster = ClusterView(named)
        decision = answer(Seconds(), query, cluster)
        said = None
        if decision is not None:
            room = Headroom()
            said = room.has_open(decision), room.keeps_rows_fast(decision, waited_s), room.full_modes(cluster)
        found.append((None if decision is None else repr(decision.record.candidates.read()), said))
    assert found[0] == found[1]

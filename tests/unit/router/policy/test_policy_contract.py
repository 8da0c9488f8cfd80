"""What every policy promises, over clusters and queries of any kind: it may be chosen live, so none may fail, cheat or
depend on report order."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import pytest
from drawn_examples import examples
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from policy_cases import batch, clusters, make_node, may_compute, may_decode, queries, queue, view

from pdcluster.core.errors import Unavailable
from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.policy.base import Decision, Policy, Query
from pdcluster_router.policy.registry import POLICIES, make_policy

MADE = [make_policy(name) for name in POLICIES]
EVERY = pytest.mark.parametrize("policy", MADE, ids=lambda policy: policy.name)
# No test asserts a time, not even that examples are drawn quickly on a machine that does other things, too.
UNHURRIED = settings(max_examples=examples(60, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow])

LOADED = [name for name in POLICIES if name not in ("round-robin", "random", "session", "power-of-two")]


def choices(query: Query, cluster: ClusterView) -> Iterator[tuple[Policy, Decision]]:
    """What each policy chooses, of those that can; clusters take longer to draw than to judge, so one is for all of
    them."""
    made = []
    for policy in MADE:
        note(policy.name)
        with contextlib.suppress(Unavailable):
            made.append((policy, policy.choose(query, cluster)))
    assume(made)
    for policy, choice in made:
        note(policy.name)
        yield policy, choice


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_a_choice_names_usable_nodes_of_the_right_roles(cluster: ClusterView, query: Query) -> None:
    for _, choice in choices(query, cluster):
        for node in filter(None, (choice.prefill, choice.decode)):
            assert node in cluster.nodes
            assert may_compute(node, query)
        assert may_decode(choice.decode, query)
        assert (choice.prefill is None) == (choice.record.mode == "local")
        if choice.prefill is not None:
            assert choice.prefill.role != "decode" and choice.decode.role != "prefill"
            assert choice.prefill is not choice.decode and choice.prefill.can_exchange(choice.decode)


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_a_choice_is_refused_only_when_the_cluster_cannot_serve_it(cluster: ClusterView, query: Query) -> None:
    usable = [node for node in cluster.nodes if may_decode(node, query)]
    pairs = [
        (p, d)
        for p in cluster.nodes
        if may_compute(p, query)
        for d in usable
        if p is not d and p.role != "decode" and d.role != "prefill" and p.can_exchange(d)
    ]
    for policy in MADE:
        note(policy.name)
        try:
            policy.choose(query, cluster)
        except Unavailable:
            has_roles = any(node.role != "mixed" for node in usable)
            wants_pair = query.force == "remote" or (query.force == "auto" and query.fallback == "deny" and has_roles)
            assert not usable or (wants_pair and not pairs)
        else:
            assert usable and (query.force != "remote" or pairs)


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_the_mode_that_was_asked_for_is_kept(cluster: ClusterView, query: Query) -> None:
    for _, choice in choices(query, cluster):
        assert query.force in ("auto", choice.record.mode)


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_nodes_that_failed_the_request_are_chosen_only_when_there_are_no_others(
    cluster: ClusterView, query: Query
) -> None:
    usable = [node for node in cluster.nodes if may_decode(node, query)]
    others = [node for node in usable if node.incarnation not in query.excluded]
    assume(others)
    for _, choice in choices(replace(query, force="auto", fallback="conditional"), cluster):
        assert {node.incarnation for node in (choice.first, choice.decode)}.isdisjoint(query.excluded)


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_busy_nodes_wait_while_another_of_their_pool_is_ready(cluster: ClusterView, query: Query) -> None:
    pool = [node for node in cluster.nodes if node.role != "decode" and may_compute(node, query)]
    ready = [node for node in pool if node.incarnation not in query.busy]
    for _, choice in choices(replace(query, excluded=frozenset()), cluster):
        if choice.prefill is not None and choice.prefill.incarnation in query.busy:
            assert not any(
                node.can_exchange(other)
                for node in ready
                for other in cluster.nodes
                if other is not node and other.role != "prefill" and may_decode(other, query)
            )


@UNHURRIED
@given(cluster=clusters(), query=queries(), data=st.data())
def test_the_order_of_reports_changes_nothing_and_asking_has_no_effect(
    cluster: ClusterView, query: Query, data: st.DataObject
) -> None:
    shuffled = ClusterView(tuple(data.draw(st.permutations(cluster.nodes))))
    for policy, first in choices(query, cluster):
        again = policy.choose(query, shuffled)
        assert again.record == first.record
        assert (again.prefill, again.decode, again.pull) == (first.prefill, first.decode, first.pull)


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_the_record_holds_what_was_chosen_and_why_others_were_not(cluster: ClusterView, query: Query) -> None:
    for policy, choice in choices(query, cluster):
        candidates = choice.record.candidates.read()
        assert choice.record.policy == policy.name
        compared = [c for c in candidates if not c.rejected_by]
        assert choice.first.name in [c.node for c in compared if c.leg in ("prefill", "local")]
        assert choice.decode.name in [c.node for c in compared if c.leg in ("decode", "local")]
        for node in cluster.nodes:
            if not node.accepts_work:
                assert any(c.node == node.name and c.rejected_by for c in candidates)
        for candidate in candidates:
            assert all(math.isfinite(value) for value in (candidate.cost, *candidate.terms.values())), "null in JSON"
            assert 0 <= candidate.cached_tokens <= query.num_tokens


@UNHURRIED
@given(cluster=clusters(), query=queries())
def test_parked_kv_goes_to_a_node_that_can_take_it(cluster: ClusterView, query: Query) -> None:
    for policy, prefill in itertools.product(MADE, cluster.nodes):
        note(policy.name)
        node = policy.choose_decode(query, cluster, prefill)
        able = [
            other
            for other in cluster.nodes
            if other is not prefill
            and other.role != "prefill"
            and may_decode(other, query)
            and other.incarnation not in query.excluded
            and other.can_exchange(prefill)
        ]
        assert (node in able) if able else node is None


@pytest.mark.parametrize("name", LOADED)
def test_with_nothing_cached_the_less_loaded_prefill_node_wins(name: str) -> None:
    policy = make_policy(name)
    busy = replace(make_node("p0", "prefill", queue(50_000, 8)), in_flight=8)
    choice = policy.choose(Query(2000), view(busy, make_node("p1", "prefill"), make_node("d0", "decode")))
    assert choice.first.name in ("p1", "d0")


@pytest.mark.parametrize("name", [*LOADED, "session"])
def test_more_load_on_a_node_never_attracts_work(name: str) -> None:
    policy = make_policy(name)
    query = Query(2000, hashes=bytes(16), fallback="deny")
    was_chosen = True
    for requests in range(0, 200, 5):
        one = replace(make_node("p0", "prefill", queue(1 + 1000 * requests, requests or 1)), in_flight=requests)
        other = replace(make_node("p1", "prefill", queue(20_000, 20)), in_flight=20)
        is_chosen = policy.choose(query, view(one, other, make_node("d0", "decode"))).first.name == "p0"
        assert was_chosen or not is_chosen
        was_chosen = is_chosen


@pytest.mark.parametrize("name", LOADED)
def test_the_batch_with_fewer_rows_decodes(name: str) -> None:
    nodes = view(make_node("p0", "prefill"), make_node("d0", "decode", batch(20)), make_node("d1", "decode", batch(2)))
    assert make_policy(name).choose(Query(2000, fallback="deny"), nodes).decode.name == "d1"


@EVERY
@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_no_fallback_means_that_a_pool_that_is_gone_is_an_error_that_says_so(policy: Policy, gone: str) -> None:
    left = view(
        make_node("a", "decode" if gone == "prefill" else "prefill"),
        make_node("b", "decode" if gone == "prefill" else "prefill"),
    )
    with pytest.raises(Unavailable, match=f"no {gone} node takes work, and router.fallback is deny"):
        policy.choose(Query(2000, fallback="deny"), left)
    assert policy.choose(Query(2000, fallback="on-failure"), left).record.mode == "local"
    assert policy.choose(Query(2000, force="local", fallback="deny"), left).record.mode == "local", (
        "who asks for it by name gets it"
    )


@EVERY
def test_no_fallback_means_a_pair_even_where_one_node_is_best_at_both(policy: Policy) -> None:
    nodes = view(
        make_node("m0", "mixed"), make_node("p0", "prefill", queue(90_000, 40)), make_node("d0", "decode", batch(60))
    )
    for counter in range(10):
        assert policy.choose(Query(2000, fallback="deny", counter=counter), nodes).record.mode == "remote"


@EVERY
def test_colocated_nodes_serve_alone(policy: Policy) -> None:
    nodes = view(*(make_node(f"m{index}", "mixed") for index in range(4)))
    for counter in range(20):
        assert policy.choose(Query(2000, counter=counter), nodes).record.mode == "local"

"""From which node a prompt's KV is fetched, when nobody knows seconds."""

from __future__ import annotations

import pytest
from dispatch_pair import EXPECTED, NoModels, collect, make_generation, make_pair
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from policy_cases import NO_PULLS, make_decision
from scripted_cluster import make_node

from pdcluster.core import messages as m
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.pull import PullRule
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

P0 = make_node("p0", "prefill")
D0, D1, D2 = (make_node(f"d{number}", "decode") for number in range(3))
VIEW = ClusterView((P0, D0, D1, D2))


def query(num_tokens: int = 40, **cached: int) -> Query:
    return Query(num_tokens, cached={f"{name}-boot": tokens for name, tokens in cached.items()})


def remote(asked: Query, view: ClusterView = VIEW, **said: object) -> Decision:
    return make_decision(asked, view, P0, D0, **said)


def test_the_deepest_holder_is_asked() -> None:
    assert PullRule().holder(P0, query(d0=8, d1=24, d2=16), VIEW) is D1
    applied = PullRule().apply(remote(query(d1=24)))
    assert applied.pull is D1 and applied.pull_tokens == 24
    assert (applied.record.pull, applied.record.pull_tokens) == ("d1", 24)


def test_between_equals_the_one_with_fewer_requests() -> None:
    view = ClusterView((P0, replace(D0, in_flight=2), replace(D1, in_flight=1)))
    assert PullRule().holder(P0, query(d0=8, d1=8), view).name == "d1"


@pytest.mark.parametrize(
    ("own", "held", "min_tokens", "pulls"),
    [
        (0, 4, 1, True),
        (0, 3, 1, False),
        (8, 8, 1, False),
        (8, 12, 1, True),
        (12, 8, 1, False),
        (0, 16, 17, False),
        (0, 17, 17, True),
        (36, 40, 1, False),
    ],
)
def test_enough_must_be_saved_a_block_at_least_and_the_last_token_never_counts(
    own: int, held: int, min_tokens: int, pulls: bool
) -> None:
    assert (PullRule(min_tokens=min_tokens).holder(P0, query(p0=own, d0=held), VIEW) is not None) == pulls


def test_a_node_without_a_common_medium_is_not_asked() -> None:
    assert PullRule().holder(P0, query(d0=24), ClusterView((P0, replace(D0, backends=("tcp",))))) is None


@pytest.mark.parametrize("unable", ["p0", "d0"])
@pytest.mark.parametrize("policy", ["product", "conductor", "least-load", "kv-cost"])
def test_no_policy_pulls_to_or_from_a_node_whose_engine_gives_no_kv(policy: str, unable: str) -> None:
    nodes = (replace(P0, bandwidth={}), replace(D0, bandwidth={"p0": 1e9}))
    asked = query(d0=24)
    some = make_policy(policy).choose(replace(asked, force="remote"), ClusterView(nodes))
    assert PullRule().apply(some).pull is not None
    view = ClusterView(tuple(replace(each, capabilities=NO_PULLS) if each.name == unable else each for each in nodes))
    none = make_policy(policy).choose(replace(asked, force="remote"), view)
    assert PullRule().apply(none).pull is None and none.pull is None
    assert (none.record.prefill, none.record.decode) == ("p0", "d0"), "KV of its own prompt goes there as before"


def test_neither_the_node_itself_nor_one_that_failed_the_request_is_asked() -> None:
    assert PullRule().holder(P0, replace(query(p0=8, d0=24), excluded=frozenset({"d0-boot"})), VIEW) is None
    assert PullRule().holder(D0, query(d0=24), VIEW) is None


def test_a_cordoned_node_still_gives_what_it_has() -> None:
    assert PullRule().holder(P0, query(d0=24), ClusterView((P0, replace(D0, is_cordoned=True)))) is not None


@given(
    cached=st.dictionaries(st.sampled_from(["p0", "d0", "d1", "gone"]), st.integers(0, 40), max_size=3),
    held=st.none() | st.dictionaries(st.sampled_from(["p0", "d0", "d1", "gone"]), st.integers(0, 40), max_size=3),
    prefill=st.sampled_from([P0, None]),
)
def test_what_needs_no_look_at_the_nodes_is_what_looking_would_say(
    cached: dict[str, int], held: dict[str, int] | None, prefill: NodeView | None
) -> None:
    asked = (
        query(**cached)
        if held is None
        else replace(query(**cached), held={f"{name}-boot": tokens for name, tokens in held.items()})
    )
    decision = make_decision(asked, VIEW, prefill, D0)
    holder, applied = PullRule().holder(decision.first, asked, VIEW), PullRule().apply(decision)
    assert applied.pull is holder and applied.pull_tokens == (asked.held_on(holder) if holder is not None else 0)


def test_never_means_never_and_a_policy_that_chose_is_left_alone() -> None:
    assert PullRule("never").apply(remote(query(d1=24)).pulling(D2)).pull is None
    assert PullRule("chosen").apply(remote(query(d1=24))).pull is None
    for rule in (PullRule("chosen"), PullRule()):
        applied = rule.apply(remote(query(d1=24, d2=12)).pulling(D2))
        assert (applied.pull, applied.pull_tokens) == (D2, 12)
        assert (applied.record.pull, applied.record.pull_tokens) == ("d2", 12)


def test_a_policy_that_knew_the_seconds_of_a_pull_and_made_none_is_believed() -> None:
    measured = replace(D1, bandwidth={"p0": 1e9})
    asked, view = query(d1=24), ClusterView((P0, D0, measured))
    assert PullRule().apply(remote(asked, view, ttft_s=0.02, tpot_s=0.01)).pull is None
    unmeasured = remote(asked, ttft_s=0.02, tpot_s=0.01)
    assert PullRule().apply(unmeasured).pull is D1, "nobody knows the bandwidth before the first pull"
    assert PullRule().apply(remote(asked, view)).pull is measured, "a policy without seconds has no say"


def test_on_one_node_the_pull_is_for_that_node() -> None:
    assert PullRule().apply(make_decision(query(d0=8, d1=24), VIEW, None, D0)).pull is D1


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.integers(1, 50))
def test_a_pull_always_saves_what_it_promises(cached: list[int], min_tokens: int) -> None:
    asked = query(40, **dict(zip(("p0", "d0", "d1", "d2"), cached, strict=True)))
    holder = PullRule(min_tokens=min_tokens).holder(P0, asked, VIEW)
    if holder is not None:
        assert min(asked.cached_on(holder), 39) - asked.cached_on(P0) >= max(min_tokens, P0.block_tokens)
        assert all(asked.cached_on(holder) >= asked.cached_on(node) for node in VIEW.nodes)


async def test_the_prefill_message_carries_the_pull() -> None:
    cluster, _, _ = make_pair()
    selector = PolicySelector(
        PolicyHolder(make_policy("product")), cluster.view, lambda hashes: {"d0-boot": len(hashes) // m.HASH_BYTES}
    )
    tokens, _ = await collect(Dispatch(cluster, NoModels(), selector, DispatchSettings()), make_generation())
    (prefill,) = cluster.sent_to("p0", m.Prefill)
    assert tokens == EXPECTED and prefill.pull == m.Pull(cluster.nodes[1].endpoint, 8)

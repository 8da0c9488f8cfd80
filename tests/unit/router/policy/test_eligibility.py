"""Which nodes may take which leg of a request: each rule that rules one out, by its name."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from policy_cases import make_load, make_node, view

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.node_row import BUSY, COMPUTES, DECODES, SERVES
from pdcluster_router.policy.base import Fallback, Force, Query
from pdcluster_router.policy.eligibility import Legs, decoders_for, legs_of, rejected, why_not
from pdcluster_router.policy.registry import POLICIES, make_policy

MIXED = SERVES | COMPUTES | DECODES
QUERY = Query(100, model="a", most_tokens=150)
M0, M1 = (make_node(name, "mixed", models=frozenset("a")) for name in ("m0", "m1"))
P0, P1 = (make_node(name, "prefill", models=frozenset("a")) for name in ("p0", "p1"))
D0, D1 = (make_node(name, "decode", models=frozenset("a")) for name in ("d0", "d1"))
RULES: list[tuple[NodeView, str]] = [
    (M0, ""),
    (replace(M0, is_cordoned=True), "cordoned"),
    (replace(M0, load=replace(make_load(), draining=True)), "draining"),
    (replace(M0, load=replace(make_load(), stuck=True)), "stuck"),
    (replace(M0, models=frozenset("b")), "serves another model"),
    (replace(M0, max_len=149), "takes 149 tokens"),
    (replace(M0, max_len=150), ""),
    (replace(M0, load=None), ""),
]
EACH = pytest.mark.parametrize(("node", "reason"), RULES, ids=[reason or "none" for _, reason in RULES])


def bits_of(query: Query, *nodes: NodeView) -> list[int]:
    """By name."""
    return legs_of(query, view(*nodes)).bits.tolist()  # type: ignore[no-any-return]


@EACH
def test_each_rule_has_a_name(node: NodeView, reason: str) -> None:
    assert why_not(node, QUERY) == reason


@EACH
def test_a_node_that_is_ruled_out_takes_no_row_and_explanations_say_why(node: NodeView, reason: str) -> None:
    decode = replace(node, role="decode")
    assert bits_of(QUERY, decode, M1) == [0 if reason else SERVES | DECODES, MIXED]
    found = rejected(QUERY, view(decode, M1))
    assert [(each.node, each.rejected_by) for each in found] == ([("m0", reason)] if reason else [])


@EACH
def test_a_node_alone_that_is_ruled_out_leaves_nobody(node: NodeView, reason: str) -> None:
    if not reason:
        assert bits_of(QUERY, node)[0] & SERVES
        return
    with pytest.raises(NoNodeTakesWork, match="none of 1 known nodes takes work"):
        legs_of(QUERY, view(node))


def test_a_prompt_needs_room_for_itself_and_one_token_where_another_node_decodes() -> None:
    small = replace(M0, max_len=101)
    assert why_not(small, QUERY, decodes=False) == "" and why_not(small, QUERY) == "takes 101 tokens"
    assert why_not(replace(small, max_len=100), QUERY, decodes=False) == "takes 100 tokens"
    assert bits_of(QUERY, small, M1) == [COMPUTES, MIXED]


@pytest.mark.parametrize("fallback", ["conditional", "on-failure", "deny"])
def test_roles_say_which_legs_a_node_takes(fallback: str) -> None:
    query = replace(QUERY, fallback=fallback)
    assert bits_of(query, D0, M1, P0) == [SERVES | DECODES, MIXED, SERVES | COMPUTES]


def test_a_node_that_failed_the_request_is_taken_only_where_there_is_no_other() -> None:
    query = replace(QUERY, excluded=frozenset({"m0-boot"}))
    assert bits_of(query, M0, M1) == [0, MIXED]
    assert bits_of(query, M0) == [MIXED]
    assert bits_of(replace(query, force="remote"), M0, M1) == [COMPUTES | DECODES, MIXED], "there is no other pair"


def test_a_busy_node_keeps_its_legs_and_is_chosen_only_where_all_are_busy() -> None:
    query, nodes = replace(QUERY, busy=frozenset({"m0-boot", "left-boot"})), view(M0, M1)
    legs = legs_of(query, nodes)
    assert legs.bits.tolist() == [MIXED | BUSY, MIXED]
    assert (legs.rows(SERVES), legs.all_rows(SERVES), legs.ready((0,))) == ((1,), (0, 1), (0,))
    assert legs_of(replace(query, busy=frozenset({"m0-boot", "m1-boot"})), nodes).rows(SERVES) == (0, 1)
    assert legs_of(QUERY, nodes).bits.tolist() == [MIXED, MIXED], "what is kept for all requests does not change"


def test_a_prefill_node_without_a_partner_is_left_out_where_a_pair_is_needed() -> None:
    alone = replace(P1, backends=("tcp",))
    assert bits_of(QUERY, D0, P0, alone) == [SERVES | DECODES, SERVES | COMPUTES, SERVES | COMPUTES]
    for query in (replace(QUERY, force="remote"), replace(QUERY, fallback="deny")):
        assert bits_of(query, D0, P0, alone)[1:] == [SERVES | COMPUTES, SERVES]


@pytest.mark.parametrize("name", POLICIES)
def test_where_no_node_can_take_the_kv_the_prefill_node_is_named(name: str) -> None:
    nodes = view(P0, replace(D0, backends=("tcp",)))
    with pytest.raises(Unavailable, match="a second node that can exchange KV with p0"):
        make_policy(name).choose(replace(QUERY, force="remote"), nodes)
    with pytest.raises(Unavailable, match="can exchange KV with p0"):
        make_policy(name).choose(replace(QUERY, fallback="deny"), nodes)
    assert make_policy(name).choose(QUERY, nodes).record.mode == "local"


def test_a_leg_that_may_not_go_without_is_named() -> None:
    remote, deny = replace(QUERY, force="remote"), replace(QUERY, fallback="deny")
    with pytest.raises(Unavailable, match="there are 1 and 0; start one") as found:
        legs_of(replace(remote, most_tokens=0), view(P0))
    assert not isinstance(found.value, NoNodeTakesWork), "the client asked for it"
    with pytest.raises(Unavailable, match="there are 1 and 0 for a request of 150 tokens"):
        legs_of(remote, view(P0, replace(D1, max_len=149)))
    for nodes, gone in (((P0, P1), "decode"), ((D0, D1), "prefill")):
        with pytest.raises(NoNodeTakesWork, match=f"no {gone} node takes work, and router.fallback is deny"):
            legs_of(deny, view(*nodes))


@pytest.mark.parametrize(
    ("changes", "nodes", "may", "wants"),
    [
        ({}, (P0, D1), True, True),
        ({"fallback": "on-failure"}, (P0, D1), True, False),
        ({"fallback": "deny"}, (P0, D1), False, False),
        ({"fallback": "deny"}, (M0, M1), True, True),
        ({"force": "remote"}, (M0, M1), False, False),
        ({"force": "local"}, (P0, D1), True, False),
    ],
    ids=str,
)
def test_when_one_node_may_serve_alone(
    changes: dict[str, str], nodes: tuple[NodeView, ...], may: bool, wants: bool
) -> None:
    legs = legs_of(replace(QUERY, **changes), view(*nodes))
    assert (legs.may_be_local, legs.wants_local, legs.is_split) == (may, wants, nodes[0].role != "mixed")


def decoders(query: Query, nodes: ClusterView, prefill: NodeView) -> list[str]:
    rows = Legs(decoders_for(query, nodes, prefill), False, False).rows(DECODES)
    return [nodes.node(row).name for row in rows]


def test_kv_goes_to_another_node_that_decodes_takes_it_and_did_not_fail_it() -> None:
    other = make_node("t1", "decode", models=frozenset("a"), backends=("tcp",))
    nodes = view(M0, M1, D1, P1, other)
    assert decoders(QUERY, nodes, M0) == ["d1", "m1"], "neither itself, nor a prefill node, nor over another medium"
    assert decoders(replace(QUERY, busy=frozenset({"d1-boot"})), nodes, M0) == ["m1"]
    assert decoders(replace(QUERY, excluded=frozenset({"m1-boot"})), nodes, M0) == ["d1"]
    assert decoders(replace(QUERY, excluded=frozenset({"m1-boot", "d1-boot"})), nodes, M0) == []
    assert decoders(replace(QUERY, most_tokens=40_000), nodes, M0) == []


@pytest.mark.parametrize("name", POLICIES)
def test_kv_that_only_a_busy_node_could_not_take_goes_nowhere(name: str) -> None:
    """A node that asked for a pause and takes no such KV is no place for it."""
    query = replace(QUERY, busy=frozenset({"m0-boot", "p1-boot"}))
    assert make_policy(name).choose_decode(query, view(M0, P1), M0) is None


# ---------------------------------------------------------------- several models or versions of one


@pytest.mark.parametrize("fallback", ["deny", "on-failure", "conditional"])
@pytest.mark.parametrize("force", ["auto", "local", "remote"])
def test_what_a_view_keeps_of_a_model_is_what_it_finds_anew(force: Force, fallback: Fallback) -> None:
    others = [replace(node, models=frozenset("b"), max_len=120) for node in (make_node("x0", "prefill"), D1)]
    seen, other = view(P0, P1, D0, *others), replace(QUERY, force=force, fallback=fallback)
    for query in (other, replace(other, num_tokens=60, most_tokens=110), replace(other, model="b", most_tokens=110)):
        for _ in range(2):
            kept, anew = legs_of(query, seen), legs_of(query, view(P0, P1, D0, *others))
            assert kept.bits.tolist() == anew.bits.tolist() and kept.num_ruled_out == anew.num_ruled_out
            assert (kept.may_be_local, kept.wants_local) == (anew.may_be_local, anew.wants_local)
        assert kept.num_ruled_out == len(rejected(query, seen)) == (3 if query.model == "b" else 2)
    assert len(seen.roster.plans) == 2, "one of each model"


def test_a_request_that_some_node_of_its_model_is_too_small_for_is_looked_at_anew() -> None:
    seen = view(M0, replace(M1, max_len=120), make_node("x0", "mixed", models=frozenset("b")))
    assert legs_of(replace(QUERY, most_tokens=110), seen).bits.tolist() == [MIXED, MIXED, 0]
    assert legs_of(QUERY, seen).bits.tolist() == [MIXED, COMPUTES, 0]
    with pytest.raises(NoNodeTakesWork):
        legs_of(replace(QUERY, model="c"), seen)


def test_explanations_list_some_of_the_nodes_that_are_ruled_out() -> None:
    seen = view(M0, *(make_node(f"x{number}", "mixed", models=frozenset("b")) for number in range(9)))
    assert [each.node for each in rejected(QUERY, seen, 2)] == ["x0", "x1"] and len(rejected(QUERY, seen)) == 9

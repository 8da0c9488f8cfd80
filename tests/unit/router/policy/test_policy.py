"""The cold cost and the choice of mode, over hand-made views."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from scripted_cluster import EMPTY_LOAD, make_node

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster.core.messages import Load
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Decision, Force, Query
from pdcluster_router.policy.registry import POLICIES, make_policy

PRODUCT = make_policy("product")


def hashes(n: int) -> bytes:
    return b"".join(bytes([i]) * 16 for i in range(n))


def view(*nodes) -> ClusterView:
    return ClusterView(tuple(nodes))


QUERY = Query(num_tokens=40, hashes=hashes(10))


def pick(nodes: ClusterView, query: Query, force: Force = "auto") -> Decision:
    return PRODUCT.choose(replace(query, force=force), nodes)


def pick_decode(nodes: ClusterView, query: Query, prefill: NodeView) -> NodeView | None:
    return PRODUCT.choose_decode(query, nodes, prefill)


def test_a_prefill_and_a_decode_node_make_a_remote_route() -> None:
    choice = pick(view(make_node("p0", "prefill"), make_node("d0", "decode")), QUERY)
    assert (choice.record.mode, choice.prefill.name, choice.decode.name) == ("remote", "p0", "d0")


def test_the_cached_prefix_decides_between_idle_nodes() -> None:
    nodes = view(make_node("p0", "prefill"), make_node("p1", "prefill"), make_node("d0", "decode"))
    choice = pick(nodes, replace(QUERY, cached={"p1-boot": 40}))
    assert choice.prefill.name == "p1"


def test_load_outweighs_a_small_cached_prefix() -> None:
    nodes = view(make_node("p0", "prefill"), make_node("p1", "prefill", in_flight=5), make_node("d0", "decode"))
    assert pick(nodes, replace(QUERY, cached={"p1-boot": 4})).prefill.name == "p0"


def test_a_reported_queue_counts_like_our_own_requests() -> None:
    busy = make_node("p0", "prefill", load=replace_load(waiting=4))
    assert (
        pick(view(busy, make_node("p1", "prefill", in_flight=1), make_node("d0", "decode")), QUERY).prefill.name == "p1"
    )


def replace_load(**changes):
    return replace(EMPTY_LOAD, **changes)


def test_draining_and_cordoned_nodes_get_nothing() -> None:
    draining = make_node("d0", "decode", load=replace_load(draining=True))
    cordoned = replace(make_node("d1", "decode"), is_cordoned=True)
    choice = pick(view(make_node("p0", "prefill"), draining, cordoned, make_node("d2", "decode", in_flight=9)), QUERY)
    assert choice.decode.name == "d2"


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_one_node_left_alive_still_serves(role) -> None:
    choice = pick(view(make_node("last", role)), QUERY)
    assert choice.record.mode == "local" and choice.decode.name == "last" and choice.prefill is None


def test_the_best_mixed_node_serves_alone() -> None:
    choice = pick(view(make_node("m0", "mixed", in_flight=2), make_node("m1", "mixed")), QUERY)
    assert choice.record.mode == "local" and choice.decode.name == "m1"


def test_forced_modes_are_kept_or_refused() -> None:
    both = view(make_node("p0", "prefill"), make_node("d0", "decode"))
    assert pick(both, QUERY, "local").record.mode == "local"
    assert pick(view(make_node("m0", "mixed"), make_node("m1", "mixed")), QUERY, "remote").record.mode == "remote"
    with pytest.raises(Unavailable, match="needs a prefill and a decode node, there are 1 and 0"):
        pick(view(make_node("p0", "prefill")), QUERY, "remote")
    with pytest.raises(Unavailable, match="needs a second node"):
        pick(view(make_node("m0", "mixed")), QUERY, "remote")


def test_failed_boots_are_avoided_while_there_is_another() -> None:
    nodes = view(make_node("p0", "prefill"), make_node("p1", "prefill", in_flight=9), make_node("d0", "decode"))
    assert pick(nodes, replace(QUERY, excluded=frozenset({"p0-boot"}))).prefill.name == "p1"
    only = view(make_node("m0", "mixed"))
    assert pick(only, replace(QUERY, excluded=frozenset({"m0-boot"}))).decode.name == "m0"


def in_pairs(query: Query, *nodes: NodeView) -> list[tuple[str, str]]:
    """Prefill and decode node in mode remote, by each policy."""
    choices = [make_policy(name).choose(replace(query, force="remote"), view(*nodes)) for name in POLICIES]
    return [(choice.prefill.name, choice.decode.name) for choice in choices]


def test_a_mixed_node_that_alone_can_decode_leaves_prompts_to_others() -> None:
    """However little it has to do."""
    nodes = make_node("m0", "mixed"), make_node("p0", "prefill", in_flight=9, load=replace_load(waiting=9))
    assert set(in_pairs(QUERY, *nodes)) == {("p0", "m0")}


def test_a_pair_needs_a_node_that_failed_when_there_is_no_other_pair() -> None:
    failed = replace(QUERY, excluded={"m0-boot"})
    for prefill, decode in in_pairs(failed, make_node("m0", "mixed"), make_node("m1", "mixed")):
        assert {prefill, decode} == {"m0", "m1"}


def test_a_busy_node_that_alone_can_decode_for_another_does() -> None:
    """Both nodes are needed for the pair, so the one that asked for a pause takes the row, not the prompt."""
    nodes = make_node("m0", "mixed"), make_node("m1", "mixed")
    for asked in (replace(QUERY, busy={"m0-boot"}), replace(QUERY, busy={"m0-boot"}, excluded={"m0-boot"})):
        assert set(in_pairs(asked, *nodes)) == {("m1", "m0")}


def test_a_node_that_can_only_compute_the_prompt_does_not_serve_it_alone() -> None:
    """Where its KV can go nowhere, the request goes whole to a node that takes it."""
    small = replace(make_node("p0", "prefill"), max_len=50)
    other = replace(make_node("d0", "decode", in_flight=9), backends=("tcp",))
    for name in POLICIES:
        choice = make_policy(name).choose(replace(QUERY, most_tokens=60), view(small, other))
        assert (choice.record.mode, choice.decode.name) == ("local", "d0"), name


def test_nodes_that_are_too_small_are_left_out() -> None:
    small = replace(make_node("m0", "mixed"), max_len=39)
    assert pick(view(small, make_node("m1", "mixed", in_flight=9)), QUERY).decode.name == "m1"
    with pytest.raises(Unavailable):
        pick(view(small), QUERY)


def test_another_decode_node_is_never_the_one_that_holds_the_kv() -> None:
    mixed = make_node("m0", "mixed")
    assert pick_decode(view(mixed), QUERY, mixed) is None
    assert pick_decode(view(mixed, make_node("d0", "decode", in_flight=9)), QUERY, mixed).name == "d0"


def test_nodes_without_a_common_medium_are_never_paired() -> None:
    alone = replace(make_node("d0", "decode"), backends=("tcp",))
    prefill = make_node("p0", "prefill")
    assert pick(view(prefill, alone), QUERY).record.mode == "local"
    assert pick_decode(view(alone), QUERY, prefill) is None


PAIR = make_node("p0", "prefill"), make_node("d0", "decode")


def test_nodes_that_serve_another_model_are_left_out_and_told() -> None:
    own, other = (replace(make_node(f"m{name}", "mixed"), models=frozenset(name)) for name in "ab")
    busy = replace(own, in_flight=9)
    query = replace(QUERY, model="a")
    choice = pick(view(busy, other), query)
    assert choice.decode.name == "ma" and [
        (candidate.node, candidate.rejected_by)
        for candidate in choice.record.candidates.read()
        if candidate.rejected_by
    ] == [("mb", "serves another model")]
    with pytest.raises(NoNodeTakesWork):
        pick(view(other), query)
    assert (
        pick_decode(
            view(replace(PAIR[0], models=frozenset("a")), replace(PAIR[1], models=frozenset("b"))), query, PAIR[0]
        )
        is None
    )


def test_a_request_goes_where_its_prompt_and_the_output_that_was_asked_for_fit() -> None:
    small, large = replace(make_node("m0", "mixed"), max_len=60), make_node("m1", "mixed", in_flight=9)
    nodes = view(small, large)
    assert pick(nodes, replace(QUERY, most_tokens=60)).decode.name == "m0"
    assert pick(nodes, replace(QUERY, most_tokens=61)).decode.name == "m1"
    assert pick(nodes, QUERY).decode.name == "m0", "where nothing was asked for, wherever the prompt fits"
    assert pick(nodes, replace(QUERY, num_tokens=60)).decode.name == "m1", "with room for one token"


def test_a_prefill_node_needs_room_for_the_prompt_only() -> None:
    small, large = replace(PAIR[0], max_len=60), PAIR[1]
    query = replace(QUERY, most_tokens=1000)
    choice = pick(view(small, large), query, "remote")
    assert (choice.prefill.name, choice.decode.name) == ("p0", "d0")
    assert not [candidate for candidate in choice.record.candidates.read() if candidate.rejected_by]
    with pytest.raises(Unavailable, match=r"there are 1 and 0 for a request of 1000 tokens"):
        pick(view(PAIR[0], replace(PAIR[1], max_len=60)), query, "remote")


@pytest.mark.parametrize("num_open", [2, 8, 24])
def test_a_small_node_gets_its_share_of_chats_that_state_no_length(num_open: int) -> None:
    """So many chats of 200 tokens run at a time, each on one node; pages hold 16 tokens."""
    sizes = {"small": 80, "large": 512}
    running: dict[str, list[int]] = {name: [] for name in sizes}
    cost = NodeCost(PrefillCost(0.0, 1e-3, samples=99), DecodeCost(0.01, 0.001, samples=99))
    policy, num_chosen = make_policy("seconds"), dict.fromkeys(sizes, 0)

    def node(name: str) -> NodeView:
        rows, pages = len(running[name]), sizes[name]
        used = min(13 * rows, pages)
        load = Load(0, rows, 0, 150 * rows, pages, pages - used, 0, 0, 0, 64, rows, rows=rows)
        return replace(make_node(name, "mixed", load), max_len=16 * pages, in_flight=rows, cost=cost)

    for step in range(200):
        for name in running:
            running[name] = [end for end in running[name] if end > step]
        choice = policy.choose(Query(100, expected_output=100), ClusterView(tuple(node(name) for name in sizes)))
        running[choice.decode.name].append(step + num_open)
        num_chosen[choice.decode.name] += 1
    assert num_chosen["small"] / 200 >= 0.8 * sizes["small"] / sum(sizes.values())

"""The rules of `seconds`, each over a few nodes whose costs can be worked out by hand; the numbers of the rules are
those of its docstring.

Unless a test says otherwise: a prompt token costs 0.1 ms, a step has no fixed cost, a lone row takes 10 ms a token, KV
is 1,000 bytes a token.
"""

from __future__ import annotations

from dataclasses import replace as of_cost

import pytest
from msgspec.structs import replace
from policy_cases import FIRST_BY_DECODE, NO_PULLS, batch, make_load, make_node, queue, view

from pdcluster.bootstrap.card import NATIVE
from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.predicted.cost_model import (
    COPY_WEIGHT,
    HANDOVER_S,
    LAST_GROUP,
    MUCH_LOST,
    UNMEASURED_BYTES_S,
)
from pdcluster_router.policy.predicted_seconds import Seconds
from pdcluster_router.policy.pull import PullRule

TOKEN_S, STEP_S, ROW_S = 1e-4, 0.01, 0.001
COST = NodeCost(PrefillCost(0.0, TOKEN_S, 0.0, 0, 100), DecodeCost(STEP_S, ROW_S, 0.0, 100))
CHUNKED = of_cost(COST, prefill=PrefillCost(0.0, TOKEN_S, 0.0, 500, 100))
PAIR = Query(1000, expected_output=100, fallback="deny")


def node(name: str, role: Role, load: Load | None = None, cost: NodeCost = COST, **changes: object) -> NodeView:
    return make_node(name, role, load, cost, **{"kv_bytes_per_token": 1000, **changes})


def choose(query: Query, *nodes: NodeView, **constants: float) -> Decision:
    return Seconds(**constants).choose(query, view(*nodes))


def terms(choice: Decision, leg: str, name: str) -> dict[str, float]:
    (found,) = [c for c in choice.record.candidates.read() if c.leg == leg and c.node == name]
    assert found.cost == pytest.approx(sum(found.terms.values()))
    return found.terms


def two_prefills(first: Load, second: Load, **query: object) -> tuple[Decision, Query]:
    asked = replace(PAIR, **query)  # type: ignore[arg-type]
    return choose(asked, node("p0", "prefill", first), node("p1", "prefill", second), node("d0", "decode")), asked


# ---------------------------------------------------------------- 1. the prefill leg


def test_rule_1_wait_is_what_waits_and_compute_what_is_not_cached() -> None:
    choice, _ = two_prefills(queue(5000), make_load(), cached={"p0-boot": 400})
    assert terms(choice, "prefill", "p0") == pytest.approx(
        {"wait": 0.5, "compute": 0.06, "fetch": 0, "price": 0, "slowed": 0, "copy": 0}
    )
    assert terms(choice, "prefill", "p1")["compute"] == pytest.approx(0.1)
    assert choice.prefill is not None and choice.prefill.name == "p1", "0.1 s are less than 0.56 s"
    assert choice.record.ttft_s == pytest.approx(0.1)


def test_rule_1_at_least_one_token_is_computed() -> None:
    choice, _ = two_prefills(make_load(), make_load(), cached={"p0-boot": 1000})
    assert terms(choice, "prefill", "p0")["compute"] == pytest.approx(TOKEN_S)


def test_rule_1_work_has_no_price_while_a_node_is_idle() -> None:
    choice, _ = two_prefills(queue(5000), make_load())
    assert terms(choice, "prefill", "p0")["price"] == 0.0


def test_rule_1_the_price_is_alpha_times_the_shortest_queue_in_average_prompts() -> None:
    """0.2 s and 0.4 s wait, in 2 + 4 requests and the two that are under way: 8 prompts of 0.075 s, so the shortest
    queue is 2.67 prompts."""
    choice, _ = two_prefills(queue(2000, 2), queue(4000, 4))
    assert terms(choice, "prefill", "p0")["price"] == pytest.approx(3.0 * (0.2 / (0.6 / 8)) * 0.1)


def test_rule_1_those_who_wait_in_the_router_are_part_of_the_queue() -> None:
    choice, _ = two_prefills(queue(2000, 2), queue(4000, 4), num_held=5)
    assert terms(choice, "prefill", "p0")["price"] == pytest.approx(3.0 * (0.2 / (0.6 / 8) + 5 / 2) * 0.1)


def test_rule_1_in_a_queue_saving_work_is_worth_more_than_a_shorter_queue() -> None:
    """p1 waits 0.05 s longer and saves 0.04 s of work."""
    cached = {"p1-boot": 400}
    choice, _ = two_prefills(queue(2000, 2), queue(2500, 2), cached=cached)
    assert choice.prefill is not None and choice.prefill.name == "p1"
    idle, _ = two_prefills(make_load(), queue(500, 1), cached=cached)
    assert idle.prefill is not None and idle.prefill.name == "p0", "nobody waits, so the sooner start wins"


def test_rule_1_rows_that_run_lose_what_the_prompt_takes() -> None:
    choice = choose(PAIR, node("m0", "mixed", batch(3)), node("p1", "prefill"), node("d0", "decode"), harm=2.0)
    assert terms(choice, "prefill", "m0")["slowed"] == pytest.approx(2.0 * 3 * (0.1 - STEP_S)), (
        "a step would have come anyway"
    )


@pytest.mark.parametrize(("bytes_s", "is_fetched"), [(1e8, True), (1e6, False), (0.0, False)])
def test_rule_1_a_prefix_is_fetched_where_that_is_sooner(bytes_s: float, is_fetched: bool) -> None:
    """900 tokens are 0.9 MB: 9 ms and the handing over, instead of 90 ms of computing; or 0.9 s."""
    holder = node("d0", "decode", bandwidth={"p0": bytes_s})
    choice = choose(replace(PAIR, cached={"d0-boot": 900}), node("p0", "prefill"), holder)
    found = terms(choice, "prefill", "p0")
    assert (choice.pull is not None) == is_fetched
    assert found["compute"] == pytest.approx(0.01 if is_fetched else 0.1)
    assert found["fetch"] == pytest.approx(HANDOVER_S + 900 * 1000 / bytes_s if is_fetched else 0.0)


def test_rule_1_a_queue_hides_the_fetching() -> None:
    holder = node("d0", "decode", bandwidth={"p0": 1e8})
    choice = choose(replace(PAIR, cached={"d0-boot": 900}), node("p0", "prefill", queue(5000)), holder)
    assert terms(choice, "prefill", "p0")["fetch"] == 0.0 and choice.pull is not None


def test_rule_1_a_path_is_only_that_to_the_node_of_its_name() -> None:
    """The holder still knows how fast it was to a node that has left, and of another two boots are there."""
    holder = node("d0", "decode", bandwidth={"left": 1e9, "p0": 1e8})
    twice = (node("p0", "prefill"), node("p0", "prefill", endpoint=Endpoint("p0", "p0-second", "p0:2")))
    choice = choose(replace(PAIR, cached={"d0-boot": 900}), *twice, node("p1", "prefill"), holder)
    assert choice.prefill in twice and choice.pull is holder
    assert terms(choice, "prefill", "p1")["fetch"] == 0.0


@pytest.mark.parametrize(("num_waiting", "goes_to"), [(1000, "p0"), (2000, "p1")])
def test_rule_1_a_copy_costs_its_computing_while_nodes_are_idle(num_waiting: int, goes_to: str) -> None:
    """p1 would compute the 0.08 s that p0 has: that is 0.1 + 0.08 s beside a wait of 0.1 or 0.2 s and 0.02 s of
    computing, and twice MUCH_LOST."""
    held = {"p0-boot": 800}
    choice, _ = two_prefills(queue(num_waiting, 1), make_load(), cached=held, lost=2 * MUCH_LOST)
    assert terms(choice, "prefill", "p0")["copy"] == 0.0
    assert terms(choice, "prefill", "p1")["copy"] == pytest.approx(COPY_WEIGHT * 0.08)
    assert choice.prefill is not None and choice.prefill.name == goes_to
    idle, _ = two_prefills(queue(num_waiting, 1), make_load(), cached=held)
    assert terms(idle, "prefill", "p1")["copy"] == 0.0 and idle.prefill is not None and idle.prefill.name == "p1", (
        "there is room for all"
    )


def test_rule_1_a_copy_is_what_another_one_has_beyond_its_own() -> None:
    choice, _ = two_prefills(make_load(), make_load(), cached={"p0-boot": 1000, "p1-boot": 300}, lost=MUCH_LOST / 2)
    assert [terms(choice, "prefill", name)["copy"] for name in ("p0", "p1")] == pytest.approx(
        [0.0, COPY_WEIGHT / 2 * 0.0699]
    ), "one is computed"


def test_rule_1_a_copy_of_a_whole_prompt_costs_no_step_that_has_to_run_anyway() -> None:
    fixed = of_cost(COST, prefill=PrefillCost(0.05, TOKEN_S, 0.0, 0, 100))
    nodes = node("p0", "prefill", cost=fixed), node("p1", "prefill", cost=fixed), node("d0", "decode")
    choice = choose(replace(PAIR, cached={"p0-boot": 1000}, lost=MUCH_LOST), *nodes)
    assert terms(choice, "prefill", "p0")["compute"] == pytest.approx(0.0501) and terms(choice, "prefill", "p1")[
        "compute"
    ] == pytest.approx(0.15)
    assert terms(choice, "prefill", "p1")["copy"] == pytest.approx(COPY_WEIGHT * 0.0999)


def test_rule_1_a_copy_costs_what_computing_it_takes_beside_rows() -> None:
    held = Query(1000, expected_output=100, cached={"m0-boot": 800}, lost=MUCH_LOST)
    found = terms(
        choose(held, node("m0", "mixed", cost=CHUNKED), node("m1", "mixed", batch(8), CHUNKED)), "local", "m1"
    )
    assert found["compute"] == pytest.approx(0.1 * 1.16), "8 rows stretch each step of 50 ms by 8 ms"
    assert found["copy"] == pytest.approx(COPY_WEIGHT * 0.08 * 1.16)


@pytest.mark.parametrize("who", ["holder", "node"])
def test_rule_1_nothing_is_fetched_where_either_node_s_engine_gives_no_kv(who: str) -> None:
    able = {each: NO_PULLS if each == who else NATIVE for each in ("holder", "node")}
    holder = node("d0", "decode", bandwidth={"p0": 1e8}, capabilities=able["holder"])
    asked = replace(PAIR, cached={"d0-boot": 900})
    choice = choose(asked, node("p0", "prefill", capabilities=able["node"]), holder)
    assert choice.pull is None and choice.record.most_cached == 900
    assert terms(choice, "prefill", "p0")["fetch"] == 0.0 and terms(choice, "prefill", "p0")["compute"] > 0.09
    assert PullRule().apply(choice).pull is None
    pulled = choose(asked, node("p0", "prefill"), replace(holder, capabilities=NATIVE))
    assert pulled.pull is not None, "it is this alone that keeps it"


def test_rule_1_a_prefix_comes_from_the_best_of_those_that_give_it() -> None:
    most = node("d0", "decode", bandwidth={"p0": 1e8}, capabilities=NO_PULLS)
    less = node("d1", "decode", bandwidth={"p0": 1e8})
    asked = replace(PAIR, cached={"d0-boot": 900, "d1-boot": 800})
    choice = choose(asked, node("p0", "prefill"), most, less)
    assert choice.pull is less and choice.pull_tokens == 0 and choice.record.most_cached == 900


def test_rule_1_a_copy_that_is_fetched_takes_as_much_room() -> None:
    holder, asked = (
        node("p0", "prefill", queue(9000), bandwidth={"p1": 1e8}),
        replace(PAIR, cached={"p0-boot": 900}, lost=MUCH_LOST),
    )
    choice = choose(asked, holder, node("p1", "prefill"), node("d0", "decode"))
    assert choice.pull is not None and terms(choice, "prefill", "p1")["copy"] == pytest.approx(COPY_WEIGHT * 0.09)


def test_rule_1_what_decode_nodes_have_is_no_copy_and_costs_none() -> None:
    asked = replace(PAIR, cached={"d0-boot": 800}, fallback="conditional", lost=1.0)
    apart = choose(asked, node("p0", "prefill"), node("d0", "decode"), node("d1", "decode"))
    assert terms(apart, "prefill", "p0")["copy"] == 0.0
    behind = choose(replace(asked, cached={"p0-boot": 800}), node("p0", "prefill"), node("d0", "decode"))
    assert terms(behind, "local", "d0")["copy"] == 0.0


# ---------------------------------------------------------------- 2. the decode leg


def test_rule_2_a_mixed_node_that_decodes_for_another_pays_for_its_copy_of_the_whole_prompt() -> None:
    """As it would for what it computes: m0 keeps all of it by then."""
    pair = node("m0", "mixed", cost=CHUNKED), node("m1", "mixed", cost=CHUNKED)
    choice = choose(
        Query(1000, expected_output=100, cached={"m0-boot": 900, "m1-boot": 300}, force="remote", lost=MUCH_LOST / 2),
        *pair,
    )
    assert choice.decode.name == "m1" and terms(choice, "decode", "m1")["copy"] == pytest.approx(
        COPY_WEIGHT / 2 * 0.0699
    )
    roomy = choose(Query(1000, expected_output=100, cached={"m0-boot": 900}, force="remote"), *pair)
    assert terms(roomy, "decode", "m1")["copy"] == 0.0


def test_rule_2_kv_costs_a_decode_node_no_copy() -> None:
    choice = choose(replace(PAIR, lost=1.0), node("p0", "prefill"), node("d0", "decode"))
    assert terms(choice, "decode", "d0")["copy"] == 0.0


def test_rule_2_a_transfer_is_exposed_as_far_as_computing_does_not_hide_it() -> None:
    fast, slow = node("p0", "prefill", bandwidth={"d0": 1e8, "d1": 5e6}), make_load()
    choice = choose(PAIR, fast, node("d0", "decode", slow), node("d1", "decode"), node("d2", "decode"))
    assert terms(choice, "decode", "d0")["exposed"] == pytest.approx(HANDOVER_S + LAST_GROUP * 0.01), (
        "10 ms are hidden but for the last group"
    )
    assert terms(choice, "decode", "d1")["exposed"] == pytest.approx(HANDOVER_S + 0.2 - 0.1)
    assert terms(choice, "decode", "d2")["exposed"] == pytest.approx(
        HANDOVER_S + LAST_GROUP * 1e6 / UNMEASURED_BYTES_S
    ), "not measured yet"


def test_rule_2_a_decode_node_that_makes_the_first_token_hides_nothing_and_the_client_waits_for_all_of_it() -> None:
    able = {"capabilities": FIRST_BY_DECODE}
    nodes = node("p0", "prefill", bandwidth={"d0": 1e7}, **able), node("d0", "decode", **able)
    choice = choose(PAIR, *nodes)
    handover_s = HANDOVER_S + 0.1
    assert terms(choice, "decode", "d0")["exposed"] == pytest.approx(handover_s)
    assert choice.record.ttft_s == pytest.approx(0.1 + handover_s) and choice.record.is_estimated
    native = choose(PAIR, *(replace(each, capabilities=NATIVE) for each in nodes))
    assert terms(native, "decode", "d0")["exposed"] == pytest.approx(HANDOVER_S + LAST_GROUP * 0.1)
    assert native.record.ttft_s == pytest.approx(0.1) and not native.record.is_estimated


def test_rule_2_alone_such_a_node_hands_nothing_over() -> None:
    choice = choose(replace(PAIR, force="local"), node("m0", "mixed", capabilities=FIRST_BY_DECODE))
    assert choice.record.ttft_s == pytest.approx(0.1)


def test_rule_2_only_what_the_decode_node_has_not_cached_is_sent() -> None:
    choice = choose(
        replace(PAIR, cached={"d0-boot": 1000}), node("p0", "prefill", bandwidth={"d0": 5e6}), node("d0", "decode")
    )
    assert terms(choice, "decode", "d0")["exposed"] == pytest.approx(HANDOVER_S)


def test_rule_2_output_times_tpot_and_what_the_rows_beside_it_lose() -> None:
    choice = choose(PAIR, node("p0", "prefill"), node("d0", "decode", batch(3)), node("d1", "decode"))
    shared = terms(choice, "decode", "d0")
    assert shared["decode"] == pytest.approx(100 * (STEP_S + 4 * ROW_S))
    assert shared["others"] == pytest.approx(100 * ROW_S * 3)
    assert choice.decode.name == "d1" and choice.record.tpot_s == pytest.approx(STEP_S + ROW_S)


def test_rule_2_a_full_batch_makes_wait_for_a_row() -> None:
    """Four of four slots are taken: one of them ends after a quarter of an answer's life."""
    full = make_load(running=4, rows=4, slots=4, slots_used=4)
    found = terms(choose(PAIR, node("p0", "prefill"), node("d0", "decode", full)), "decode", "d0")
    assert found["room"] == pytest.approx(100 * (STEP_S + 5 * ROW_S) / 4)


def test_rule_2_missing_pages_make_wait_for_those_that_rows_give_back() -> None:
    """The row needs 1,100 tokens, 34.4 pages of 32; 10 are there, 90 are held by rows: 27 % of them must come back."""
    tight = make_load(running=1, rows=1, slots_used=1, pages_total=100, pages_free=10)
    found = terms(choose(PAIR, node("p0", "prefill"), node("d0", "decode", tight)), "decode", "d0")
    assert found["room"] == pytest.approx(100 * (STEP_S + 2 * ROW_S) * (1100 / 32 - 10) / 90)


# ---------------------------------------------------------------- 3. local


def test_rule_3_local_has_no_transfer_and_its_work_on_a_decode_node_no_price() -> None:
    nodes = node("p0", "prefill", queue(3000, 3)), node("d0", "decode")
    choice = choose(replace(PAIR, fallback="conditional"), *nodes)
    assert choice.record.mode == "local" and choice.decode.name == "d0", (
        "the decode node is idle, the prefill node is not"
    )
    found = terms(choice, "local", "d0")
    assert "exposed" not in found and found["price"] == 0.0
    assert terms(choice, "local", "p0")["price"] > 0.0


def test_rule_3_the_rows_of_a_decode_node_lose_by_a_prompt_that_it_computes_itself() -> None:
    choice = choose(replace(PAIR, fallback="conditional"), node("p0", "prefill"), node("d0", "decode", batch(3)))
    assert (
        terms(choice, "local", "d0")["slowed"] == pytest.approx(3 * (0.1 - STEP_S))
        and terms(choice, "local", "p0")["slowed"] == 0.0
    )


def test_rule_3_a_pause_on_a_node_that_computes_prompts_for_others_weighs_what_it_takes() -> None:
    asked = replace(PAIR, fallback="conditional", expected_output=10)
    choice = choose(asked, node("m0", "mixed", batch(3)), node("p0", "prefill"), node("d0", "decode"))
    for leg in ("prefill", "local"):
        assert terms(choice, leg, "m0")["slowed"] == pytest.approx(3 * (0.1 - STEP_S))


# ---------------------------------------------------------------- 4. the pace of rows


def test_rule_4_prompts_beside_the_row_slow_it_down() -> None:
    """One prompt is there on one mixed node: it computes half of the time, in steps of 512 tokens or 51.2 ms."""
    chunked = of_cost(COST, prefill=of_cost(COST.prefill, chunk_tokens=512))
    one = make_load(waiting=1)
    choice = choose(replace(PAIR, force="local"), node("m0", "mixed", one, chunked), alpha=0.0)
    quiet, busy = STEP_S + ROW_S, 0.0512 + ROW_S
    assert choice.record.tpot_s == pytest.approx(1 / (0.5 / quiet + 0.5 / busy))


def test_rule_4_a_row_on_a_prefill_node_expects_as_many_prompts_as_lately() -> None:
    """Half of the time they leave it nothing; where all nodes compute prompts that is no reason for any of them."""
    quiet, busy = (replace(PAIR, force="local", busy_serving=nodes) for nodes in (0.0, 0.5))
    pair, alike = (
        [node(f"{role[0]}0", role, cost=CHUNKED) for role in roles]
        for roles in (("prefill", "decode"), ("mixed", "mixed"))
    )
    assert (
        terms(choose(busy, *pair), "local", "p0")["decode"] > 1.5 * terms(choose(quiet, *pair), "local", "p0")["decode"]
    )
    assert terms(choose(busy, *pair), "local", "d0") == terms(choose(quiet, *pair), "local", "d0")
    lately, before = (choose(query, *alike).record.candidates.read() for query in (busy, quiet))
    assert [each.terms for each in lately] == [each.terms for each in before]


def test_rule_4_a_row_on_a_decode_node_expects_the_prompt_that_is_there_once_and_others_as_lately() -> None:
    """0.01 s of prompt beside 100 tokens of 11 ms are nothing; half of the time is much."""
    nodes = node("p0", "prefill", cost=CHUNKED), node("d0", "decode", queue(100), cost=CHUNKED)
    idle = terms(choose(PAIR, nodes[0], node("d0", "decode", cost=CHUNKED)), "decode", "d0")["decode"]
    assert terms(choose(PAIR, *nodes), "decode", "d0")["decode"] < 1.05 * idle
    assert terms(choose(replace(PAIR, busy_decoding=0.5), *nodes), "decode", "d0")["decode"] > 1.5 * idle


def test_rule_4_a_prompt_that_waits_on_a_decode_node_slows_a_row_once_however_long_its_steps_are() -> None:
    """A step of 500 tokens takes 0.4 s here, a step of rows 4 ms. What waits counted for the whole life of a row that
    lives no longer than it does: its tokens were taken to come at 0.4 s each, and so it was put where prompts were sure
    to follow."""
    slow = NodeCost(PrefillCost(0.0, 8e-4, 0.0, 500, 100), DecodeCost(0.003, 0.001, 0.0, 100))
    prefill, query = node("p0", "prefill", cost=slow), replace(PAIR, force="remote")
    for tokens in (50, 100, 500, 1000):
        choice = choose(query, prefill, node("d0", "decode", queue(tokens), cost=slow))
        quiet_s, wait_s = 0.004, 8e-4 * tokens
        assert choice.record.tpot_s is not None
        assert quiet_s * 100 < choice.record.tpot_s * 100 <= quiet_s * 100 + wait_s
    many = choose(query, prefill, node("d0", "decode", queue(100_000), cost=slow)).record.tpot_s
    assert many == pytest.approx(0.4 + 0.001), "all of its steps"


def test_rule_4_a_row_on_a_prefill_node_expects_prompts_that_decode_nodes_computed_lately() -> None:
    """They were believed to come to decode nodes for ever: so an idle prefill node was the better place for a row,
    until the next prompt came."""
    nodes = [node(f"{role[0]}0", role, cost=CHUNKED) for role in ("prefill", "decode")]
    for lately in ({"busy_serving": 0.5}, {"busy_decoding": 0.5}, {"busy_serving": 0.25, "busy_decoding": 0.25}):
        found = choose(replace(PAIR, force="local", **lately), *nodes)  # type: ignore[arg-type]
        on_prefill, on_decode = (terms(found, "local", name)["decode"] for name in ("p0", "d0"))
        assert on_prefill >= on_decode
        assert on_prefill == pytest.approx(
            terms(choose(replace(PAIR, force="local", busy_serving=0.5), *nodes), "local", "p0")["decode"]
        )


# ---------------------------------------------------------------- 5. remote or local


def test_rule_5_whichever_is_less() -> None:
    for cached in range(0, 1001, 100):
        nodes = node("p0", "prefill", batch(2)), node("d0", "decode", batch(4))
        choice = choose(replace(PAIR, cached={"d0-boot": cached}, fallback="conditional"), *nodes)
        remote = sum(terms(choice, "prefill", "p0").values()) + sum(terms(choice, "decode", "d0").values())
        local = min(sum(terms(choice, "local", name).values()) for name in ("p0", "d0"))
        assert choice.record.mode == ("local" if local < remote else "remote")


def test_rule_5_the_mode_of_the_last_choice_keeps_a_margin_of_the_time_to_first_token() -> None:
    """One idle node alone saves the handing over, 1.25 ms; a tenth of 0.1 s is more, a tenth of 10 ms is not."""
    nodes, query = (node("p0", "prefill"), node("d0", "decode")), replace(PAIR, fallback="conditional")
    assert (
        choose(query, *nodes).record.mode == "local"
        and choose(replace(query, previous="remote"), *nodes).record.mode == "remote"
    )
    assert choose(replace(query, previous="remote", num_tokens=100), *nodes).record.mode == "local"


def test_rule_5_a_last_choice_of_local_keeps_it_too() -> None:
    """The row that runs on p0 makes local 4 ms dearer, in two halves; the handing over costs 1.25 ms."""
    light = of_cost(COST, decode=of_cost(COST.decode, row_s=2e-5))
    slow = of_cost(light, prefill=of_cost(light.prefill, token_s=2 * TOKEN_S))
    nodes = node("p0", "prefill", batch(1), light), node("d0", "decode", cost=slow)
    query = replace(PAIR, fallback="conditional")
    assert choose(query, *nodes, harm=0.0).record.mode == "remote"
    assert choose(replace(query, previous="local"), *nodes, harm=0.0).record.mode == "local"


def test_rule_5_a_prompt_that_holds_rows_up_goes_elsewhere_while_a_pair_can_take_it() -> None:
    query = replace(PAIR, num_tokens=1000, fallback="conditional")
    busy = node("p0", "prefill", queue(60_000, 60), CHUNKED), node("d0", "decode", batch(2), CHUNKED)
    free = choose(replace(query, itl_s=1.0), *busy)
    assert (free.record.mode, free.first.name) == ("local", "d0"), "the prefill node has a queue of six seconds"
    held = choose(replace(query, itl_s=0.04), *busy)
    assert (held.record.mode, held.first.name) == ("remote", "p0"), "0.05 s are more than the rows may be held up"
    assert choose(replace(query, itl_s=0.04), busy[1]).record.mode == "local", "there is no pair"


def test_rule_5_a_row_may_meet_more_prompts_than_the_mean_row() -> None:
    """A step of 0.5 s beside 100 tokens of 12 ms makes them 16.9 ms on average, which is below 19.8 ms; but every few
    rows meet two of them."""
    nodes = node("p0", "prefill", queue(60_000, 60)), node("d0", "decode", batch(2))
    firsts = [
        choose(replace(PAIR, num_tokens=tokens, fallback="conditional"), *nodes).first.name for tokens in (2000, 5000)
    ]
    assert firsts == ["d0", "p0"]


def test_rule_5_no_row_is_slower_than_all_of_its_steps() -> None:
    """100 chunks of 17 ms beside 2 rows that write 100 tokens make each of these take 19 ms, which is below 19.8 ms. As
    much again was added for what one row may meet beyond the mean, as if prompts came by chance to a node that computes
    all the time."""
    chunked = of_cost(COST, prefill=of_cost(COST.prefill, chunk_tokens=170))
    nodes = node("p0", "prefill", queue(60_000, 60), chunked), node("d0", "decode", batch(2), chunked)
    query = replace(PAIR, num_tokens=17_000, fallback="conditional")
    assert choose(query, *nodes).first.name == "d0"
    slower = of_cost(chunked, prefill=of_cost(chunked.prefill, chunk_tokens=190))
    assert choose(query, nodes[0], node("d0", "decode", batch(2), slower)).first.name == "p0", "21 ms are too much"


def test_rule_5_one_row_on_the_prefill_node_is_no_reason_to_hold_up_all_of_a_decode_node() -> None:
    """Both would hold rows up for 0.05 s, and the queue of the prefill node makes local the less by seconds."""
    query = replace(PAIR, fallback="conditional", itl_s=0.04)
    queued = make_load(
        waiting=60, waiting_tokens=60_000, waiting_pairs=0, running=1, rows=1, context_tokens=1000, slots_used=1
    )
    prefill = node("p0", "prefill", queued, CHUNKED)
    few, many = node("d0", "decode", batch(1), CHUNKED), node("d0", "decode", batch(10), CHUNKED)
    there, here = choose(query, prefill, many), choose(query, prefill, few)
    assert (there.record.mode, there.first.name) == ("remote", "p0")
    assert (here.record.mode, here.first.name) == ("local", "d0"), "no more rows than there"
    assert choose(query, prefill, many, node("d1", "decode", cost=CHUNKED)).first.name == "d1", "nobody is held up"


# ---------------------------------------------------------------- 6. cold start


def test_rule_5_what_is_not_known_of_the_nodes_keeps_the_mode() -> None:
    """One idle node alone saves 1.25 ms, more than a tenth of 10 ms; but that is no reason while nobody knows whether
    it is 10 ms or 15."""
    last = replace(PAIR, num_tokens=100, fallback="conditional", previous="remote")
    unsure = of_cost(COST, prefill=of_cost(COST.prefill, error=CostError(0.2, 0.5)))
    doubted = node("p0", "prefill", cost=unsure), node("d0", "decode", cost=unsure)
    assert choose(last, node("p0", "prefill"), node("d0", "decode")).record.mode == "local"
    assert choose(last, *doubted).record.mode == "remote"
    assert choose(replace(last, previous=None), *doubted).record.mode == "local"


def test_rule_6_the_product_score_while_nobody_has_run_enough_steps() -> None:
    cold = of_cost(COST, decode=of_cost(COST.decode, samples=7))
    nodes = (
        node("p0", "prefill", cost=cold, in_flight=1),
        node("p1", "prefill", cost=cold),
        node("d0", "decode", cost=cold),
    )
    choice = choose(replace(PAIR, cached={"p0-boot": 400}), *nodes)
    assert choice.record.policy == "seconds" and choice.record.ttft_s is None
    assert terms_of_product(choice, "p0") == (601.0, 2.0) and choice.prefill is not None and choice.prefill.name == "p1"


def terms_of_product(choice: Decision, name: str) -> tuple[float, ...]:
    (found,) = [c for c in choice.record.candidates.read() if c.leg == "prefill" and c.node == name]
    return tuple(found.terms.values())


def test_rule_6_a_node_that_has_not_run_a_kind_of_step_is_judged_by_the_one_that_ran_most() -> None:
    unknown = of_cost(COST, prefill=of_cost(COST.prefill, token_s=1.0, samples=7))
    nodes: ClusterView = view(
        node("p0", "prefill", queue(5000)), node("p1", "prefill", cost=unknown), node("d0", "decode")
    )
    choice = Seconds().choose(PAIR, nodes)
    assert terms(choice, "prefill", "p1")["compute"] == pytest.approx(0.1)

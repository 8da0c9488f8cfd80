"""Explanations: what is recorded of a decision, how it is judged afterwards, how much is kept, and how it reads."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from scripted_cluster import FakeCluster, ScriptedPair, make_chooser, make_node
from version_choice import FirstVersion

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.core.messages import pack_tokens
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost
from pdcluster.kv.hashing import chain_root, extend
from pdcluster.telemetry.metrics import ExplainMetrics
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import ANYBODY, Done, Generation, TenantPriority
from pdcluster_router.core.job import HashChain
from pdcluster_router.explain.recorder import MAX_ALIKE, MAX_DECISIONS, Explainer, Kept, Record
from pdcluster_router.explain.records import Explanation
from pdcluster_router.explain.text import text_of
from pdcluster_router.policy.base import Decision, Query, ShadowRecord
from pdcluster_router.policy.candidates import MOST_LISTED
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.prefix_index.ideal_cache import IdealCache
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

COST = NodeCost(PrefillCost(0.0, 0.001, samples=100), DecodeCost(0.01, 0.001, samples=100))


def make_nodes(number: int = 3, **waiting: int) -> list[NodeView]:
    names = [f"m{index}" for index in range(number)]
    return [
        replace(
            make_node(name, "mixed", load=m.Load(0, 0, waiting.get(name, 0), 0, 100, 100, 0, 0, 0, 8, 0)), cost=COST
        )
        for name in names
    ]


def decide(nodes: list[NodeView], query: Query, **said: object) -> Decision:
    """said: fields of the record."""
    decision = make_policy("product").choose(query, ClusterView(tuple(nodes)))
    return replace(decision, record=replace(decision.record, **said))


def make_explainer(kept: Kept | None = None) -> tuple[Explainer, CollectorRegistry]:
    registry = CollectorRegistry()
    return Explainer(ExplainMetrics(registry), lambda: 1_700_000_000.0, kept), registry


@contextmanager
def entered(
    explainer: Explainer, request: str, standing: TenantPriority, now: float, client_id: str = ""
) -> Iterator[Record]:
    """A request that runs as long as the block does."""
    record = explainer.open(request, standing, now, client_id)
    try:
        yield record
    except errors.PdclusterError as error:
        explainer.close(record, error.code, str(error))
        raise
    explainer.close(record, None)


def hashes_of(tokens: list[int]) -> bytes:
    return extend(b"", pack_tokens(tokens), root=chain_root(block_tokens=4), block_tokens=4)


def test_a_decision_is_kept_with_its_candidates_terms_and_filters() -> None:
    explainer, _ = make_explainer()
    nodes = make_nodes(3, m1=200)
    nodes[2] = replace(nodes[2], is_cordoned=True)
    query = Query(100, cached={"m0-boot": 60})
    with entered(explainer, "r1", TenantPriority("acme", 1.0, -1), 10.0) as record:
        record.decided(decide(nodes, query, ttft_s=0.07, tpot_s=0.01), asked=10.0, now=10.5)
    found = explainer.explain("r1")
    assert found is not None and (found.tenant, found.priority, found.arrived) == ("acme", -1, 1_700_000_000.0)
    (decision,) = found.decisions
    assert (decision.mode, decision.prefill, decision.decode, decision.policy, decision.held_s) == (
        "local",
        None,
        "m0",
        "product",
        0.5,
    )
    assert decision.predicted_ttft_s == 0.07 and decision.estimated_ttft_s == pytest.approx(0.04)
    by_node = {
        (candidate.node, candidate.rejected_by): candidate
        for candidate in decision.candidates
        if candidate.leg in ("local", "prefill")
    }
    assert by_node["m2", "cordoned"].ttft_s is None
    assert by_node["m1", ""].ttft_s == pytest.approx(0.3), "what waits there and the whole prompt"
    assert by_node["m0", ""].terms == {"uncached_tokens": 41.0, "requests": 1.0} and by_node["m0", ""].cost == 41.0


def test_hindsight_tells_error_regret_and_hits() -> None:
    explainer, registry = make_explainer()
    tokens = list(range(100))
    with entered(explainer, "r0", ANYBODY, 0.0) as record:
        record.decided(decide(make_nodes(), Query(80, hashes_of(tokens[:80]))), 0.0, 0.0)
    query = Query(100, hashes_of(tokens), cached={"m0-boot": 20, "m1-boot": 60})
    nodes = make_nodes(2, m1=5)
    nodes[1] = replace(nodes[1], in_flight=3)
    with entered(explainer, "r1", ANYBODY, 1.0) as record:
        assert record.ideal is None
        record.decided(decide(nodes, query), 1.0, 2.0)
        assert record.ideal == 80
        record.first_token(2.2)
        record.first_token(9.9)
        record.attempts, record.cached_tokens = 1, 20
    found = explainer.explain("r1")
    assert found is not None and found.hindsight is not None and found.ttft_s == pytest.approx(1.2), (
        "with the time in the hold queue"
    )
    seen = found.hindsight
    assert seen.ttft_s == pytest.approx(0.2) and seen.error_s == pytest.approx(0.12), (
        "80 uncached tokens were predicted to take 0.08 s"
    )
    assert seen.best == "m1" and seen.best_ttft_s == pytest.approx(0.045) and seen.regret_s == pytest.approx(0.155)
    assert seen.hit is not None and (seen.hit.achieved, seen.hit.reachable, seen.hit.ideal) == (20, 60, 80)
    assert registry.get_sample_value("pdcluster_decision_hit_tokens_total", {"kind": "ideal"}) == 80
    assert registry.get_sample_value("pdcluster_decision_regret_seconds_sum") == pytest.approx(0.155)
    assert registry.get_sample_value("pdcluster_ttft_prediction_error_seconds_count", {"direction": "later"}) == 1


def test_what_could_ideally_be_cached_is_whole_blocks() -> None:
    explainer, _ = make_explainer()
    nodes = make_nodes()
    size = nodes[0].block_tokens
    query = Query(2 * size - 1, hashes_of(list(range(2 * size - 1))))
    for name in ("r0", "r1"):
        with entered(explainer, name, ANYBODY, 0.0) as record:
            record.decided(decide(nodes, query), 0.0, 0.0)
            record.first_token(0.1)
            record.attempts, record.cached_tokens = 1, 0
    found = explainer.explain("r1")
    assert found is not None and found.hindsight is not None and found.hindsight.hit is not None
    assert found.hindsight.hit.ideal == size


def test_a_request_that_is_decided_again_and_again_keeps_the_first_decisions_and_the_last() -> None:
    explainer, _ = make_explainer()
    with entered(explainer, "r1", ANYBODY, 0.0) as record:
        for number in range(10 * MAX_DECISIONS):
            record.decided(decide(make_nodes(), Query(100)), float(number), float(number))
    found = explainer.explain("r1")
    assert found is not None and len(found.decisions) == MAX_DECISIONS
    assert (found.decisions[0].at_s, found.decisions[-1].at_s) == (0.0, 10.0 * MAX_DECISIONS - 1)


def test_a_decision_that_nothing_could_beat_has_no_regret() -> None:
    explainer, _ = make_explainer()
    with entered(explainer, "r1", ANYBODY, 0.0) as record:
        record.decided(decide(make_nodes(2, m1=500), Query(100)), 0.0, 0.0)
        record.first_token(0.1)
        record.cached_tokens = 0
    found = explainer.explain("r1")
    assert found is not None and found.hindsight is not None and found.hindsight.regret_s == 0.0


def test_the_shadow_is_compared_with_what_was_done() -> None:
    explainer, registry = make_explainer()
    nodes = make_nodes()
    with entered(explainer, "r1", ANYBODY, 0.0) as record:
        record.decided(decide(nodes, Query(100), shadow=ShadowRecord("random", "local", None, "m0", True)), 0.0, 0.0)
        record.decided(decide(nodes, Query(100), shadow=ShadowRecord("random", "remote", "m1", "m2", False)), 0.0, 0.0)
    found = explainer.explain("r1")
    assert found is not None
    assert [decision.shadow.agrees for decision in found.decisions if decision.shadow is not None] == [True, False]
    for choice in ("same", "other"):
        assert (
            registry.get_sample_value("pdcluster_shadow_decisions_total", {"policy": "random", "choice": choice}) == 1
        )


def test_what_is_kept_is_bounded_by_count_and_by_bytes() -> None:
    for kept in (Kept(requests=50), Kept(size_bytes=60_000)):
        explainer, _ = make_explainer(kept)
        for number in range(200):
            with entered(explainer, f"r{number}", ANYBODY, 0.0) as record:
                record.decided(decide(make_nodes(), Query(100)), 0.0, 0.0)
        ids = [found.request for found in explainer.recent(1000)]
        assert 10 < len(ids) <= 50 and ids[0] == "r199" and explainer.num_bytes <= kept.size_bytes
        assert explainer.explain("r0") is None and explainer.explain("r199") is not None


def test_of_a_large_cluster_the_best_candidates_are_kept_and_the_rest_is_counted() -> None:
    explainer, _ = make_explainer()
    nodes = [replace(node, in_flight=index, is_cordoned=index % 2 == 1) for index, node in enumerate(make_nodes(400))]
    with entered(explainer, "r1", ANYBODY, 0.0) as record:
        record.decided(decide(nodes, Query(100)), 0.0, 0.0)
    found = explainer.explain("r1")
    assert found is not None
    decision = found.decisions[0]
    assert decision.num_candidates >= 400 and len(decision.candidates) <= 4 * MOST_LISTED
    assert "m0" in {candidate.node for candidate in decision.candidates}
    assert "more" in text_of(found)


def test_a_request_is_found_while_it_runs_and_by_its_id_without_the_choice() -> None:
    explainer, _ = make_explainer()
    with entered(explainer, "abc-0", ANYBODY, 0.0) as record:
        record.decided(decide(make_nodes(), Query(100)), 0.0, 0.0)
        running = explainer.explain("abc-0")
        assert running is not None and len(running.decisions) == 1
        with entered(explainer, "abc-1", ANYBODY, 0.0):
            assert [found.request for found in explainer.explain_all("abc")] == ["abc-0", "abc-1"]
    assert [found.request for found in explainer.explain_all("abc-1")] == ["abc-1"]
    assert explainer.explain_all("xyz") == []


def test_how_a_request_ended_is_noted() -> None:
    explainer, _ = make_explainer()
    with pytest.raises(errors.Overloaded), entered(explainer, "r1", ANYBODY, 0.0):
        raise errors.Overloaded("full")
    explainer.close(explainer.open("r2", ANYBODY, 0.0), "cancelled")
    found = [explainer.explain(request) for request in ("r1", "r2")]
    assert [one.error for one in found if one is not None] == ["overloaded", "cancelled"]


def test_an_estimate_has_the_error_bar_of_the_node_that_it_is_about() -> None:
    explainer, _ = make_explainer()
    sure, unsure = make_nodes(2)
    error = CostError(0.3, 0.4, (1e-4, 0.0, 0.0, 0.0, 0.0, 0.0))
    unsure = replace(unsure, cost=NodeCost(PrefillCost(0.0, 0.001, samples=100, error=error), COST.decode))
    with entered(explainer, "r1", TenantPriority("acme"), 0.0) as record:
        record.decided(decide([sure, unsure], Query(100, excluded=frozenset({sure.incarnation}))), 0.0, 0.0)
    found = explainer.explain("r1")
    assert found is not None
    candidates = {each.node: each for each in found.decisions[0].candidates if not each.rejected_by}
    assert candidates["m1"].ttft_error_s == pytest.approx(0.05)
    assert "first token predicted after 100.0 ms ± 50.0 ms" in text_of(found)
    assert "estimated" not in text_of(found)
    guessed = replace(found, decisions=[replace(found.decisions[0], is_estimated=True)])
    assert "first token predicted after 100.0 ms ± 50.0 ms (estimated)" in text_of(guessed)


def test_an_explanation_is_json_and_reads_back_and_is_a_table_for_people() -> None:
    explainer, _ = make_explainer()
    nodes = make_nodes(2)
    with entered(explainer, "r1", TenantPriority("acme"), 0.0) as record:
        record.decided(decide(nodes, Query(100), shadow=ShadowRecord("random", "local", None, "m1", False)), 0.0, 0.25)
        record.first_token(0.4)
        record.cached_tokens = 0
    found = explainer.explain("r1")
    assert found is not None
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found
    text = text_of(found)
    for words in (
        "request r1",
        "tenant acme",
        "product chose local m0 for 100 tokens",
        "held 250.0 ms",
        "shadow random: local m1",
        "uncached_tokens 101",
    ):
        assert words in text, text
    assert (
        "hindsight: 150.0 ms after the decision, 50.0 ms later than predicted; best other m1 100.0 ms, regret 50.0 ms"
        in text
    )
    assert "\x1b" not in text and "\x1b" in text_of(found, colour=True)


def test_a_request_that_waits_shows_what_would_be_done_with_it_and_one_that_never_went_keeps_that_and_the_reason() -> (
    None
):
    explainer, _ = make_explainer()
    with pytest.raises(errors.Overloaded), entered(explainer, "r1", ANYBODY, 0.0) as record:
        record.consider(decide(make_nodes(2, m0=500), Query(100)), 0.1)
        record.consider(decide(make_nodes(2, m1=500), Query(100)), 0.2)
        waiting = explainer.explain("r1")
        assert waiting is not None and waiting.decisions == [] and waiting.considered is not None
        assert (waiting.considered.decode, waiting.considered.at_s, waiting.considered.held_s) == ("m0", 0.2, 0.2)
        assert "held; scored last at 200.0 ms: product would choose local m0" in text_of(waiting)
        raise errors.Overloaded("no room for 3 s", 3.0)
    found = explainer.explain("r1")
    assert (
        found is not None
        and found.considered == waiting.considered
        and (found.error, found.why) == ("overloaded", "no room for 3 s")
    )
    assert "ended with overloaded (no room for 3 s)" in text_of(found) and "never placed; scored last" in text_of(found)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


def test_those_that_wait_keep_no_view_and_are_explained_all_the_same() -> None:
    """Each was scored against a view of its own."""
    explainer, _ = make_explainer()
    records = [explainer.open(f"r{number}", ANYBODY, 0.0) for number in range(8)]
    views: list[weakref.ref[ClusterView]] = []
    for number, record in enumerate(records):
        decision = decide(make_nodes(40, m0=number), Query(100 + number))
        views.append(weakref.ref(decision.view))
        record.consider(decision, 0.1 * number)
    decision = decide(make_nodes(2), Query(100))
    views.append(weakref.ref(decision.view))
    records[0].decided(decision, asked=1.0, now=1.2)
    del decision
    gc.collect()
    assert [view() for view in views] == [None] * 9
    for number, record in enumerate(records[1:], 1):
        found = explainer.explain(record.request)
        assert found is not None and found.considered is not None
        considered = found.considered
        assert (considered.decode, considered.num_tokens, considered.num_candidates) == ("m0", 100 + number, 40)
        assert considered.at_s == 0.1 * number
        explainer.close(record, "overloaded", "no room")
    ended = explainer.explain("r1")
    assert ended is not None and ended.considered is not None and ended.considered.num_tokens == 101


def test_a_request_that_went_is_not_also_shown_as_waiting() -> None:
    explainer, _ = make_explainer()
    with entered(explainer, "r1", ANYBODY, 0.0) as record:
        decision = decide(make_nodes(2), Query(100))
        record.consider(decision, 0.1)
        assert explainer.explain("r1").considered is not None  # type: ignore[union-attr]
        record.decided(decision, 0.0, 0.1)
        assert explainer.explain("r1").considered is None  # type: ignore[union-attr]
    assert explainer.explain("r1").considered is None  # type: ignore[union-attr]


def test_an_attempt_that_failed_says_why_and_one_with_a_pull_from_where() -> None:
    explainer, _ = make_explainer()
    nodes = make_nodes(3)
    with entered(explainer, "r1", ANYBODY, 0.0) as record:
        record.failed("nothing was decided yet")
        decision = decide(nodes, Query(100))
        record.decided(decision.pulling(nodes[2], 64), 0.0, 0.0)
        record.failed("node m0: its process ended")
        record.decided(decide(nodes, Query(100)), 0.2, 0.2)
    found = explainer.explain("r1")
    assert found is not None
    assert [(one.failed, one.pull, one.pull_tokens) for one in found.decisions] == [
        ("node m0: its process ended", "m2", 64),
        ("", None, 0),
    ]
    text = text_of(found)
    assert "for 100 tokens, 64 of them fetched from m2" in text and "it failed: node m0: its process ended" in text


def test_blocks_that_were_seen_are_a_prefix_that_some_request_had() -> None:
    seen, tokens = IdealCache(), list(range(64))
    assert seen.note(hashes_of(tokens)) == 0
    assert seen.note(hashes_of(tokens)) == 16
    assert seen.note(hashes_of(tokens[:32] + [7] * 32)) == 8
    assert seen.note(hashes_of([9, *tokens])) == 0 and seen.note(b"") == 0


def test_a_small_table_forgets_and_never_invents() -> None:
    seen = IdealCache(num_blocks=8)
    chains = [hashes_of([base + offset for offset in range(32)]) for base in range(0, 10_000, 100)]
    for chain in chains:
        assert seen.note(chain) == 0


class OneModel(FirstVersion):
    def models(self):
        return ()

    def text(self, model):
        raise errors.UnknownModel(model)

    def chain(self, model, salt, weights=None):
        return HashChain(chain_root(block_tokens=4, salt=salt), 4)


async def test_dispatch_records_every_attempt_and_what_came_of_it() -> None:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    pair = ScriptedPair(cluster, *cluster.nodes, die_at={"p0": "before_token"})
    pair.install()
    dispatch = Dispatch(cluster, OneModel(), make_chooser(cluster), DispatchSettings())
    generation = Generation("r1", "model", array("i", range(10)), m.Sampling(max_tokens=4, seed=1), 5.0)
    async with aclosing(dispatch.generate(generation)) as events:
        done = [event async for event in events if isinstance(event, Done)]
    assert done[0].attempts == 2
    found = dispatch.explainer.explain("r1")
    assert found is not None and found.attempts == 2 and found.error is None
    assert [(decision.mode, decision.prefill, decision.decode) for decision in found.decisions] == [
        ("remote", "p0", "d0"),
        ("local", None, "d0"),
    ]
    assert found.ttft_s is not None and found.hindsight is not None and found.hindsight.hit is not None
    assert "p0" in found.decisions[0].failed and found.decisions[1].failed == "" and found.considered is None


def test_a_request_is_found_by_what_its_client_calls_it_while_it_is_kept() -> None:
    explainer, _ = make_explainer(Kept(requests=3))
    for number in range(5):
        with entered(explainer, f"r{number}-0", ANYBODY, 0.0, "mine" if number != 1 else "other"):
            assert explainer.explain_all("mine" if number != 1 else "other")[0].request == f"r{number}-0", (
                "while it runs, too"
            )
    assert [found.request for found in explainer.explain_all("mine")] == ["r4-0", "r3-0", "r2-0"], (
        "the latest first; r0 is forgotten"
    )
    assert explainer.explain_all("other") == [] and explainer.explain_all("") == []
    assert [found.client_id for found in explainer.explain_all("r4")] == ["mine"] and "r4-0 (mine)" in text_of(
        explainer.explain_all("r4")[0]
    )


def test_what_clients_call_alike_is_told_up_to_a_bound() -> None:
    explainer, _ = make_explainer()
    for number in range(MAX_ALIKE + 5):
        with entered(explainer, f"r{number}-0", ANYBODY, 0.0, "same"):
            pass
    found = explainer.explain_all("same")
    assert len(found) == MAX_ALIKE and found[0].request == f"r{MAX_ALIKE + 4}-0"

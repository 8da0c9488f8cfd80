"""How a request becomes a question to the policy, and what swapping the policy does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from policy_cases import COST, FIRST_BY_DECODE, make_decision, make_load, make_node, queue, view

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster.core.messages import Sampling
from pdcluster.kv.hashing import chain_root
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.job import HashChain, Job
from pdcluster_router.policy.base import Decision, Query
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.policy.selector import FORK, NEWEST_PREFIX, USUAL_PROMPTS, PolicyHolder, PolicySelector
from pdcluster_router.queueing.headroom import Headroom

NODES = view(make_node("p0", "prefill"), make_node("d0", "decode"), make_node("d1", "decode"))


def make_job(**changes: object) -> Job:
    chain = HashChain(chain_root(block_tokens=4, salt=b""), 4)
    return Job("r", list(range(10)), Sampling(max_tokens=4000, seed=1), 60.0, chain, **changes)  # type: ignore[arg-type]


def make_chooser(policy: str = "round-robin", shadow: str | None = None, **rules: object) -> PolicySelector:
    holder = PolicyHolder(make_policy(policy), make_policy(shadow) if shadow else None)
    return PolicySelector(holder, lambda: NODES, lambda hashes: {"d1-boot": len(hashes) // 16}, **rules)  # type: ignore[arg-type]


def test_the_question_carries_what_the_router_and_the_request_say() -> None:
    selector = make_chooser(force="remote", fallback="on-failure", itl_s=0.03)
    job = make_job(session="talk")
    job.excluded.add("p0-boot")
    job.busy["d0-boot"] = 2.0
    query = selector.query(job, 1.0)
    assert (query.num_tokens, query.cached, query.session) == (10, {"d1-boot": 8}, "talk")
    assert (query.force, query.fallback, query.itl_s) == ("remote", "on-failure", 0.03)
    assert (query.excluded, query.busy) == ({"p0-boot"}, {"d0-boot"})
    assert selector.query(job, 3.0).busy == frozenset()


def test_a_request_may_force_another_mode_than_the_routers() -> None:
    selector = make_chooser("seconds", force="remote")
    assert selector.choose(make_job(), 0.0).record.mode == "remote"
    assert selector.choose(make_job(force="local"), 0.0).record.mode == "local"
    assert selector.query(make_job(force="auto"), 0.0).force == "auto"


@pytest.mark.parametrize("force", ["auto", "remote"])
def test_logprobs_of_a_prompt_come_from_one_node_where_the_decode_node_makes_the_first_token(force: str) -> None:
    late = view(*(make_node(name, "mixed", make_load(), COST, capabilities=FIRST_BY_DECODE) for name in ("m0", "m1")))
    soon = view(*(make_node(name, "mixed", make_load(), COST) for name in ("m0", "m1")))
    for cluster, mode in ((late, "local" if force == "auto" else force), (soon, force)):
        selector = PolicySelector(
            PolicyHolder(make_policy("seconds")),
            lambda cluster=cluster: cluster,
            lambda _: {},
            force=force,  # type: ignore[misc,arg-type]
        )
        job = make_job()
        assert selector.query(job, 0.0).force == force
        job.sampling = Sampling(max_tokens=4, seed=1, prompt_logprobs=0)
        assert selector.query(job, 0.0).force == mode


@pytest.mark.parametrize("policy", ["seconds", "round-robin"])
def test_requests_wait_for_the_routers_own_mode_and_not_for_one_they_asked_for(policy: str) -> None:
    alone = view(
        make_node("p0", "prefill", make_load(), COST), make_node("d0", "decode", make_load(), COST, is_cordoned=True)
    )
    selector = PolicySelector(PolicyHolder(make_policy(policy)), lambda: alone, lambda _: {}, force="remote")
    with pytest.raises(NoNodeTakesWork, match="mode remote needs"):
        selector.choose(make_job(), 0.0)
    with pytest.raises(Unavailable, match="mode remote needs") as caught:
        selector.choose(make_job(force="remote"), 0.0)
    assert not isinstance(caught.value, NoNodeTakesWork)
    assert "mode remote needs" in str(selector.blocked())


def test_a_policy_that_fails_blocks_and_ends_nobody_who_asks() -> None:
    selector = make_chooser()

    def fail(query: object, cluster: object) -> object:
        raise ZeroDivisionError

    selector.holder.live = type("Broken", (), {"name": "broken", "choose": staticmethod(fail)})()
    assert "ZeroDivisionError" in str(selector.blocked())


def test_a_mode_that_a_request_asked_for_is_no_choice_that_others_follow() -> None:
    """After a stretch of requests that asked for one node, those that did not stayed there, by the margin of the last
    mode."""
    cluster = view(make_node("p0", "prefill", make_load(), COST), make_node("d0", "decode", make_load(), COST))
    selector = PolicySelector(PolicyHolder(make_policy("seconds")), lambda: cluster, lambda _: {})
    own = selector.choose(make_job(), 0.0).record.mode
    for mode in ("remote", "local"):
        assert selector.choose(make_job(force=mode), 0.0).record.mode == mode
        assert selector.query(make_job(), 0.0).previous == own


def test_the_expected_output_follows_what_answers_take() -> None:
    selector = make_chooser()
    assert selector.query(make_job(), 0.0).expected_output == 256
    selector.note_end(300, 20)
    assert 20 < selector.query(make_job(), 0.0).expected_output < 256, "one answer is believed a little"
    for _ in range(500):
        selector.note_end(300, 20)
    assert selector.query(make_job(), 0.0).expected_output == 20
    job = make_job()
    job.emitted.extend(range(3995))
    assert selector.query(job, 0.0).expected_output == 5


def test_the_policy_is_swapped_between_two_decisions_and_the_shadow_has_no_effect() -> None:
    selector = make_chooser(shadow="seconds")
    first = selector.choose(make_job(), 0.0)
    assert (first.record.policy, first.record.shadow and first.record.shadow.policy) == ("round-robin", "seconds")
    selector.holder.live = make_policy("random")
    selector.holder.shadow = None
    second = selector.choose(make_job(), 0.0)
    assert (second.record.policy, second.record.shadow) == ("random", None)
    assert second.query.counter == first.query.counter + 1


def test_asking_has_no_effect() -> None:
    selector = make_chooser()
    job = make_job()
    assert selector.query(job, 0.0) == selector.query(job, 0.0)
    dry = selector.holder.live.choose(selector.query(job, 0.0), NODES)
    assert selector.choose(job, 0.0).record == dry.record


def test_what_is_expected_counts_as_cached_where_it_is_more_but_cannot_be_fetched() -> None:
    job = make_job()
    blocks = len(job.hashes_so_far()) // 16
    expected = {"d1-boot": blocks - 1, "p0-boot": blocks}
    query = make_chooser(expected=lambda hashes: expected).query(job, 0.0)
    tokens = job.chain.block_tokens
    assert query.held == {"d1-boot": blocks * tokens} and query.cached == {
        "d1-boot": blocks * tokens,
        "p0-boot": blocks * tokens,
    }
    nothing = make_chooser(expected=lambda hashes: {}).query(job, 0.0)
    assert nothing.held is None and nothing.cached == {"d1-boot": blocks * tokens}


class Broken:
    name = "broken"

    def choose(self, query: Query, view: ClusterView) -> Decision:
        raise ZeroDivisionError("a bug of the policy's author")

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        raise AssertionError("nobody asks a shadow this")


@pytest.mark.parametrize(("shadow", "agrees"), [("seconds", True), ("round-robin", False)])
def test_a_shadow_agrees_where_it_would_take_the_same_nodes_in_the_same_mode(shadow: str, agrees: bool) -> None:
    selector = make_chooser("seconds", shadow)
    record = selector.choose(make_job(force="remote" if agrees else "local"), 0.0).record
    other = selector.holder.shadow.choose(selector.query(make_job(), 0.0), NODES).record  # type: ignore[union-attr]
    assert record.shadow is not None and record.shadow.policy == shadow == other.policy
    same = (record.shadow.mode, record.shadow.prefill, record.shadow.decode) == (
        record.mode, record.prefill, record.decode,
    )  # fmt: skip
    assert record.shadow.agrees is same is agrees


def test_a_shadow_with_a_bug_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    selector = make_chooser()
    selector.holder.shadow = Broken()
    decision = selector.choose(make_job(), 0.0)
    assert decision.record.policy == "round-robin" and decision.record.shadow is None
    assert "the shadow policy broken failed" in caplog.text


@dataclass
class Waiting:
    num_all: int
    num_taken: int


def test_a_policy_is_told_how_many_wait_in_the_router_for_nodes_that_take_them() -> None:
    selector = make_chooser()
    assert selector.choose(make_job(), 0.0).query.num_held == 0
    selector.queue = Waiting(9, 7)
    assert selector.choose(make_job(), 0.0).query.num_held == 7


def test_a_policy_is_told_what_was_sent_lately_and_not_what_was_only_chosen() -> None:
    selector = make_chooser("seconds")
    remote, local = (selector.choose(make_job(force=mode), 0.0) for mode in ("remote", "local"))
    assert (remote.first.role, local.first.role) == ("prefill", "decode"), "p0 has nothing cached, d1 has"
    assert selector.query(make_job(), 0.0).busy_serving == selector.query(make_job(), 0.0).busy_decoding == 0.0
    selector.note_sent(remote, 1.0)
    query = selector.query(make_job(), 1.0)
    assert query.busy_serving > 0.0 and query.busy_decoding == 0.0
    selector.note_sent(local, 1.0)
    query = selector.query(make_job(), 1.0)
    assert query.busy_decoding > 0.0 and query.busy_serving > selector.query(make_job(), 2.0).busy_serving > 0.0


def test_a_policy_is_told_how_much_of_what_prompts_had_before_is_lost() -> None:
    selector = make_chooser("seconds")
    assert selector.query(make_job(), 0.0).lost == 0.0
    selector.note_prefix(400, 300)
    assert selector.query(make_job(), 0.0).lost == 0.0, "no answer has ended"
    selector.note_end(900, 50)
    assert selector.query(make_job(), 0.0).lost == pytest.approx(100 / (400 + 900 * USUAL_PROMPTS / NEWEST_PREFIX))


def test_what_a_prompt_fetches_or_shares_keeps_no_node_busy() -> None:
    """A pulled prefix counted as if it were computed: nodes that fetch much looked busy with prompts."""

    def busy(decision: Decision | None) -> float:
        assert decision is not None
        selector = make_chooser("seconds")
        selector.note_sent(decision, 1.0)
        query = selector.query(make_job(), 1.0)
        return query.busy_serving + query.busy_decoding

    prefill, decode = NODES.find("p0-boot"), NODES.find("d1-boot")
    assert prefill is not None and decode is not None
    alone = make_decision(Query(1000), NODES, prefill, decode).pulling(None)
    cached, more = (make_decision(Query(1000, cached={"p0-boot": n}), NODES, prefill, decode) for n in (600, 800))
    assert busy(alone.pulling(decode, 600)) == busy(cached.pulling(None)) < busy(alone)
    assert busy(more.pulling(decode, 600)) == busy(more.pulling(None))
    job = make_job(fork_of="parent", fork_on="d1-boot")
    fork = make_chooser("seconds").follow(job, 0.0)
    shared = make_decision(
        Query(len(job.prompt), cached={"d1-boot": len(job.prompt) - 1}), NODES, None, decode
    ).pulling(None)
    assert busy(fork) == busy(shared) > 0.0


def test_a_fork_goes_to_the_node_of_its_parent_and_every_node_that_could_serve_is_room_for_it() -> None:
    """It went to its parent's node only once that one had a row: forks waited beside idle nodes."""
    full = make_node("d1", "decode", queue(10**6))
    nodes = view(make_node("p0", "prefill"), make_node("d0", "decode"), full)
    selector = PolicySelector(PolicyHolder(make_policy("product")), lambda: nodes, lambda _: {})
    decision = selector.follow(make_job(fork_of="parent", fork_on="d1-boot"), 0.0)
    assert decision is not None
    assert (decision.record.policy, decision.record.mode, decision.decode.name) == (FORK, "local", "d1")
    assert Headroom().usable(decision) == {"p0-boot", "d0-boot", "d1-boot"}
    assert Headroom().has_open(decision)
